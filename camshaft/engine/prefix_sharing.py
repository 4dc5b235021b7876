"""Prefix sharing: computes a prompt once for all of its responses.

    groups = prefix_groups(ids, mask)       # [PrefixGroup(rows=(0, 1, 5), shared=12), PrefixGroup(rows=(2,), shared=0)]
    packed = pack_rows(ids, at, groups)     # tokens, `Packing` and positions for a `PackedModel`

A counted token is one that `loss_mask` selects. Rows with equal tokens before their first counted token form a prefix
group: the samples of one prompt, or continuations of the same first turns. The result is exact. With causal attention,
the hidden states of a prompt do not depend on the response that follows, and the gradient of the prompt is the sum over
its responses.
"""

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
    """Number of tokens in the common prefix; 0 for a single row, which is packed as one segment."""

    def tokens(self, lengths: Sequence[int]) -> int:
        """Return the number of tokens to compute, with the prefix counted once; `lengths` covers the whole batch."""
        return self.shared + sum(lengths[row] - self.shared for row in self.rows)


@dataclass(frozen=True)
class PackedRows:
    """Arguments for a `PackedModel`: rows packed one after the other, each shared prefix once."""

    tokens: Tensor
    """(N,) token ids."""
    packing: Packing
    at: Tensor
    """(M,) offset of each counted token in `tokens`, in the order of the rows."""
    source: Tensor | None = None
    """(N,) offset of each token in the flattened rows; None if `tokens` are the flattened rows."""

    def reorder(self, values: Tensor) -> Tensor:
        """Return those per-token `values` of the flattened rows that belong to `tokens`, in their order."""
        return values if self.source is None else values[self.source.to(values.device)]


def prefix_groups(ids: Ragged, mask: Ragged, routed_experts: Ragged | None = None) -> list[PrefixGroup]:
    """Group the rows by the tokens before their first counted token, in the order of first occurrence.

    With `routed_experts`, the tokens of a common prefix also have equal experts.
    """
    tokens, counted = ids.values.cpu().numpy(), mask.values.cpu().numpy().astype(bool)
    experts = None if routed_experts is None else routed_experts.values.cpu().numpy()
    members: dict[bytes | int, list[int]] = {}
    prefix_lengths: dict[bytes | int, int] = {}
    start = 0
    for row, length in enumerate(ids.lengths.tolist()):
        stop = start + length
        prefix_length = int(counted[start:stop].argmax()) if length else 0  # 0 also if no token of the row is counted
        key = row if prefix_length == 0 else tokens[start : start + prefix_length].tobytes()
        if experts is not None and isinstance(key, bytes):
            key += experts[start : start + prefix_length].tobytes()
        members.setdefault(key, []).append(row)
        prefix_lengths[key] = prefix_length
        start = stop
    return [PrefixGroup(tuple(rows), prefix_lengths[key] if len(rows) > 1 else 0) for key, rows in members.items()]


def pack_rows(ids: Ragged, at: Tensor, groups: Sequence[PrefixGroup] = ()) -> PackedRows:
    """Pack the prefix groups one after the other: first the prefix, then the remaining tokens of each row.

    Without shared prefixes, rows are packed in their order. `at` (M,) holds the offsets of the counted tokens in the
    flattened rows.
    """
    lengths = ids.lengths.tolist()
    if not any(group.shared for group in groups):
        return PackedRows(ids.values, Packing(lengths), at)
    starts = [0, *accumulate(lengths)]
    segments: list[tuple[int, int]] = []
    prefix_of: list[int | None] = []
    # Per row: offset of a counted token in the packed tokens, minus its offset in the flattened rows.
    shift = torch.zeros(len(lengths), dtype=torch.int64)
    size = 0
    for group in groups:
        prefix = None
        if group.shared:
            prefix = len(segments)
            segments.append((starts[group.rows[0]], starts[group.rows[0]] + group.shared))
            prefix_of.append(None)
            size += group.shared
        for row in group.rows:
            start, stop = starts[row] + group.shared, starts[row + 1]
            shift[row] = size - start
            segments.append((start, stop))
            prefix_of.append(prefix)
            size += stop - start
    source = torch.cat([torch.arange(start, stop) for start, stop in segments])
    row_ids = torch.repeat_interleave(torch.arange(len(lengths)), ids.lengths)
    packing = Packing([stop - start for start, stop in segments], prefix_of)
    return PackedRows(ids.values[source.to(ids.values.device)], packing, at + shift[row_ids[at]], source)
