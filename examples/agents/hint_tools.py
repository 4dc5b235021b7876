"""The game of `hint.py` with tools: `hint` tells where the prize is, and `open` opens a box.

Each character is an answer with one call, so that a model without any training plays too: its code decides which tool
it calls. Without the hint, no answer finds the prize in more than a quarter of the games.
"""

import random

from camshaft.agents.calls import Call, Parsed

BOXES = 4
HINTS = ("aaaaaaaa", "bbbbbbbb", "cccccccc", "dddddddd")
"""The hint for each box."""


class HintTools:
    """The first box that is opened counts."""

    def reset(self, seed):
        self.prize, self.opened = random.Random(seed).randrange(BOXES), None

    def hint(self) -> str:
        """Ask where the prize is."""
        return HINTS[self.prize]

    def open(self, box: int) -> str:
        """Open a box.

        Args:
            box: Number of the box, from 0 to 3.
        """
        self.opened = box if self.opened is None else self.opened
        return ""

    def get_reward(self) -> float:
        return float(self.opened == self.prize)


def parse(text):
    """Read the call in an answer of one character."""
    code = ord(text[0]) if text else 0
    asks = code % (2 * BOXES) >= BOXES
    return Parsed("", (Call("hint", {}) if asks else Call("open", {"box": code % BOXES}),))
