"""Find running processes, through /proc."""

import contextlib
import ipaddress
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from camshaft.controller.local import PRELOAD
from camshaft.subprocesses import is_running

MARK = "CAMSHAFT_TEST_MARK"


PATIENCE = 120.0
"""Seconds after which a process that should have ended is one that never ends, whatever else the machine does."""


def still_running(pids: Iterable[int], seconds: float = PATIENCE) -> list[int]:
    """Return the processes that run for longer than `seconds`."""
    deadline = time.monotonic() + seconds
    remaining = [pid for pid in pids if is_running(pid)]
    while remaining and time.monotonic() < deadline:
        time.sleep(0.02)
        remaining = [pid for pid in remaining if is_running(pid)]
    return remaining


def marked(mark: str) -> list[int]:
    """Return the processes with `mark` in their environment, which includes children."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                pids.append(int(folder.name))
        except OSError:
            continue  # the process has exited, or belongs to another user
    return pids


def command_line(pid: int) -> str:
    """Return the command line of a process, or "" if it has ended."""
    return _read(pid, "cmdline").replace(b"\0", b" ").decode()


def process_name(pid: int) -> str:
    """Return the name that a process has given itself, or that of its program."""
    return _read(pid, "comm").decode().strip()


def parent(pid: int) -> int:
    """Return the process id of the parent of a process."""
    return int(_read(pid, "stat").rpartition(b")")[2].split()[1] or 0)


def in_use(path: Path) -> bool:
    """Return True if a process has mapped the file."""
    return any(str(path).encode() in _read(int(folder.name), "maps") for folder in Path("/proc").glob("[0-9]*"))


def start_fork_server(*modules: str) -> None:
    """Start the fork server before a test marks its processes, since the server outlives the test."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
    multiprocessing.forkserver.ensure_running()


def forked_process() -> ProcessPoolExecutor:
    """Return an executor with one process without a process group, in which a forecast can create a fake one."""
    start_fork_server(*PRELOAD)
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver"))


def forked() -> list[int]:
    """Return the processes that were forked by the fork server, whose environment they have."""
    servers = [pid for pid in children(os.getpid()) if b"multiprocessing.forkserver" in _read(pid, "cmdline")]
    return [pid for server in servers for pid in children(server)]


def children(parent: int) -> list[int]:
    """Return the processes that a process has started."""
    return [int(pid) for pid in _read(parent, f"task/{parent}/children").split()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


@contextmanager
def none_left_behind(seconds: float = 5.0) -> Iterator[str]:
    """Mark all processes started in the block, and fail if one outlives it by `seconds`."""
    earlier = set(forked())
    mark = os.environ[MARK] = uuid.uuid4().hex
    try:
        yield mark
    finally:
        del os.environ[MARK]
    deadline = time.monotonic() + seconds
    while (remaining := {*marked(mark), *forked()} - earlier) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not remaining, [command_line(pid) or pid for pid in remaining]


def listening_addresses(pids: Iterable[int]) -> set[str]:
    """Return the addresses at which the processes accept TCP connections."""
    inodes = {
        target.removeprefix("socket:[").removesuffix("]")
        for pid in pids
        for target in _descriptors(pid)
        if target.startswith("socket:[")
    }
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in inodes:
                addresses.add(_address(fields[1].partition(":")[0]))
    return addresses


_LISTEN = "0A"


def _descriptors(pid: int) -> list[str]:
    targets = []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                targets.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return targets


def _address(text: str) -> str:
    """Convert an address of /proc/net/tcp, which stores 32-bit words in the byte order of the machine."""
    words = [int(text[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
