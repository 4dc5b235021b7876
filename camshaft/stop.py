"""Graceful stop on SIGTERM, SIGUSR1 (Slurm's `--signal`) or SIGHUP (a closed terminal): finish the step, save and exit.

A run that is started from Python handles Ctrl-C in the same way.

    with handle_stop_signals() as stop:       # in the driver
        for batch in loader:
            ...
            if stop.requested: save(); stop.acknowledge(step, total); break
    return stop.status

    ignore_stop_signals()                     # in workers, which the driver stops

The exit status is 128 + the signal number, as for a program that the signal ended, so that schedulers restart the
unfinished run. A second signal ends the driver immediately. A scheduler can send the signal to every process of a job,
and to some of them twice. Workers therefore ignore the signal, and signals within one second count as one.
"""

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from camshaft.subprocesses import STOP_SIGNALS

SAME_SECONDS = 1.0
"""Signals within this time after the first one are ignored. `timeout` signals its child and then its process group."""
ENDED_BY_SIGNAL = 128
"""Offset of exit statuses: a program that signal n ends has the exit status 128 + n."""

logger = logging.getLogger(__name__)


class Stop:
    """Records whether a stop was requested, and the exit status of the run."""

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self.status = 0
        """Exit status of the run. It is 0 unless a signal stopped the run early."""
        self.request_time = 0.0
        """Time of the request (`time.monotonic`)."""

    def request(self, number: int, _frame: Any = None) -> None:
        """Handle a signal. The first signal requests a stop, and a later one has its default effect."""
        now = time.monotonic()
        if self.requested is None:
            self.requested, self.request_time = signal.Signals(number), now
            # Write to the descriptor directly, because the signal can interrupt a log call.
            again = "press Ctrl-C again to stop" if number == signal.SIGINT else "send the signal again to exit"
            message = f"\ncamshaft: {self.requested.name}: finishing the current step and saving; {again} immediately\n"
            output = select.poll()
            output.register(2, select.POLLOUT)
            with contextlib.suppress(OSError):  # the terminal may be closed
                if output.poll(0):  # a write to a full pipe would block
                    os.write(2, message.encode())
        elif now - self.request_time > SAME_SECONDS:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def acknowledge(self, step: int, total: int) -> None:
        """Set the exit status after the run saved its checkpoint and stopped at `step`."""
        assert self.requested is not None
        self.status = ENDED_BY_SIGNAL + self.requested
        name, status = self.requested.name, self.status
        logger.info("%s: stopped after step %d of %d (exit status %d)", name, step, total, status)


@contextlib.contextmanager
def handle_stop_signals(stop: Stop | None = None, ctrl_c: bool = False) -> Iterator[Stop]:
    """Convert stop signals to requests of `stop` within the block. Outside the main thread, this has no effect.

    With `ctrl_c`, this includes SIGINT; a second one raises KeyboardInterrupt. A signal that is ignored at the start,
    as SIGHUP is under nohup, remains ignored.
    """
    stop = stop or Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    handled = (*STOP_SIGNALS, signal.SIGINT) if ctrl_c else STOP_SIGNALS
    numbers = [number for number in handled if signal.getsignal(number) is not signal.SIG_IGN]
    previous_handlers = {number: signal.signal(number, stop.request) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


def ignore_stop_signals(*numbers: signal.Signals) -> None:
    """Ignore all stop signals, or only `numbers`, in this process but not in its child processes."""
    for number in numbers or STOP_SIGNALS:
        signal.signal(number, lambda *_: None)  # SIG_IGN would be inherited by child processes
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
