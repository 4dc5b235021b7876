"""Splits a mini-batch into micro-batches, packs their rows, and restores the order of rows.

    plan = plan_micro_batches(lengths, size=4, max_tokens=None)
    parts = [model(batch.reorder(rows)) for rows in plan]
    predictions = restore_order(plan, parts)

By count: consecutive groups of `size` rows. By token budget: as few groups of at most `max_tokens` tokens as possible,
balanced by the cost of rows including attention (`algorithms/partition.py`), the most expensive group first. The budget
is a hard limit: a longer row raises an error. Within a micro-batch rows are sorted by length, so that attention over
packed rows makes fewer and larger calls.

Prefix sharing computes a prompt once for all of its responses:

    groups = prefix_groups(ids, mask)       # [PrefixGroup(rows=(0, 1, 5), shared=12), PrefixGroup(rows=(2,), shared=0)]
    packed = pack_rows(ids, at, groups)     # tokens, `Packing` and positions for a `PackedModel`

Rows share the tokens before their first counted token if these are equal: the prompt of a group of samples, or the
first turns of a conversation. The result is exact. With causal attention the hidden states of a prompt do not depend on
the response that follows, and the gradient of the prompt is the sum over its responses.
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
"""Default: the pivot of a model of about eight billion parameters."""


EXPECTED_BATCH = (
    "a DataProto with a Ragged column 'input_ids', or a mapping with tensors 'input_ids' and 'attention_mask' of shape "
    "(B, S); other data needs a preprocess_fn that builds one of these"
)


def has_input_ids(batch: Any) -> bool:
    return isinstance(batch, DataProto | Mapping) and "input_ids" in batch


def as_batch(batch: Any) -> DataProto:
    """Return a `DataProto` with `input_ids` and `loss_mask`; `BatchError` if `batch` has another form.

    A mapping with `input_ids` and `attention_mask` of shape (B, S) is unpadded, with every other (B, S) tensor in it.
    Without a `loss_mask` all tokens but the first of each row count.
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
        raise BatchError("loss_mask and input_ids have rows of different lengths")
    firsts = mask.offsets[:-1][mask.lengths > 0]
    if bool(mask.values[firsts.to(mask.values.device)].any()):
        raise BatchError(
            "loss_mask is set on the first token of a row, which the model does not predict; clear it there"
        )
    return batch


def _describe(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return f"a tensor of shape {tuple(batch.shape)}"
    if isinstance(batch, DataProto | Mapping):
        names = batch.columns if isinstance(batch, DataProto) else batch
        return f"a {type(batch).__name__} without 'input_ids' (columns: {', '.join(map(str, names)) or 'none'})"
    return f"a {type(batch).__name__}"


def _unpad(batch: Mapping[str, Any]) -> DataProto:
    if "attention_mask" not in batch:
        raise BatchError(
            f"the batch is a mapping without 'attention_mask' (keys: {', '.join(batch)}); expected {EXPECTED_BATCH}"
        )
    mask = torch.as_tensor(batch["attention_mask"]).bool()
    columns: dict[str, Any] = {}
    for name, value in batch.items():
        if name in ("attention_mask", "position_ids"):
            continue
        grid = isinstance(value, Tensor) and value.shape[:2] == mask.shape
        columns[name] = Ragged.from_padded(value, mask) if grid else value
    return DataProto.from_dict(columns)


def plan_micro_batches(
    lengths: Tensor,
    size: int | None,
    max_tokens: int | None,
    equalise: Callable[[int], int] = lambda count: count,
    pivot: float = PIVOT,
    prefix_groups: Sequence[PrefixGroup] | None = None,
) -> list[list[int]]:
    """Return the rows of each micro-batch. `equalise(count)` returns the largest count of all ranks.

    With both limits a micro-batch respects both. A rank with fewer rows than micro-batches gets empty ones, in which
    the engine runs a row with weight 0. `pivot` is the length at which attention costs as much as the
    rest of the model (`attention_pivot`); token budgets are balanced with it. With a token budget, rows of
    one prefix group share a micro-batch as far as the budget allows, and their prefix counts once.
    """
    sizes = lengths.tolist()
    if not sizes:
        raise BatchError("the batch has no rows")
    if max_tokens is None:
        size = size or len(sizes)
        groups = [list(range(i, min(i + size, len(sizes)))) for i in range(0, len(sizes), size)]
        missing = equalise(len(groups)) - len(groups)
        groups = _split_further(groups, missing) if missing else groups
    else:
        longest = max(range(len(sizes)), key=sizes.__getitem__)
        if sizes[longest] > max_tokens:
            raise BatchError(
                f"row {longest} has {sizes[longest]} tokens, more than the budget of {max_tokens} tokens a "
                "micro-batch: raise the *_max_token_len_per_gpu key, or lower data.max_prompt_length or "
                "data.max_response_length"
            )
        rows = [PrefixGroup((row,), 0) for row in range(len(sizes))]
        units = rows if prefix_groups is None or size is not None else _split_groups(prefix_groups, sizes, max_tokens)
        budget = Budget(
            sizes=[unit.tokens(sizes) for unit in units],
            costs=[_cost(unit, sizes, pivot) for unit in units],
            most_rows=size or len(units),
            max_tokens=max_tokens,
        )
        groups = budget.fewest()
        count = equalise(len(groups))
        if count > len(groups):
            groups = budget.balanced(count) or _split_further(groups, count - len(groups))
        groups = sorted(groups, key=lambda rows: (-budget.cost(rows), rows))
        groups = [[row for number in group for row in units[number].rows] for group in groups]
    return [sorted(group, key=lambda row: (sizes[row], row)) for group in groups]


def _cost(unit: PrefixGroup, sizes: Sequence[int], pivot: float) -> float:
    shared = row_cost(unit.shared, pivot)
    return shared + sum(row_cost(sizes[row], pivot) - shared for row in unit.rows)


def _split_groups(groups: Sequence[PrefixGroup], sizes: Sequence[int], max_tokens: int) -> list[PrefixGroup]:
    """Split each group into parts of at most `max_tokens` tokens; most groups are not split."""
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
class Budget:
    """Rows of given sizes and costs, to be grouped under limits of rows and tokens."""

    sizes: Sequence[int]
    costs: Sequence[float]
    most_rows: int
    max_tokens: int

    def cost(self, rows: Sequence[int]) -> float:
        return sum(self.costs[row] for row in rows)

    def fewest(self) -> list[list[int]]:
        """Return as few groups as possible, balanced if that needs no additional group.

        This is bin packing: best-fit decreasing is close to optimal, and balancing is used if it needs fewer groups.
        """
        groups = self._packed()
        least = max(-(-sum(self.sizes) // self.max_tokens), -(-len(self.sizes) // self.most_rows))
        groups = self.balanced(len(groups)) or groups
        while len(groups) > least and (fewer := self.balanced(len(groups) - 1)):
            groups = fewer
        return groups

    def balanced(self, count: int) -> list[list[int]] | None:
        """Return `count` groups of nearly equal cost within both limits, or None if none is found."""
        # Groups of equal cost may exceed a tight token budget; groups of equal tokens rarely do.
        candidates = [self._repair(karmarkar_karp(weights, count)) for weights in (self.costs, self.sizes)]
        within = [groups for groups in candidates if groups is not None]
        return min(within, key=lambda groups: max(map(self.cost, groups)), default=None)

    def _repair(self, groups: list[list[int]]) -> list[list[int]] | None:
        """Move the shortest rows of groups over a limit to the cheapest group with space; None if there is none."""
        groups, moved = [sorted(rows, key=lambda row: (-self.sizes[row], row)) for rows in groups], []
        tokens = [sum(self.sizes[row] for row in rows) for rows in groups]
        costs = [self.cost(rows) for rows in groups]
        for index, rows in enumerate(groups):
            while tokens[index] > self.max_tokens or len(rows) > self.most_rows:
                moved.append(row := rows.pop())
                tokens[index] -= self.sizes[row]
                costs[index] -= self.costs[row]
        for row in sorted(moved, key=lambda row: (-self.sizes[row], row)):
            left = self.max_tokens - self.sizes[row]
            candidates = [p for p, rows in enumerate(groups) if tokens[p] <= left and len(rows) < self.most_rows]
            if not candidates:
                return None
            target = min(candidates, key=lambda p: (costs[p], p))
            groups[target].append(row)
            tokens[target] += self.sizes[row]
            costs[target] += self.costs[row]
        return groups

    def _packed(self) -> list[list[int]]:
        """Assign rows, longest first, to the fullest group with space (best-fit decreasing)."""
        groups: list[list[int]] = []
        open_groups: list[tuple[int, int]] = []  # (free tokens, number of the group), sorted
        for row in sorted(range(len(self.sizes)), key=lambda row: (-self.sizes[row], row)):
            index = bisect.bisect_left(open_groups, (self.sizes[row], -1))
            if index < len(open_groups):
                left, target = open_groups.pop(index)
            else:
                left, target = self.max_tokens, len(groups)
                groups.append([])
            groups[target].append(row)
            if len(groups[target]) < self.most_rows:
                bisect.insort(open_groups, (left - self.sizes[row], target))
        return groups


def _split_further(groups: list[list[int]], more: int) -> list[list[int]]:
    """Add `more` groups by halving the largest; empty ones if no group can be halved."""
    groups = [list(group) for group in groups]
    for _ in range(more):
        largest = max(range(len(groups)), key=lambda g: len(groups[g]))
        rows = groups[largest]
        half = (len(rows) + 1) // 2
        groups[largest] = rows[:half]
        groups.append(rows[half:])
    return groups


def restore_order(plan: Sequence[Sequence[int]], parts: Sequence[Any]) -> Any:
    """Concatenate `Ragged` columns, tensors or lists of micro-batches, in the order of the rows before the split."""
    rows = [row for group in plan for row in group]
    order = torch.empty(len(rows), dtype=torch.int64)
    order[torch.tensor(rows, dtype=torch.int64)] = torch.arange(len(rows))
    first = parts[0]
    if isinstance(first, Ragged):
        return Ragged.concat(list(parts)).select(order)
    if isinstance(first, Tensor):
        return torch.cat(list(parts))[order.to(first.device)]
    values = [value for part in parts for value in part]
    return [values[index] for index in order.tolist()]


# -- prefix sharing -------------------------------------------------------------------------------


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
