"""Cutting rows into groups of equal cost: pure functions on plain numbers, no tensor anywhere.

    costs = [row_cost(length, attention_pivot(hidden_size=1024)) for length in lengths]
    groups = karmarkar_karp(costs, count=4)         # lists of row numbers, the heaviest group first

The largest differencing method of N. Karmarkar and R. M. Karp, "The differencing method of set partitioning",
Report UCB/CSD 82/113, University of California, Berkeley, 1982. It puts the rows that matter most apart and
decides later, on differences alone, which group each of them joins: the spread that is left is far smaller than
that of "longest first into the lightest group". Everything here is deterministic: ties go to the lower row number,
so that ranks with the same rows make the same plan.
"""

import heapq
from collections.abc import Sequence

Group = tuple[float, int, list[int]]
"""Some rows: minus their cost (so that sorting puts the heaviest first), the lowest row number, and the rows."""


def attention_pivot(hidden_size: int) -> float:
    """The length of a row at which attention costs as much as all the rest of a dense decoder.

    A layer has about 12 h^2 weights (4 h^2 around attention, 8 h^2 in the feed-forward part), each of which is one
    multiplication and one addition per token: 24 h^2. The token at position p also takes 2 p h for its scores and
    2 p h for the weighted sum of values; over a causal row of n tokens that is 2 h n a token. The whole row costs

        n (24 h^2 + 2 h n) = 24 h^2 * n (1 + n / (12 h))

    and the two parts are equal at n = 12 h. Models differ in the width of the feed-forward part and in the number
    of key heads; that moves the pivot by a factor below 2, which the balance of a plan hardly feels.
    """
    return 12.0 * hidden_size


def row_cost(length: int, pivot: float) -> float:
    """The cost of a row, in tokens of a very short one: linear, plus attention, which grows with the square."""
    return length * (1 + length / pivot)


def karmarkar_karp(costs: Sequence[float], count: int) -> list[list[int]]:
    """The rows 0..len(costs)-1 in `count` groups of nearly equal cost, the heaviest first.

    Groups are empty only if there are fewer rows than groups. Costs must not be negative.
    """
    if count < 1 or min(costs, default=0) < 0:
        raise ValueError(f"karmarkar_karp: count={count} must be above 0, and no cost below it: {list(costs)[:8]}")
    # A partition is its non-empty groups, heaviest first; its spread is what is still to be evened out.
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
    """The heaviest group of one partition joins the lightest of the other, and so on; most of these are empty."""
    alone = max(0, count - len(other))
    groups = one[:alone] + other[: max(0, count - len(one))]
    for place, (cost, first, rows) in enumerate(one[alone:], start=alone):
        more_cost, more_first, more_rows = other[count - 1 - place]
        groups.append((cost + more_cost, min(first, more_first), rows + more_rows))
    groups.sort()
    return groups
