"""Length classes: rows with similar numbers of positions are in adjacent slots, and attention is computed per class.

A decode step on a CPU reads as many positions of each slot as the longest row of its class has. Without classes, a
single long row makes attention as slow as if all rows were as long.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from camshaft.rollout.builtin.kv_cache import KVCache
from camshaft.rollout.builtin.steps import LengthClass

GROWTH = 1.5
"""Ratio of the limits of adjacent classes."""

SHORTEST = 64
"""Limit of the shortest class. Rows that are all shorter need no classes."""

MIN_SAVED = 256
"""Minimum number of positions that a class saves. Fewer cost less than one more call of the attention."""


def arrange(cache: KVCache, lengths: list[int]) -> tuple[list[LengthClass], Tensor]:
    """Move rows with these numbers of positions so that each class has adjacent slots.

    Return the classes, and the earlier slot of the row in each slot.
    """
    classes, indices = plan(lengths)
    order = torch.arange(len(lengths))
    if moved := moves(classes, indices):
        sources, targets = map(list, zip(*moved, strict=True))
        cache.permute(sources, targets, [lengths[slot] for slot in sources])
        order[targets] = torch.tensor(sources)
    return classes, order


def class_of(length: int) -> int:
    """Return the class of a row with `length` positions: 0 up to `SHORTEST`."""
    return max(0, math.ceil(math.log(length / SHORTEST, GROWTH)))


def plan(lengths: Sequence[int]) -> tuple[list[LengthClass], list[int]]:
    """Divide rows into classes, the longest rows first. Return the classes, and the class of each row."""
    numbers = [class_of(length) for length in lengths]
    longest: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for number, length in zip(numbers, lengths, strict=True):
        longest[number] = max(longest.get(number, 0), length)
        sizes[number] = sizes.get(number, 0) + 1
    classes: list[LengthClass] = []
    index_of: dict[int, int] = {}
    for number in sorted(sizes, reverse=True):
        if classes and (classes[-1][1] - longest[number]) * sizes[number] < MIN_SAVED:
            classes[-1] = classes[-1][0] + sizes[number], classes[-1][1]
        else:
            classes.append((sizes[number], longest[number]))
        index_of[number] = len(classes) - 1
    return classes, [index_of[number] for number in numbers]


def moves(classes: Sequence[LengthClass], indices: Sequence[int]) -> list[tuple[int, int]]:
    """Return the moves (source, target) after which the rows of each class are in adjacent slots.

    Rows that are in a slot of their class stay there. Sources and targets are the same slots in different orders.
    """
    stops = list(itertools.accumulate(size for size, _ in classes))
    free: list[list[int]] = [[] for _ in classes]
    slot = 0
    for index, stop in enumerate(stops):
        free[index] = [slot for slot in range(slot, stop) if indices[slot] != index]
        slot = stop
    misplaced = sorted(slot for slots in free for slot in slots)
    return [(source, free[indices[source]].pop(0)) for source in misplaced]
