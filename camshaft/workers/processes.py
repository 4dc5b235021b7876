"""Processes below a process, through /proc. On systems without /proc, no process is found.

    children(pid)                       # processes whose parent is `pid`
    count_below({guard})                # running processes whose ancestor is `guard`
    kill_marked("NAME=value")           # processes with this variable in their environment

A guard imports this module, so it imports few others.
"""

import os
import signal
import time
from collections.abc import Iterable, Iterator, Set
from contextlib import suppress

_LISTS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
"""True if the kernel lists the children of a process, which most do. Otherwise, all of /proc must be read."""
_ROUND_SECONDS = 0.02
_MAX_ROUNDS = 50


def children(pid: int) -> list[int]:
    """Return the processes whose parent is `pid`, and possibly some that have ended."""
    if not _LISTS_CHILDREN:
        return [child for child in _process_ids() if _state_and_parent(child)[1] == pid]
    found: list[int] = []
    with suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):  # the thread has ended
                found += map(int, _read(f"{pid}/task/{thread}/children").split())
    return found


def count_below(roots: Set[int]) -> int:
    """Return the number of running processes that have an ancestor in `roots`, without the roots."""
    below = set(roots)
    remaining = list(roots)
    while remaining:
        found = set(children(remaining.pop())) - below
        below |= found
        remaining += found
    return sum(_state_and_parent(pid)[0] not in ("Z", "X") for pid in below - roots)


def kill_marked(variable: str) -> None:
    """Send SIGKILL to all processes with a variable, such as "NAME=value", until there are none."""
    for _ in range(_MAX_ROUNDS):
        marked = [pid for pid in _process_ids() if pid != os.getpid() and _is_marked(pid, variable.encode())]
        if not marked:
            return
        kill(marked)
        time.sleep(_ROUND_SECONDS)


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to processes. Those that have ended, or belong to another user, are ignored."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _state_and_parent(pid: int) -> tuple[str, int]:
    """Return the state of a process and its parent, or "X" and 0 if it has ended."""
    with suppress(OSError):
        state, parent = _read(f"{pid}/stat").rpartition(b")")[2].split()[:2]
        return state.decode(), int(parent)
    return "X", 0


def _is_marked(pid: int, variable: bytes) -> bool:
    with suppress(OSError):  # it has ended, or belongs to another user
        return variable in _read(f"{pid}/environ").split(b"\0")  # empty for a zombie
    return False


def _process_ids() -> Iterator[int]:
    with suppress(FileNotFoundError):
        yield from [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(path: str) -> bytes:
    descriptor = os.open(f"/proc/{path}", os.O_RDONLY)
    try:
        return b"".join(iter(lambda: os.read(descriptor, 1 << 16), b""))
    finally:
        os.close(descriptor)
