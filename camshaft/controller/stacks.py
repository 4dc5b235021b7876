"""Dump the stacks of all threads of another process on the same machine, even after it has crashed.

dump_stacks_on_signal(file)          # in the process whose stacks are dumped
read_stacks(pid, file)               # in another process
"""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
from pathlib import Path

STACK_SIGNAL = signal.SIGUSR1
WRITE_SECONDS = 1.0
"""Time limit, in seconds, for a process to write its stacks."""

_open_files: list[object] = []
"""Files to which faulthandler writes. They must stay open."""


def dump_stacks_on_signal(file: Path) -> None:
    """Make this process write the stacks of all its threads to `file` on SIGUSR1 and when it crashes."""
    stacks = file.open("w", encoding="utf-8")
    _open_files.append(stacks)
    faulthandler.enable(stacks)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)


def read_stacks(pid: int, file: Path) -> str:
    """Return the current stacks of a process, or those at its crash, or "" if it has written none."""
    try:
        os.kill(pid, STACK_SIGNAL)
    except ProcessLookupError:
        return _read(file)
    deadline = time.monotonic() + WRITE_SECONDS
    text, previous = "", ""
    while time.monotonic() < deadline and not (text and text == previous):  # until the file stops growing
        time.sleep(0.05)
        text, previous = _read(file), text
    return text


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8").strip() if file.exists() else ""


def stack_file(pid: int) -> Path:
    """Return the default file for the stacks of a process."""
    return Path(tempfile.gettempdir()) / f"camshaft-stacks-{pid}.txt"
