"""Length classes of a decode step."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from camshaft.rollout.builtin.length_classes import GROWTH, MIN_SAVED, SHORTEST, class_of, moves, plan

LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=40)


def test_a_class_ends_at_a_power_of_the_growth() -> None:
    assert [class_of(length) for length in (1, 64, 65, 96, 97, 144, 145)] == [0, 0, 1, 1, 2, 2, 3]


def test_a_long_row_is_a_class_of_its_own() -> None:
    assert plan([60, 900, 50, 55]) == ([(1, 900), (3, 60)], [1, 0, 1, 1])


def test_few_saved_positions_are_no_reason_for_a_class() -> None:
    assert plan([100, 60, 60]) == ([(3, 100)], [0, 0, 0])
    assert plan([100, *[60] * 7]) == ([(1, 100), (7, 60)], [0, *[1] * 7])


def test_only_rows_in_slots_of_another_class_move() -> None:
    classes, indices = plan([900, 50, 800, 60, 55])
    assert classes == [(2, 900), (3, 60)]
    assert moves(classes, indices) == [(1, 2), (2, 1)]


@given(LENGTHS)
def test_each_class_gets_adjacent_slots(lengths: list[int]) -> None:
    classes, indices = plan(lengths)
    moved = moves(classes, indices)
    rows = list(range(len(lengths)))
    for source, target in moved:
        rows[target] = source
    assert sorted(rows) == list(range(len(lengths)))
    stops = list(itertools.accumulate(size for size, _ in classes))
    for (size, longest), stop in zip(classes, stops, strict=True):
        assert max(lengths[row] for row in rows[stop - size : stop]) == longest
    assert all(source != target for source, target in moved)


@given(LENGTHS)
def test_attention_reads_few_positions_that_are_not_needed(lengths: list[int]) -> None:
    """Each class that is too small for a call of its own adds at most `MIN_SAVED` positions."""
    classes, _ = plan(lengths)
    read = sum(size * longest for size, longest in classes)
    num_merged = class_of(max(lengths)) + 1 - len(classes)
    assert read <= sum(max(GROWTH * length, SHORTEST) for length in lengths) + MIN_SAVED * num_merged
    assert torch.tensor([longest for _, longest in classes]).diff().lt(0).all()
