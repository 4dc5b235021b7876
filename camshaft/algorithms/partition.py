"""Partition rows into groups of nearly equal cost; pure functions on Python numbers.

    costs = [row_cost(length, attention_pivot(hidden_size=1024)) for length in lengths]
    groups = karmarkar_karp(costs, count=4)         # lists of row numbers, the heaviest group first

The largest differencing method of N. Karmarkar and R. M. Karp, "The differencing method of set partitioning",
Report UCB/CSD 82/113, University of California, Berkeley, 1982. It separates the most expensive rows and decides later,
based on differences, which group each of them joins. The remaining spread is far smaller than that of a greedy
longest-first assignment. All functions are deterministic: ties go to the lower row number, so that ranks with the same
rows compute the same plan.
"""

import heapq
from collections.abc import Sequence

Group = tuple[float, int, list[int]]
"""A group of rows: negative cost (so that sorting puts the most expensive first), lowest row number, rows."""


def attention_pivot(hidden_size: int) -> float:
    """Return the row length at which attention costs as much as the rest of a dense decoder.

    A layer has about 12 h^2 weights (4 h^2 in attention, 8 h^2 in the feed-forward block), each with one multiplication
    and one addition per token: 24 h^2. The token at position p also needs 2 p h operations for its scores and 2 p h for
    the weighted sum of values; on average over a causal row of n tokens this is 2 h n per token. The row costs

        n (24 h^2 + 2 h n) = 24 h^2 * n (1 + n / (12 h))

    and both terms are equal at n = 12 h. Models differ in feed-forward width and number of key heads, which changes the
    pivot by a factor below 2 and hardly affects the balance of a plan.
    """
    return 12.0 * hidden_size


def row_cost(length: int, pivot: float) -> float:
    """Return the cost of a row in token units: linear cost plus quadratic attention cost."""
    return length * (1 + length / pivot)


def karmarkar_karp(costs: Sequence[float], count: int) -> list[list[int]]:
    """Partition the rows 0..len(costs)-1 into `count` groups of nearly equal cost, most expensive first.

    Groups are empty only if `count` exceeds the number of rows. Costs must be non-negative.
    """
    if count < 1 or min(costs, default=0) < 0:
        raise ValueError(f"karmarkar_karp needs count >= 1 and costs >= 0; got count={count}, costs={list(costs)[:8]}")
    # A partition lists its non-empty groups, most expensive first; its spread is the remaining imbalance.
    heap = [(-_spread([(-cost, row, [row])], count), row, [(-cost, row, [row])]) for row, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, wide = heapq.heappop(heap)
        _, second, other = heapq.heappop(heap)
        merged = _merged(wide, other, count)
        heapq.heappush(heap, (-_spread(merged, count), min(first, second), merged))
    groups = [sorted(rows) for _, _, rows in heap[0][2]] if heap else []
    return groups + [[] for _ in range(count - len(groups))]


def _spread(groups: list[Group], count: int) -> float:
    lightest = groups[-1][0] if len(groups) == count else 0
    return lightest - groups[0][0]


def _merged(one: list[Group], other: list[Group], count: int) -> list[Group]:
    """Merge two partitions: the most expensive group of one joins the cheapest of the other, and so on."""
    unmerged = max(0, count - len(other))
    groups = one[:unmerged] + other[: max(0, count - len(one))]
    for index, (cost, first, rows) in enumerate(one[unmerged:], start=unmerged):
        more_cost, more_first, more_rows = other[count - 1 - index]
        groups.append((cost + more_cost, min(first, more_first), rows + more_rows))
    groups.sort()
    return groups
