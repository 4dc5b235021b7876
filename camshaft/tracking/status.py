"""Write the step and the phase of a run to `status.json` in its folder.

    with RunStatus(folder) as status:
        status.step = 12
        status.phase = Phase("gen", time.time())

A thread writes the file at most twice per second, so that training does not wait for the disk, and at least every
`BEAT_SECONDS`, so that a reader on another machine can tell a slow phase from a process that is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import NamedTuple

from camshaft.tracking.record import replace_text
from camshaft.tracking.run_folder import STATUS

POLL_SECONDS = 0.5
BEAT_SECONDS = 10.0
THREAD = "run-status"
"""Name of the thread."""


class Phase(NamedTuple):
    """A phase of a run and the Unix time at which it began."""

    name: str
    since: float


class RunStatus:
    """Step and phase of the run in this process. A thread writes them to the folder within the `with` block."""

    def __init__(self, folder: str | Path):
        self.step = 0
        self.phase = Phase("start", time.time())
        self._path = Path(folder).expanduser() / STATUS
        self._facts = {"pid": os.getpid(), "host": socket.gethostname()}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._report, name=THREAD, daemon=True)

    def enter(self, name: str) -> None:
        """Begin a phase, which ends when the next one begins."""
        self.phase = Phase(name, time.time())

    def __enter__(self) -> RunStatus:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.enter("end")
        self._write(self.step, self.phase, time.time())

    def _report(self) -> None:
        written, written_at = None, 0.0
        while not self._stop.wait(POLL_SECONDS if written else 0.0):
            current, now = (self.step, self.phase), time.time()
            if current != written or now - written_at >= BEAT_SECONDS:
                self._write(*current, now)
                written, written_at = current, now

    def _write(self, step: int, phase: Phase, now: float) -> None:
        facts = {"step": step, "phase": phase.name, "since": phase.since, "at": now, **self._facts}
        with contextlib.suppress(OSError):  # a full disk; the metrics report it
            replace_text(self._path, json.dumps(facts) + "\n")
