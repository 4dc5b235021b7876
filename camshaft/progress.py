"""Count the work of this process, and report phases of a run that take long.

    for rows in track(batches, len(batches), "batches"): ...        # counts the batches

    with counted(len(prompts), "responses") as work:                # counts what ends in any order
        work.done = 12

    reports = PhaseReports()                                        # in the thread that watches the run
    reports.check("gen", since, "step 3, phase gen")                # step 3, phase gen: 11 s so far, 5 of 64 responses

`Wait` reports the waits for other processes, with the process that has not answered. Phases are not reported meanwhile.
"""

import contextlib
import logging
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from camshaft.subprocesses import ReportTimes, Wait

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Work:
    """Work that this process does."""

    total: int
    unit: str
    done: int = 0


_works: list[Work] = []
"""Work in progress. The first entry contains the others."""


@contextlib.contextmanager
def counted(total: int, unit: str) -> Iterator[Work]:
    """Yield the counter of work that the block does."""
    work = Work(total, unit)
    _works.append(work)
    try:
        yield work
    finally:
        _works.remove(work)


def track(items: Iterable[T], total: int, unit: str, size: int = 1) -> Generator[T, None, None]:
    """Iterate over items that stand for `size` units each."""
    with counted(total, unit) as work:
        for item in items:
            yield item
            work.done = min(work.done + size, total)


def describe_progress() -> str:
    """Return how much of the work in progress is done, or "" if that is unknown."""
    work = next((work for work in list(_works) if work.total > 1), None)
    return "" if work is None else f"{work.done:,} of {work.total:,} {work.unit}"


class PhaseReports:
    """Reports of phases that last long: after 10, 20, 40, ... s, unless earlier phases of this name lasted as long."""

    def __init__(self) -> None:
        self._name, self._since, self._start = "", 0.0, 0.0
        self._times = ReportTimes("")

    def check(self, name: str, since: float, label: str) -> None:
        """Report the phase `name`, which began at `since`, if it is due. The report starts with `label`."""
        now = time.monotonic()
        if (name, since) != (self._name, self._since):
            self._times.record(now - self._start if self._name else 0.0)
            self._name, self._since, self._start, self._times = name, since, now, ReportTimes(f"phase {name}")
        age = now - self._start
        if not self._times.is_due(age) or Wait.is_active():
            return
        self._times.reported(age)
        progress = describe_progress()
        logger.info("%s: %.0f s so far%s", label, age, f", {progress}" if progress else "")
