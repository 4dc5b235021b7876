"""Splits a mini-batch into micro-batches, packs their rows, and restores the order of the rows.

    plan = plan_micro_batches(lengths, size=4, max_tokens=None)
    parts = [model(batch.reorder(rows)) for rows in plan]
    predictions = restore_order(plan, parts)

With `size`, a micro-batch holds up to `size` consecutive rows. With `max_tokens`, rows are assigned to as few
micro-batches of at most `max_tokens` tokens as possible. These micro-batches are balanced by the compute cost of their
rows, including attention (`algorithms/partition.py`), and the most expensive one comes first. A row with more than
`max_tokens` tokens raises an error. Within a micro-batch rows are sorted by length, because packed attention batches
rows of equal length into one call.

Prefix sharing computes a prompt once for all of its responses:

    groups = prefix_groups(ids, mask)       # [PrefixGroup(rows=(0, 1, 5), shared=12), PrefixGroup(rows=(2,), shared=0)]
    packed = pack_rows(ids, at, groups)     # tokens, `Packing` and positions for a `PackedModel`

A counted token is one that `loss_mask` selects. Rows with equal tokens before their first counted token form a prefix
group: the samples of one prompt, or continuations of the same first turns. The result is exact. With causal attention,
the hidden states of a prompt do not depend on the response that follows, and the gradient of the prompt is the sum over
its responses.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from camshaft.algorithms.partition import attention_pivot, karmarkar_karp, row_cost
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import BatchError
from camshaft.models.packing import Packing

PIVOT = attention_pivot(hidden_size=4096)
"""Default pivot: that of a model with about eight billion parameters."""


EXPECTED_BATCH = (
    "a DataProto with a Ragged column 'input_ids', or a mapping with tensors 'input_ids' and 'attention_mask' of shape "
    "(B, S); other data needs a preprocess_fn that builds one of these"
)


def has_input_ids(batch: Any) -> bool:
    return isinstance(batch, DataProto | Mapping) and "input_ids" in batch


def as_batch(batch: Any) -> DataProto:
    """Convert `batch` to a `DataProto` with `input_ids` and `loss_mask`; raise `BatchError` for other types.

    A mapping with `input_ids` and `attention_mask` of shape (B, S) is unpadded, as is every other (B, S) tensor in it.
    A missing `loss_mask` selects all tokens except the first of each row.
    """
    if not has_input_ids(batch):
        raise BatchError(f"the batch is {_describe(batch)}; expected {EXPECTED_BATCH}")
    if not isinstance(batch, DataProto):
        batch = _unpad(batch)
    ids = batch.ragged("input_ids")
    if "loss_mask" not in batch:
        return batch.with_columns(loss_mask=ids.like(ids.positions() > 0))
    mask = batch.ragged("loss_mask")
    if not torch.equal(mask.lengths, ids.lengths):
        raise BatchError("loss_mask and input_ids have rows of different lengths; give each token one mask value")
    firsts = mask.offsets[:-1][mask.lengths > 0]
    if bool(mask.values[firsts.to(mask.values.device)].any()):
        raise BatchError(
            "loss_mask selects the first token of a row, which the model does not predict; set it to 0 there"
        )
    return batch


def _describe(batch: Any) -> str:
    """Return the type of `batch`, with its shape or column names, for an error message."""
    if isinstance(batch, Tensor):
        return f"a tensor of shape {tuple(batch.shape)}"
    if isinstance(batch, DataProto | Mapping):
        names = batch.columns if isinstance(batch, DataProto) else batch
        return f"a {type(batch).__name__} without 'input_ids' (columns: {', '.join(map(str, names)) or 'none'})"
    return f"a {type(batch).__name__}"


def _unpad(batch: Mapping[str, Any]) -> DataProto:
    """Convert padded (B, S) tensors to `Ragged` columns and drop the mask and the position ids."""
    if "attention_mask" not in batch:
        raise BatchError(
            f"the batch is a mapping without 'attention_mask' (keys: {', '.join(batch)}); expected {EXPECTED_BATCH}"
        )
    mask = torch.as_tensor(batch["attention_mask"]).bool()
    columns: dict[str, Any] = {}
    for name, value in batch.items():
        if name in ("attention_mask", "position_ids"):
            continue
        per_token = isinstance(value, Tensor) and value.shape[:2] == mask.shape
        columns[name] = Ragged.from_padded(value, mask) if per_token else value
    return DataProto.from_dict(columns)


def plan_micro_batches(
    lengths: Tensor,
    size: int | None,
    max_tokens: int | None,
    equalise: Callable[[int], int] = lambda count: count,
    pivot: float = PIVOT,
    prefix_groups: Sequence[PrefixGroup] | None = None,
) -> list[list[int]]:
    """Return the row numbers of each micro-batch.

    A micro-batch respects both limits, `size` and `max_tokens`, if both are given. `equalise(count)` returns the
    maximum of `count` over all ranks, because every rank must run the same number of micro-batches. A rank with fewer
    rows than that gets empty lists, and the engine runs a dummy row with zero loss weight for each of them.

    A token budget also uses the last two arguments. `pivot` is the row length at which attention costs as much as the
    rest of the model (`attention_pivot`); micro-batches are balanced with it. Rows of one prefix group go to the same
    micro-batch if the budget allows, and the shared prefix counts once. With both limits, prefix groups are ignored.
    """
    sizes = lengths.tolist()
    if not sizes:
        raise BatchError("the batch has no rows; pass at least one row")
    if max_tokens is None:
        size = size or len(sizes)
        plan = [list(range(i, min(i + size, len(sizes)))) for i in range(0, len(sizes), size)]
        plan = _split_largest(plan, equalise(len(plan)) - len(plan))
    else:
        longest_row = max(range(len(sizes)), key=sizes.__getitem__)
        if sizes[longest_row] > max_tokens:
            raise BatchError(
                f"row {longest_row} has {sizes[longest_row]} tokens, which exceeds the budget of {max_tokens} tokens "
                "per micro-batch; raise the *_max_token_len_per_gpu key, or lower data.max_prompt_length or "
                "data.max_response_length"
            )
        rows = [PrefixGroup((row,), 0) for row in range(len(sizes))]
        units = rows if prefix_groups is None or size is not None else _split_groups(prefix_groups, sizes, max_tokens)
        packer = BinPacker(
            sizes=[unit.tokens(sizes) for unit in units],
            costs=[_cost(unit, sizes, pivot) for unit in units],
            max_items=size or len(units),
            max_tokens=max_tokens,
        )
        bins = packer.pack()
        count = equalise(len(bins))
        if count > len(bins):
            bins = packer.balance(count) or _split_largest(bins, count - len(bins))
        bins = sorted(bins, key=lambda items: (-packer.cost(items), items))
        plan = [[row for item in items for row in units[item].rows] for items in bins]
    return [sorted(micro_batch, key=lambda row: (sizes[row], row)) for micro_batch in plan]


def _cost(group: PrefixGroup, sizes: Sequence[int], pivot: float) -> float:
    """Return the compute cost of the rows of `group`, with their prefix counted once."""
    prefix_cost = row_cost(group.shared, pivot)
    return prefix_cost + sum(row_cost(sizes[row], pivot) - prefix_cost for row in group.rows)


def _split_groups(groups: Sequence[PrefixGroup], sizes: Sequence[int], max_tokens: int) -> list[PrefixGroup]:
    """Split each prefix group with more than `max_tokens` tokens into smaller groups."""
    parts: list[PrefixGroup] = []
    for group in groups:
        members: list[list[int]] = [[]]
        for row in group.rows:
            if members[-1] and PrefixGroup((*members[-1], row), group.shared).tokens(sizes) > max_tokens:
                members.append([])
            members[-1].append(row)
        parts += [PrefixGroup(tuple(rows), group.shared if len(rows) > 1 else 0) for rows in members]
    return parts


@dataclass(frozen=True)
class BinPacker:
    """Packs items (rows or prefix groups) into bins (micro-batches) with limits on items and tokens."""

    sizes: Sequence[int]
    """Number of tokens of each item."""
    costs: Sequence[float]
    """Compute cost of each item."""
    max_items: int
    max_tokens: int

    def cost(self, items: Sequence[int]) -> float:
        return sum(self.costs[item] for item in items)

    def pack(self) -> list[list[int]]:
        """Pack the items into as few bins as possible, balanced by cost if this needs no additional bin.

        Best-fit decreasing is close to optimal. Its result is replaced if `balance` finds as few or fewer bins.
        """
        bins = self._best_fit_decreasing()
        lower_bound = max(-(-sum(self.sizes) // self.max_tokens), -(-len(self.sizes) // self.max_items))
        bins = self.balance(len(bins)) or bins
        while len(bins) > lower_bound and (fewer_bins := self.balance(len(bins) - 1)):
            bins = fewer_bins
        return bins

    def balance(self, count: int) -> list[list[int]] | None:
        """Pack the items into `count` bins of nearly equal cost; return None if no such packing is found."""
        # Bins of equal cost may exceed a tight token budget; bins with equal numbers of tokens rarely do.
        candidates = [self._repair(karmarkar_karp(weights, count)) for weights in (self.costs, self.sizes)]
        valid = [bins for bins in candidates if bins is not None]
        return min(valid, key=lambda bins: max(map(self.cost, bins)), default=None)

    def _repair(self, bins: list[list[int]]) -> list[list[int]] | None:
        """Move the shortest items of bins over a limit to the cheapest bin with space; return None if no bin has."""
        bins, moved_items = [sorted(items, key=lambda item: (-self.sizes[item], item)) for items in bins], []
        tokens = [sum(self.sizes[item] for item in items) for items in bins]
        costs = [self.cost(items) for items in bins]
        for index, items in enumerate(bins):
            while tokens[index] > self.max_tokens or len(items) > self.max_items:
                moved_items.append(item := items.pop())
                tokens[index] -= self.sizes[item]
                costs[index] -= self.costs[item]
        for item in sorted(moved_items, key=lambda item: (-self.sizes[item], item)):
            limit = self.max_tokens - self.sizes[item]
            candidates = [b for b, items in enumerate(bins) if tokens[b] <= limit and len(items) < self.max_items]
            if not candidates:
                return None
            target = min(candidates, key=lambda b: (costs[b], b))
            bins[target].append(item)
            tokens[target] += self.sizes[item]
            costs[target] += self.costs[item]
        return bins

    def _best_fit_decreasing(self) -> list[list[int]]:
        """Assign items, longest first, to the fullest bin with space."""
        bins: list[list[int]] = []
        open_bins: list[tuple[int, int]] = []  # (free tokens, number of the bin), sorted
        for item in sorted(range(len(self.sizes)), key=lambda item: (-self.sizes[item], item)):
            index = bisect.bisect_left(open_bins, (self.sizes[item], -1))
            if index < len(open_bins):
                free_tokens, target = open_bins.pop(index)
            else:
                free_tokens, target = self.max_tokens, len(bins)
                bins.append([])
            bins[target].append(item)
            if len(bins[target]) < self.max_items:
                bisect.insort(open_bins, (free_tokens - self.sizes[item], target))
        return bins


def _split_largest(bins: list[list[int]], count: int) -> list[list[int]]:
    """Add `count` bins by halving the largest bin `count` times. If it holds one item, the new bin is empty."""
    bins = [list(items) for items in bins]
    for _ in range(count):
        largest = max(range(len(bins)), key=lambda b: len(bins[b]))
        items = bins[largest]
        middle = (len(items) + 1) // 2
        bins[largest] = items[:middle]
        bins.append(items[middle:])
    return bins


def restore_order(plan: Sequence[Sequence[int]], parts: Sequence[Any]) -> Any:
    """Concatenate the results of the micro-batches of `plan` in the original order of the rows.

    `parts` are `Ragged` columns, tensors or lists with one entry per row.
    """
    rows = [row for micro_batch in plan for row in micro_batch]
    order = torch.empty(len(rows), dtype=torch.int64)
    order[torch.tensor(rows, dtype=torch.int64)] = torch.arange(len(rows))
    sample = parts[0]
    if isinstance(sample, Ragged):
        return Ragged.concat(list(parts)).select(order)
    if isinstance(sample, Tensor):
        return torch.cat(list(parts))[order.to(sample.device)]
    values = [value for part in parts for value in part]
    return [values[index] for index in order.tolist()]


# -- prefix sharing -------------------------------------------------------------------------------


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
        """Select from per-token `values` of the flattened rows those of `tokens`, in their order."""
        return values if self.source is None else values[self.source.to(values.device)]


def prefix_groups(ids: Ragged, mask: Ragged) -> list[PrefixGroup]:
    """Group the rows by the tokens before their first counted token, in the order of first occurrence."""
    tokens, counted = ids.values.cpu().numpy(), mask.values.cpu().numpy().astype(bool)
    members: dict[bytes | int, list[int]] = {}
    prefix_lengths: dict[bytes | int, int] = {}
    start = 0
    for row, length in enumerate(ids.lengths.tolist()):
        stop = start + length
        prefix_length = int(counted[start:stop].argmax()) if length else 0  # 0 also if no token of the row is counted
        key = row if prefix_length == 0 else tokens[start : start + prefix_length].tobytes()
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
