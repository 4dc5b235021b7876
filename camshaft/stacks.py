"""Dump the stacks of all threads of another process on the same machine, even after it has crashed.

    dump_stacks_on_signal(file)          # in the process whose stacks are dumped
    read_stacks(pid, file)               # in another process

`file` is a path in a folder that only this user can write to, or the descriptor of an open file that both processes
share.
"""

import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path

STACK_SIGNAL = signal.SIGUSR1
WRITE_SECONDS = 1.0
"""Time limit, in seconds, for a process to write its stacks."""

_CRASH = "Fatal Python error"
_CURRENT = "Current thread"
"""Start of the stack of the thread that handles the signal, which is the main thread."""
_NUM_FRAMES = 8

_open_files: list[object] = []
"""Files to which faulthandler writes. They must stay open."""


def dump_stacks_on_signal(file: Path | int) -> None:
    """Make this process write the stacks of all its threads to `file` on SIGUSR1 and when it crashes."""
    stacks = file
    if isinstance(stacks, Path):
        stacks = os.open(stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    _open_files.append(stacks)
    faulthandler.enable(stacks)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)


def read_stacks(pid: int, file: Path | int) -> str:
    """Return the current stacks of a process, or those dumped when it crashed, or "" if it has written none."""
    start = len(_read(file))
    if not _handles_signal(pid):
        _, mark, crash = _read(file).partition(_CRASH.encode())
        return (mark + crash).decode(errors="replace").strip()
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, STACK_SIGNAL)
    deadline = time.monotonic() + WRITE_SECONDS
    dump, previous = b"", b""
    while time.monotonic() < deadline and not (dump and dump == previous):  # until the file stops growing
        time.sleep(0.05)
        dump, previous = _read(file)[start:], dump
    return dump.decode(errors="replace").strip()


def innermost_frames(stacks: str) -> str:
    """Return the innermost frames of the main thread in the stacks of a process."""
    _, _, stack = stacks.rpartition(_CURRENT)
    return "\n".join(stack.split("\n\n")[0].splitlines()[1 : 1 + _NUM_FRAMES])


def _read(file: Path | int) -> bytes:
    if isinstance(file, int):
        return os.pread(file, os.fstat(file).st_size, 0)
    return file.read_bytes() if file.exists() else b""


def _handles_signal(pid: int) -> bool:
    """Return True if the process runs and has a handler of `STACK_SIGNAL`. Otherwise, the signal would kill it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    return fields["State"][0] not in "ZX" and bool(int(fields["SigCgt"], 16) >> (STACK_SIGNAL - 1) & 1)
