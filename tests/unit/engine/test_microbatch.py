import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from camshaft.dataproto import Ragged
from camshaft.engine.microbatch import plan_micro_batches, restore_order
from camshaft.errors import BatchError

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=40)


def test_by_count_takes_consecutive_rows_and_sorts_each_group_by_length() -> None:
    assert plan_micro_batches(torch.tensor([5, 1, 2, 3, 4]), 2, None) == [[1, 0], [2, 3], [4]]


def test_without_limits_there_is_one_micro_batch() -> None:
    assert plan_micro_batches(torch.tensor([1, 5]), None, None) == [[0, 1]]


def test_by_tokens_puts_the_longest_first_into_the_lightest_with_room() -> None:
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
def test_no_two_micro_batches_would_fit_into_one_budget_by_far(lengths: list[int], budget: int) -> None:
    # First-fit-decreasing bins are more than half full on average, so the count is below twice the ideal, plus one.
    plan = plan_micro_batches(torch.tensor(lengths), None, budget)
    assert len(plan) <= 2 * -(-sum(lengths) // budget) + 1


@given(LENGTHS, st.integers(0, 60))
def test_ranks_of_one_group_get_the_same_number_of_micro_batches(lengths: list[int], more: int) -> None:
    plan = plan_micro_batches(torch.tensor(lengths), 4, None, lambda count: count + more)
    assert len(plan) == -(-len(lengths) // 4) + more
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))


def test_a_row_over_the_budget_is_refused_with_its_length() -> None:
    with pytest.raises(BatchError, match="row 1 has 12 tokens, more than the budget of 10"):
        plan_micro_batches(torch.tensor([3, 12]), None, 10)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(BatchError, match="no rows"):
        plan_micro_batches(torch.tensor([], dtype=torch.int64), 2, None)


@given(LENGTHS, st.integers(30, 60))
def test_order_is_restored_for_tokens_and_for_rows(lengths: list[int], budget: int) -> None:
    rows = torch.tensor(lengths)
    whole = Ragged(torch.arange(int(rows.sum())), rows)
    plan = plan_micro_batches(rows, None, budget)
    back = restore_order(plan, [whole.select(part) for part in plan])
    assert isinstance(back, Ragged)
    assert torch.equal(back.values, whole.values)
    assert torch.equal(back.lengths, whole.lengths)
    assert torch.equal(restore_order(plan, [rows[part] for part in plan]), rows)
