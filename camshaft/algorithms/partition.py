"""Partition rows into groups of nearly equal cost.

    costs = [row_cost(length, attention_pivot(hidden_size=1024)) for length in lengths]
    groups = karmarkar_karp(costs, count=4)         # lists of row indices, most expensive group first

`karmarkar_karp` implements the largest differencing method of N. Karmarkar and R. M. Karp, "The differencing method of
set partitioning", Report UCB/CSD 82/113, University of California, Berkeley, 1982. It first places the most expensive
rows in different groups and decides later, from cost differences, which groups to merge. The remaining imbalance is far
smaller than that of a greedy assignment in order of decreasing cost. All functions are deterministic: ties go to the
lower row index, so ranks with the same rows compute the same plan.
"""

import heapq
from collections.abc import Sequence

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
