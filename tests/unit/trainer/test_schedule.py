"""Validations and checkpoints are due every few steps, or by time."""

import contextlib

import pytest

from camshaft.trainer.schedule import Schedule


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _due_steps(schedule: Schedule, clock: Clock, steps: int, step_seconds: float, cost: float) -> list[int]:
    due = []
    for step in range(1, steps + 1):
        clock.now += step_seconds
        if schedule.is_due(step, is_last=step == steps):
            due.append(step)
            with schedule.measure():
                clock.now += cost
    return due


@pytest.mark.parametrize(("frequency", "steps"), [(3, [3, 6, 8]), (-1, []), (1, [1, 2, 3, 4, 5, 6, 7, 8])])
def test_a_number_of_steps_ignores_the_time(frequency: int, steps: list[int]) -> None:
    clock = Clock()
    assert _due_steps(Schedule(frequency, 600, clock), clock, 8, step_seconds=1000, cost=1) == steps


def test_short_steps_are_saved_every_ten_minutes() -> None:
    clock = Clock()
    assert _due_steps(Schedule("auto", 600, clock), clock, 700, step_seconds=2, cost=0) == [300, 600, 700]


def test_long_steps_are_all_saved() -> None:
    clock = Clock()
    assert _due_steps(Schedule("auto", 600, clock), clock, 3, step_seconds=3600, cost=60) == [1, 2, 3]


@pytest.mark.parametrize("cost", [0.5, 1, 7, 100])
def test_validation_takes_up_to_a_fifth_of_the_time(cost: float) -> None:
    clock = Clock()
    schedule = Schedule("auto", clock=clock)
    with schedule.measure():  # before the first step
        clock.now += cost
    count = len(_due_steps(schedule, clock, 1000, step_seconds=1, cost=cost))
    assert (count - 1) * cost <= 0.2 * clock.now  # the last one is always made
    assert count * cost > 0.9 * min(0.2 * clock.now, 1000 * cost)


def test_a_failed_action_counts() -> None:
    clock = Clock()
    schedule = Schedule("auto", clock=clock)
    with contextlib.suppress(ValueError), schedule.measure():
        clock.now += 10
        raise ValueError
    clock.now += 39
    assert not schedule.is_due(1, is_last=False)
    clock.now += 1
    assert schedule.is_due(1, is_last=False)
