"""Prefix sharing: compute a prompt once for all of its responses.

    groups = prefix_groups(ids, mask)       # [PrefixGroup(rows=(0, 1, 5), shared=12), PrefixGroup(rows=(2,), shared=0)]
    packed = pack_rows(ids, at, groups)     # tokens, `Packing` and positions for a `PackedModel`

Rows share the tokens before their first counted token if these are equal: the prompt of a group of samples, or the
first turns of a conversation. The result is exact. With causal attention the hidden states of a prompt do not depend on
the response that follows, and the gradient of the prompt is the sum over its responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from camshaft.dataproto import Ragged
from camshaft.models.packing import Packing


class PrefixGroup(NamedTuple):
    """Rows that begin with the same tokens."""

    rows: tuple[int, ...]
    shared: int
    """Length of the common prefix; 0 for a single row, which is packed as one segment."""

    def tokens(self, lengths: Sequence[int]) -> int:
        """Number of tokens to compute, with the prefix counted once; `lengths` are those of all rows."""
        return self.shared + sum(lengths[row] - self.shared for row in self.rows)


@dataclass(frozen=True)
class PackedRows:
    """Rows in the form that a `PackedModel` takes."""

    tokens: Tensor
    """(N,) token ids."""
    packing: Packing
    at: Tensor
    """(M,) offset of each counted token in `tokens`, in the order of the rows."""
    source: Tensor | None = None
    """(N,) offset of each token in the flattened rows; None if the order is the same."""

    def reorder(self, values: Tensor) -> Tensor:
        """Values per token of the flattened rows, in the order of `tokens`."""
        return values if self.source is None else values[self.source.to(values.device)]


def prefix_groups(ids: Ragged, mask: Ragged) -> list[PrefixGroup]:
    """Assign each row to one group; groups are in the order of their first rows."""
    tokens, counted = ids.values.cpu().numpy(), mask.values.cpu().numpy().astype(bool)
    members: dict[bytes | int, list[int]] = {}
    prefix_lengths: dict[bytes | int, int] = {}
    start = 0
    for row, length in enumerate(ids.lengths.tolist()):
        stop = start + length
        first = int(counted[start:stop].argmax()) if length else 0  # 0 also if no token of the row is counted
        key = row if first == 0 else tokens[start : start + first].tobytes()
        members.setdefault(key, []).append(row)
        prefix_lengths[key] = first
        start = stop
    return [PrefixGroup(tuple(rows), prefix_lengths[key] if len(rows) > 1 else 0) for key, rows in members.items()]


def pack_rows(ids: Ragged, at: Tensor, groups: Sequence[PrefixGroup] = ()) -> PackedRows:
    """Pack the groups one after the other: the prefix, then the rest of each row. Without a shared prefix, row by row.

    `at` (M,) are the offsets of the counted tokens in the flattened rows.
    """
    lengths = ids.lengths.tolist()
    if not any(group.shared for group in groups):
        return PackedRows(ids.values, Packing(lengths), at)
    starts = [0, *accumulate(lengths)]
    segments: list[tuple[int, int]] = []
    prefix_of: list[int | None] = []
    shift = torch.zeros(len(lengths), dtype=torch.int64)  # of the counted part of each row, from rows to packed tokens
    size = 0
    for group in groups:
        prefix = None
        if group.shared:
            prefix = len(segments)
            segments.append((starts[group.rows[0]], starts[group.rows[0]] + group.shared))
            prefix_of.append(None)
            size += group.shared
        for row in group.rows:
            first, stop = starts[row] + group.shared, starts[row + 1]
            shift[row] = size - first
            segments.append((first, stop))
            prefix_of.append(prefix)
            size += stop - first
    source = torch.cat([torch.arange(first, stop) for first, stop in segments])
    row_ids = torch.repeat_interleave(torch.arange(len(lengths)), ids.lengths)
    packing = Packing([stop - first for first, stop in segments], prefix_of)
    return PackedRows(ids.values[source.to(ids.values.device)], packing, at + shift[row_ids[at]], source)
