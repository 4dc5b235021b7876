"""Graceful stop on SIGTERM or SIGUSR1 (Slurm's `--signal`): finish the current step, save and exit.

    with listening() as stop:                 # in the driver
        for batch in loader:
            ...
            if stop.requested: save(); stop.acknowledge(step, total); break
    return stop.status

    ignore_stop_signals()                    # in workers, which the driver stops

The exit status is 128 + the signal number, as for a program ended by the signal, so that schedulers restart the
unfinished run. A second signal ends the driver immediately. Schedulers may send the signal to every process of a job,
and twice to some, so workers ignore it and signals within one second count as one.
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
"""Signals within this time after the first are ignored: `timeout` signals its child and then the process group."""
ENDED_BY_SIGNAL = 128
"""Exit status of a program that was ended by signal n, minus n."""

logger = logging.getLogger(__name__)


class Stop:
    """State of a stop request."""

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self.status = 0
        """Exit status of the run: 0 unless it stopped early."""
        self._at = 0.0

    def request(self, number: int, _frame: Any = None) -> None:
        """Handle a signal: the first requests a stop, a later one has its default effect."""
        now = time.monotonic()
        if self.requested is None:
            self.requested, self._at = signal.Signals(number), now
            # Written directly, because the signal may interrupt a log call.
            message = (
                f"\ncamshaft: {self.requested.name}: finishing the current step and saving; "
                "send the signal again to exit immediately\n"
            )
            os.write(2, message.encode())
        elif now - self._at > SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def acknowledge(self, step: int, total: int) -> None:
        """Record that the run stopped at `step`, after saving."""
        assert self.requested is not None
        self.status = ENDED_BY_SIGNAL + self.requested
        logger.info(
            "%s: stopped after step %d of %d. Run the same command to resume (exit status %d)",
            *(self.requested.name, step, total, self.status),
        )


@contextlib.contextmanager
def listening() -> Iterator[Stop]:
    """Convert stop signals to stop requests within the block; no effect outside the main thread."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.request) for number in STOP_SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


@contextlib.contextmanager
def block_stop_signals() -> Iterator[None]:
    """Block stop signals in processes started within the block until they call `ignore_stop_signals`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals(*numbers: signal.Signals) -> None:
    """Ignore stop signals, or the given ones, in this process but not in its child processes."""
    for number in numbers or STOP_SIGNALS:
        signal.signal(number, lambda *_: None)  # SIG_IGN would be inherited by child processes
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
