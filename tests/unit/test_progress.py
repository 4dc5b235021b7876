"""Phases that last long are reported with their progress, at doubling intervals, and not during waits."""

import logging
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from camshaft import progress
from camshaft.errors import WorkerError
from camshaft.progress import PhaseReports, counted, describe_progress, track
from camshaft.subprocesses import NO_LIMIT, ReportTimes, Wait


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr("camshaft.subprocesses.time", clock)
    monkeypatch.setattr(ReportTimes, "longest", {})
    monkeypatch.setattr(Wait, "_checked_at", -1e9)
    with caplog.at_level(logging.INFO):
        yield clock


def watch(reports: PhaseReports, clock: Clock, name: str, since: float, seconds: int) -> None:
    """Check a phase every second."""
    for _ in range(seconds):
        reports.check(name, since, f"phase {name}")
        clock.now += 1


def test_a_long_phase_is_reported_at_doubling_intervals(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    watch(PhaseReports(), clock, "gen", 5.0, 100)
    assert caplog.messages == [f"phase gen: {seconds} s so far" for seconds in (11, 21, 41, 81)]


def test_a_phase_that_is_always_long_is_reported_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    reports = PhaseReports()
    for step in range(5):
        watch(reports, clock, "gen", float(step), 19)
        watch(reports, clock, "save", step + 0.5, 2)
    assert caplog.messages == ["phase gen: 11 s so far"]


def test_the_progress_of_the_outer_work_is_reported(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    reports = PhaseReports()
    reports.check("train", 0.0, "phase train")
    for number in track(range(4000), 4000, "mini-batches"):
        for _ in track(range(3), 3, "micro-batches"):
            clock.now += 1
            reports.check("train", 0.0, "phase train")
        if number == 9:
            break
    assert caplog.messages == [
        "phase train: 11 s so far, 3 of 4,000 mini-batches",
        "phase train: 21 s so far, 6 of 4,000 mini-batches",
    ]
    assert describe_progress() == ""


def test_work_that_ends_with_an_error_is_forgotten() -> None:
    items = track([1, 0], 2, "quotients")
    with pytest.raises(ZeroDivisionError):
        list(map((1).__truediv__, items))
    items.close()
    assert describe_progress() == ""


def test_counted_work_is_described_until_it_ends() -> None:
    with counted(8000, "responses") as work:
        work.done = 3000
        assert describe_progress() == "3,000 of 8,000 responses"
    assert describe_progress() == ""


def test_a_wait_is_not_reported_as_work(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    reports, target = PhaseReports(), Mock(return_value="rank 1")
    reports.check("gen", 0.0, "phase gen")
    wait = Wait("actor.generate", WorkerError, NO_LIMIT)
    for _ in range(30):
        clock.now += 1
        wait.check(target)
        reports.check("gen", 0.0, "phase gen")
    assert caplog.messages == [f"actor.generate: no answer from rank 1 for {seconds} s" for seconds in (11, 21)]
    clock.now += 2
    reports.check("gen", 0.0, "phase gen")
    assert caplog.messages[-1] == "phase gen: 32 s so far"
