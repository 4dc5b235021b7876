"""Partition rows into groups of nearly equal cost.

    costs = [row_cost(length, attention_pivot(hidden_size=1024)) for length in lengths]
    groups = karmarkar_karp(costs, count=4)         # lists of row indices, most expensive group first

`karmarkar_karp` implements the largest differencing method of N. Karmarkar and R. M. Karp, "The differencing method of
set partitioning", Report UCB/CSD 82/113, University of California, Berkeley, 1982. It first places the most expensive
rows in different groups and decides later, from cost differences, which groups to merge. The remaining imbalance is far
smaller than that of a greedy assignment in order of decreasing cost. All functions are deterministic: ties go to the
lower row index, so ranks with the same rows compute the same plan.

`BinPacker` adds limits: it partitions items into as few groups (bins) as the limits on items and tokens allow.
"""

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

Group = tuple[float, int, list[int]]
"""A group of rows: negative cost, lowest row index, row indices. Sorting puts the most expensive group first."""


def attention_pivot(hidden_size: int) -> float:
    """Return the row length at which attention scores cost as much as the linear layers of a dense decoder.

    A layer has about 12 h^2 weights (4 h^2 in attention, 8 h^2 in the feed-forward block). Each weight takes one
    multiplication and one addition per token, so the linear layers cost 24 h^2 operations per token. The token at
    position p takes 2 p h more operations for its attention scores and 2 p h for the weighted sum of values. Averaged
    over a causal row of n tokens, this is 2 h n per token. The cost of the row is

        n (24 h^2 + 2 h n) = 24 h^2 * n (1 + n / (12 h))

    and both terms are equal at n = 12 h. Models differ in feed-forward width and number of key heads. This changes the
    pivot by a factor below 2 and hardly affects the balance of a plan.
    """
    return 12.0 * hidden_size


def row_cost(length: int, pivot: float) -> float:
    """Return the cost of a row, linear plus quadratic attention cost, in units of the linear cost of a token."""
    return length * (1 + length / pivot)


def karmarkar_karp(costs: Sequence[float], count: int) -> list[list[int]]:
    """Partition the rows 0..len(costs)-1 into `count` groups of nearly equal cost, most expensive group first.

    Costs must be non-negative. A group is empty only if `count` exceeds the number of rows.
    """
    if count < 1 or min(costs, default=0) < 0:
        raise ValueError(
            f"karmarkar_karp: count={count} must be at least 1 and costs={list(costs)[:8]} must be at least 0"
        )
    # A partition is a list of non-empty groups, most expensive first. Its spread is the remaining imbalance.
    heap = [(-_spread([(-cost, row, [row])], count), row, [(-cost, row, [row])]) for row, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, row_a, partition_a = heapq.heappop(heap)
        _, row_b, partition_b = heapq.heappop(heap)
        partition = _merge(partition_a, partition_b, count)
        heapq.heappush(heap, (-_spread(partition, count), min(row_a, row_b), partition))
    groups = [sorted(rows) for _, _, rows in heap[0][2]] if heap else []
    return groups + [[] for _ in range(count - len(groups))]


def _spread(groups: list[Group], count: int) -> float:
    lightest = groups[-1][0] if len(groups) == count else 0
    return lightest - groups[0][0]


def _merge(a: list[Group], b: list[Group], count: int) -> list[Group]:
    """Merge two partitions: join the most expensive group of `a` with the cheapest of `b`, and so on."""
    num_unmerged = max(0, count - len(b))
    groups = a[:num_unmerged] + b[: max(0, count - len(a))]
    for index, (cost_a, row_a, rows_a) in enumerate(a[num_unmerged:], start=num_unmerged):
        cost_b, row_b, rows_b = b[count - 1 - index]
        groups.append((cost_a + cost_b, min(row_a, row_b), rows_a + rows_b))
    groups.sort()
    return groups


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
        bins = [sorted(items, key=lambda item: (-self.sizes[item], item)) for items in bins]
        moved_items: list[int] = []
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
