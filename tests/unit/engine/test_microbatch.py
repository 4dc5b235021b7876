import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from camshaft.algorithms.partition import attention_pivot
from camshaft.dataproto import Ragged
from camshaft.engine.micro_batches import padding_share, plan_micro_batches, plan_padded_rows, restore_order
from camshaft.errors import BatchError

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=40)


def test_micro_batches_by_count_are_consecutive_and_sorted() -> None:
    assert plan_micro_batches(torch.tensor([5, 1, 2, 3, 4]), 2, None) == [[1, 0], [2, 3], [4]]


def test_without_limits_the_batch_is_one_micro_batch() -> None:
    assert plan_micro_batches(torch.tensor([1, 5]), None, None) == [[0, 1]]


def test_a_token_budget_gives_the_fewest_micro_batches() -> None:
    # 7 + 3 and 6 + 4 fill two micro-batches of 10 exactly.
    assert plan_micro_batches(torch.tensor([3, 7, 6, 4]), None, 10) == [[0, 1], [3, 2]]


@given(LENGTHS, st.integers(30, 80), st.integers(1, 8) | st.none())
def test_the_budget_is_never_exceeded_and_no_row_is_lost(lengths: list[int], budget: int, size: int | None) -> None:
    plan = plan_micro_batches(torch.tensor(lengths), size, budget)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    for rows in plan:
        assert rows
        assert sum(lengths[row] for row in rows) <= budget
        assert size is None or len(rows) <= size


@given(LENGTHS, st.integers(30, 80))
def test_micro_batches_are_at_most_twice_the_ideal_number(lengths: list[int], budget: int) -> None:
    # First-fit-decreasing bins are more than half full on average, so the count is below twice the ideal, plus one.
    plan = plan_micro_batches(torch.tensor(lengths), None, budget)
    assert len(plan) <= 2 * -(-sum(lengths) // budget) + 1


@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.integers(12, 30))
def test_the_count_is_at_most_one_above_the_optimum(lengths: list[int], budget: int) -> None:
    assert len(plan_micro_batches(torch.tensor(lengths), None, budget)) - optimal_count(lengths, budget) in (0, 1)


def optimal_count(lengths: list[int], budget: int) -> int:
    """Return the number of groups of an optimal packing, found by trying every group for every row."""

    def tried(rest: list[int], loads: tuple[int, ...]) -> int:
        if not rest:
            return len(loads)
        places = {load: i for i, load in enumerate(loads) if load + rest[0] <= budget}.values()
        options = [tried(rest[1:], (*loads[:i], loads[i] + rest[0], *loads[i + 1 :])) for i in places]
        return min([*options, tried(rest[1:], (*loads, rest[0]))])

    return tried(sorted(lengths, reverse=True), ())


def longest_first_into_the_lightest(lengths: list[int], budget: int) -> list[list[int]]:
    """Balance greedily by token counts, the baseline."""
    groups: list[list[int]] = [[] for _ in range(-(-sum(lengths) // budget))]
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        loads = [sum(lengths[r] for r in rows) for rows in groups]
        room = [g for g, load in enumerate(loads) if load + lengths[row] <= budget]
        if not room:
            groups.append([])
        target = min(room, key=lambda g: loads[g]) if room else len(groups) - 1
        groups[target].append(row)
    return groups


@pytest.mark.parametrize(
    ("rows", "median", "budget", "margin"), [(64, 600, 16384, 4), (256, 600, 16384, 4), (512, 2000, 32768, 2)]
)
def test_costs_of_long_tailed_lengths_are_balanced(rows: int, median: int, budget: int, margin: float) -> None:
    # Log-normal lengths, truncated at 16 times the median to 8k; hidden size 1024. The cost is computed from
    # the layers: 24 h^2 per token for the matrices, and 4 h for each earlier token that a token attends to.
    hidden, spreads = 1024, ([], [])
    for seed in range(10):
        draw = random.Random(seed)
        lengths = [min(8 * median, 1 + int(draw.lognormvariate(math.log(median), 0.9))) for _ in range(rows)]
        greedy = longest_first_into_the_lightest(lengths, budget)
        plan_by_cost = plan_micro_batches(torch.tensor(lengths), None, budget, pivot=attention_pivot(hidden))
        assert len(plan_by_cost) <= len(greedy)
        work = [24 * hidden**2 * n + 4 * hidden * n * n / 2 for n in lengths]
        for plan, values in zip((greedy, plan_by_cost), spreads, strict=True):
            costs = [sum(work[row] for row in group) for group in plan]
            values.append((max(costs) - min(costs)) / (sum(costs) / len(costs)))
    assert sum(spreads[1]) * margin < sum(spreads[0])


def test_the_most_expensive_micro_batch_comes_first() -> None:
    # Rows of 8 and 7 are single in a budget of 9; with a pivot of 1, 8 costs 72, 7 costs 56, 3 + 3 cost 24.
    assert plan_micro_batches(torch.tensor([3, 8, 3, 7]), None, 9, pivot=1) == [[1], [3], [0, 2]]


def test_a_long_row_counts_as_more_than_its_tokens() -> None:
    # Balancing tokens would give [8] and [4, 4]; with a pivot of 1 the costs are 8 * 9 = 72 and 4 * 5 = 20 each, and
    # 2 * 3 = 6, so the row of 8 is single and all others share a micro-batch.
    assert plan_micro_batches(torch.tensor([4, 8, 4, 2]), None, 12, pivot=1) == [[1], [3, 0, 2]]


@given(LENGTHS, st.integers(30, 80), st.integers(1, 8) | st.none(), st.integers(0, 50))
def test_additional_micro_batches_respect_all_limits(
    lengths: list[int], budget: int, size: int | None, more: int
) -> None:
    alone = plan_micro_batches(torch.tensor(lengths), size, budget)
    plan = plan_micro_batches(torch.tensor(lengths), size, budget, lambda count: count + more)
    assert len(plan) == len(alone) + more
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in rows) <= budget for rows in plan)
    assert all(size is None or len(rows) <= size for rows in plan)
    assert plan[0]


@given(LENGTHS, st.integers(0, 60))
def test_all_ranks_have_equal_numbers_of_micro_batches(lengths: list[int], more: int) -> None:
    plan = plan_micro_batches(torch.tensor(lengths), 4, None, lambda count: count + more)
    assert len(plan) == -(-len(lengths) // 4) + more
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))


def test_a_row_over_the_budget_is_rejected_with_its_length() -> None:
    with pytest.raises(BatchError, match="row 1 has 12 tokens, which exceeds the budget of 10"):
        plan_micro_batches(torch.tensor([3, 12]), None, 10)


def test_an_empty_batch_is_rejected() -> None:
    with pytest.raises(BatchError, match="no rows"):
        plan_micro_batches(torch.tensor([], dtype=torch.int64), 2, None)


@given(LENGTHS, st.integers(30, 60))
def test_order_is_restored_for_tokens_and_for_rows(lengths: list[int], budget: int) -> None:
    rows = torch.tensor(lengths)
    tokens = Ragged(torch.arange(int(rows.sum())), rows)
    plan = plan_micro_batches(rows, None, budget)
    back = restore_order(plan, [tokens.select(part) for part in plan])
    assert isinstance(back, Ragged)
    assert torch.equal(back.values, tokens.values)
    assert torch.equal(back.lengths, tokens.lengths)
    assert torch.equal(restore_order(plan, [rows[part] for part in plan]), rows)


def test_padded_rows_of_similar_lengths_share_a_micro_batch() -> None:
    lengths = torch.tensor([3, 7, 6, 4, 3])
    plan = plan_padded_rows(lengths, None, 14)
    assert plan == [[2, 1], [0, 4, 3]]
    assert padding_share(lengths, plan) == pytest.approx(3 / 26)  # 14 - 13 and 12 - 10 of 26 tokens
    assert plan_padded_rows(lengths, 2, None) == [[2, 1], [0, 3], [4]]
    assert plan_padded_rows(lengths, None, None) == [[0, 4, 3, 2, 1]]


@given(LENGTHS, st.integers(30, 80), st.integers(1, 8) | st.none(), st.integers(0, 3))
def test_the_budget_of_padded_rows_includes_padding(
    lengths: list[int], budget: int, size: int | None, more: int
) -> None:
    plan = plan_padded_rows(torch.tensor(lengths), size, budget, lambda count: count + more)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    for rows in filter(None, plan):
        assert len(rows) * max(lengths[row] for row in rows) <= budget
        assert size is None or len(rows) <= size
    assert len(plan) == len(plan_padded_rows(torch.tensor(lengths), size, budget)) + more


def test_a_padded_row_above_the_budget_is_named() -> None:
    with pytest.raises(BatchError, match="row 1 has 9 tokens, which exceeds the budget of 8"):
        plan_padded_rows(torch.tensor([3, 9]), None, 8)
