"""A game in which it pays to ask first: four boxes, one prize, and a hint for those who ask.

Each character is an answer, so that a model without any training plays too: its code decides which box it opens, or
that it asks for the hint. Without the hint, no answer finds the prize in more than a quarter of the games.
"""

import itertools
import random

BOXES = 4
HINTS = ("aaaaaaaa", "bbbbbbbb", "cccccccc", "dddddddd")
"""The hint for each box."""


class Hint:
    """The first answer opens a box, or asks for the hint. After the hint, an answer opens a box."""

    def reset(self, seed):
        self.prize, self.asked = random.Random(seed).randrange(BOXES), False

    def step(self, answer):
        code = ord(answer[0]) if answer else 0
        if not self.asked and code % (2 * BOXES) >= BOXES:
            self.asked = True
            return HINTS[self.prize], 0.0, False
        return None, float(code % BOXES == self.prize), True


def best_scores():
    """Return the best expected scores of policies that never ask and that always ask, over all of these policies."""
    prizes = range(BOXES)
    one_turn = max(sum(box == prize for prize in prizes) / BOXES for box in prizes)
    plans = itertools.product(prizes, repeat=BOXES)  # the box that a policy opens after each hint
    two_turns = max(sum(plan[prize] == prize for prize in prizes) / BOXES for plan in plans)
    return one_turn, two_turns
