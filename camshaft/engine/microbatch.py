"""Splitting a mini-batch into micro-batches, and putting the rows back in order.

    plan = plan_micro_batches(lengths, size=4, max_tokens=None)
    parts = [batch.reorder(rows) for rows in plan]
    whole = restore_order(plan, predictions_of_parts)

By count: consecutive groups of `size` rows. By token budget: as few groups as hold at most `max_tokens`
tokens each, balanced so that no group is much heavier than another. The budget is a hard limit: a row
longer than it is an error that says so. Inside a micro-batch rows of one length are neighbours, which
attention over packed rows turns into fewer and larger calls. Every engine uses this; it knows no models.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from camshaft.dataproto import Ragged
from camshaft.errors import BatchError


def plan_micro_batches(
    lengths: Tensor,
    size: int | None,
    max_tokens: int | None,
    equalise: Callable[[int], int] = lambda count: count,
) -> list[list[int]]:
    """Rows of each micro-batch. `equalise(count)` returns the largest count of all ranks of the group.

    With both limits a micro-batch respects both. A rank with fewer rows than micro-batches gets empty ones, in which
    `MicroBatchRun` runs a row that counts for nothing.
    """
    sizes = lengths.tolist()
    if not sizes:
        raise BatchError("the batch has no rows")
    if max_tokens is None:
        size = size or len(sizes)
        groups = [list(range(i, min(i + size, len(sizes)))) for i in range(0, len(sizes), size)]
    else:
        longest = max(range(len(sizes)), key=sizes.__getitem__)
        if sizes[longest] > max_tokens:
            raise BatchError(
                f"row {longest} has {sizes[longest]} tokens, more than the budget of {max_tokens} tokens a "
                "micro-batch: raise the *_max_token_len_per_gpu key, or lower data.max_prompt_length or "
                "data.max_response_length"
            )
        groups = _by_budget(sizes, size or len(sizes), max_tokens)
    missing = equalise(len(groups)) - len(groups)
    groups = _split_further(groups, missing) if missing else groups
    return [sorted(group, key=lambda row: (sizes[row], row)) for group in groups]


def _by_budget(sizes: Sequence[int], most_rows: int, max_tokens: int) -> list[list[int]]:
    """Longest first into the lightest group that has room; one more group whenever none has."""
    count = max(-(-sum(sizes) // max_tokens), -(-len(sizes) // most_rows))
    groups: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for row in sorted(range(len(sizes)), key=lambda r: (-sizes[r], r)):
        room = [g for g in range(len(groups)) if loads[g] + sizes[row] <= max_tokens and len(groups[g]) < most_rows]
        if room:
            target = min(room, key=lambda g: (loads[g], g))
        else:
            groups.append([])
            loads.append(0)
            target = len(groups) - 1
        groups[target].append(row)
        loads[target] += sizes[row]
    return [group for group in groups if group]


def _split_further(groups: list[list[int]], more: int) -> list[list[int]]:
    """`more` additional groups, by halving the largest; empty ones when there is nothing left to halve."""
    groups = [list(group) for group in groups]
    for _ in range(more):
        largest = max(range(len(groups)), key=lambda g: len(groups[g]))
        rows = groups[largest]
        half = (len(rows) + 1) // 2
        groups[largest] = rows[:half]
        groups.append(rows[half:])
    return groups


def restore_order(plan: Sequence[Sequence[int]], parts: Sequence[Ragged | Tensor]) -> Ragged | Tensor:
    """The rows of all parts in the order of the batch that was split."""
    rows = [row for group in plan for row in group]
    back = torch.empty(len(rows), dtype=torch.int64)
    back[torch.tensor(rows, dtype=torch.int64)] = torch.arange(len(rows))
    first = parts[0]
    if isinstance(first, Ragged):
        return Ragged.concat([p for p in parts if isinstance(p, Ragged)]).select(back)
    return torch.cat([p for p in parts if isinstance(p, Tensor)])[back.to(first.device)]
