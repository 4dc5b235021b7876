"""A run that is asked to stop: SIGTERM, or SIGUSR1 as Slurm's `--signal` sends it, lets it save and end.

    with listening() as stop:                 # the driver
        for batch in loader:
            ...
            if stop.asked: save(); stop.heed(step, total); break
    return stop.status

    outlive_stop_signals()                    # a worker, whose driver is asked

The driver ends with the step in hand. The exit status is what a shell gives to a program that the signal has ended,
128 + its number, as the run is not finished: a scheduler that starts again what has failed does so. A second signal
ends the driver at once. What sends the first may send it to every process of the job, and to one twice, so workers
live on, and what comes within a second counts as one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SAME_SECONDS = 1.0
"""Signals that come so soon after the first are the first: `timeout` signals its child, and then the group of it."""
ENDED_BY_SIGNAL = 128
"""The exit status of a program that was ended by signal n is this + n."""

logger = logging.getLogger(__name__)


class Stop:
    """Whether the run was asked to stop, and whether it did."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self.status = 0
        """Exit status of the run: 0 unless it ended early."""
        self._at = 0.0

    def ask(self, number: int, _frame: Any = None) -> None:
        """A signal handler: the first signal asks, a later one has its usual effect."""
        now = time.monotonic()
        if self.asked is None:
            self.asked, self._at = signal.Signals(number), now
            # Not logged: the signal may have come while a line was being written.
            told = f"\ncamshaft: {self.asked.name}: ends with the step in hand, and saves it. Once more ends at once\n"
            os.write(2, told.encode())
        elif now - self._at > SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def heed(self, step: int, total: int) -> None:
        """Called by the run that ends for it, after it has saved."""
        assert self.asked is not None
        self.status = ENDED_BY_SIGNAL + self.asked
        logger.info(
            "%s: ended after step %d of %d. The same command goes on from there (exit status %d)",
            *(self.asked.name, step, total, self.status),
        )


@contextlib.contextmanager
def listening() -> Iterator[Stop]:
    """Until the block ends, signals ask instead of ending the process; outside the main thread there are none."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.ask) for number in STOP_SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """A process that is started in the block does not hear stop signals before it calls `outlive_stop_signals`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlive_stop_signals(*numbers: signal.Signals) -> None:
    """Let this process live on at stop signals, or at these; what it starts is ended by them as ever."""
    for number in numbers or STOP_SIGNALS:
        signal.signal(number, lambda *_: None)  # an ignored signal would be ignored by child processes too
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
