"""Is a process still there? Read from /proc, so that it needs no other package."""

import multiprocessing
import multiprocessing.forkserver
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

MARK = "CAMSHAFT_TEST_MARK"


def running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def still_running(pids: Iterable[int], seconds: float) -> list[int]:
    """Those that do not end within `seconds`."""
    deadline = time.monotonic() + seconds
    left = [pid for pid in pids if running(pid)]
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [pid for pid in left if running(pid)]
    return left


def marked(mark: str) -> list[int]:
    """The processes that were started with `mark` in their environment (their children too)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue  # it has ended, or is not ours to look at
    return found


def in_use(path: Path) -> bool:
    """Whether a process has the file in its memory."""
    return any(str(path).encode() in _read(int(folder.name), "maps") for folder in Path("/proc").glob("[0-9]*"))


def start_fork_server(*modules: str) -> None:
    """The server that worker processes of this one come from, before a test marks what it starts: it stays."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
    multiprocessing.forkserver.ensure_running()


def forked() -> list[int]:
    """The processes that this process' fork server has started; they have the environment of the server."""
    servers = [pid for pid in _children(os.getpid()) if b"multiprocessing.forkserver" in _read(pid, "cmdline")]
    return [pid for server in servers for pid in _children(server)]


def _children(parent: int) -> list[int]:
    return [int(pid) for pid in _read(parent, f"task/{parent}/children").split()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


@contextmanager
def none_left_behind(seconds: float = 5.0) -> Iterator[str]:
    """Marks all processes that are started in the block, and fails if one outlives it by so many seconds."""
    mark = os.environ[MARK] = uuid.uuid4().hex
    try:
        yield mark
    finally:
        del os.environ[MARK]
    until = time.monotonic() + seconds
    while marked(mark) + forked() and time.monotonic() < until:
        time.sleep(0.02)
    assert marked(mark) + forked() == []
