"""Rows that begin alike: the prompt of many responses is packed, and computed, once.

    found = families(ids, mask)                 # [Family(rows=(0, 1, 5), shared=12), Family(rows=(2,), shared=0), ...]
    packed = pack(ids, at, found)               # tokens, lengths and parents for a `PackedModel`, and where to look

What rows share is what stands before their first counted token, where that is the same in all of them: the prompt of
a group of samples, or the first turns of a conversation. It is exact: a token does not see what comes after it, so
the hidden states of a prompt are the same before each response, and its gradient is the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from camshaft.dataproto import Ragged


class Family(NamedTuple):
    """Rows, and how many tokens they have in common at their beginning."""

    rows: tuple[int, ...]
    shared: int
    """0 for a row alone, which is packed whole."""


@dataclass(frozen=True)
class Packing:
    """Rows as a `PackedModel` takes them."""

    tokens: Tensor
    lengths: list[int]
    parents: list[int | None] | None
    at: Tensor
    """Where each counted token is now, in the order in which the rows had them."""
    taken: Tensor | None = None
    """The place in the rows that each token is from; None: they are as they were."""

    def of_tokens(self, values: Tensor) -> Tensor:
        """What is said of the tokens of the rows, as it goes with `tokens`."""
        return values if self.taken is None else values[self.taken.to(values.device)]


def families(ids: Ragged, mask: Ragged) -> list[Family]:
    """Each row is in one of them; in the order of their first rows."""
    tokens, counted = ids.values.cpu().numpy(), mask.values.cpu().numpy().astype(bool)
    members: dict[bytes | int, list[int]] = {}
    before: dict[bytes | int, int] = {}
    start = 0
    for row, length in enumerate(ids.lengths.tolist()):
        stop = start + length
        first = int(counted[start:stop].argmax()) if length else 0
        alone = first == 0  # nothing is counted, or nothing stands before it
        key = row if alone else tokens[start : start + first].tobytes()
        members.setdefault(key, []).append(row)
        before[key] = first
        start = stop
    return [Family(tuple(rows), before[key] if len(rows) > 1 else 0) for key, rows in members.items()]


def pack(ids: Ragged, at: Tensor, found: Sequence[Family] = ()) -> Packing:
    """The families one after the other: what is shared, then the rest of each row; without any, the rows as they are.

    `at` says where the counted tokens are in the rows.
    """
    if not any(family.shared for family in found):
        return Packing(ids.values, ids.lengths.tolist(), None, at)
    sizes = ids.lengths.tolist()
    starts = [0, *accumulate(sizes)]
    spans: list[tuple[int, int]] = []
    parents: list[int | None] = []
    moved = torch.zeros(len(sizes), dtype=torch.int64)  # how far the rest of each row is from where it was
    place = 0
    for family in found:
        parent = None
        if family.shared:
            parent = len(spans)
            spans.append((starts[family.rows[0]], starts[family.rows[0]] + family.shared))
            parents.append(None)
            place += family.shared
        for row in family.rows:
            first = starts[row] + family.shared
            moved[row] = place - first
            spans.append((first, starts[row + 1]))
            parents.append(parent)
            place += starts[row + 1] - first
    taken = torch.cat([torch.arange(first, stop) for first, stop in spans])
    rows = torch.repeat_interleave(torch.arange(len(sizes)), ids.lengths)
    lengths = [stop - first for first, stop in spans]
    return Packing(ids.values[taken.to(ids.values.device)], lengths, parents, at + moved[rows[at]], taken)
