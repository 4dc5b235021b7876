"""Simulate two machines on one kernel: separate networks, process trees, host names and shared memory.

    with two_namespaces() as (head, worker):
        steps = head.call(run_ppo, folder, {"trainer.nnodes": 2}, 2)     # a driver on the head's machine
        worker.unplug()

A pair of virtual interfaces connects the two machines. They have no other route and no host names for each other, but
they share the file system. All their processes run in namespaces that end with this process, so nothing outlives it,
even after SIGKILL. `unavailable_reason()` returns the reason if this system cannot create such namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SPACES = ("--net", "--pid", "--mount", "--uts")
PORT = 6379
"""Port of Ray's head. No other process uses its network."""

_FIRST = "echo ready; while sleep 1; do :; done"
"""The first process of a machine, which also reaps orphaned processes."""
_PREPARE = """
set -e
hostname {name}
ip link set lo up
ip address add {address}/24 dev eth0
ip link set eth0 up
mkdir -p /tmp/ray
mount -t tmpfs tmpfs /tmp/ray
mount -t tmpfs tmpfs /dev/shm
"""
_DRIVER = "from support.namespaces import answer; answer()"
_DIE_WITH_PARENT = 1


class Machine:
    """A set of Linux namespaces, identified by their first process."""

    def __init__(self, pid: int, address: str):
        self.pid, self.address = pid, address
        self._space = _links_to(Path(f"/proc/{pid}/ns/pid"))

    def start(self, *args: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command on this machine."""
        enter = ["nsenter", f"--target={self.pid}", *SPACES, f"--wd={ROOT}"]
        return subprocess.Popen([*enter, *args], env=_environment(), text=True, **options)

    def run(self, *args: str, seconds: float = 60.0) -> str:
        """Run a command on this machine and return its output."""
        with self.start(*args, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            try:
                out, _ = process.communicate(timeout=seconds)
            finally:
                process.kill()
        assert process.returncode == 0, f"{' '.join(args)}: {out}"
        return out

    def call(self, function: Callable[..., Any], *args: Any, seconds: float = 150.0) -> Any:
        """Call a function of an importable module in a new process on this machine and return its result."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "task").write_bytes(pickle.dumps((function, args)))
            self.run(sys.executable, "-c", _DRIVER, str(folder), seconds=seconds)
            return pickle.loads((folder / "answer").read_bytes())

    def running(self, word: str) -> list[str]:
        """Return the command lines of processes on this machine that contain `word`."""
        folders = [file.parent.parent for file in Path("/proc").glob("[0-9]*/ns/pid") if _links_to(file) == self._space]
        lines = [_read(folder / "cmdline").replace("\0", " ") for folder in folders]
        return [line for line in lines if word in line]

    def unplug(self) -> None:
        """Take down the network interface."""
        self.run("ip", "link", "set", "eth0", "down")


def answer() -> None:
    """Run the task of `Machine.call` in the new process."""
    folder = Path(sys.argv[1])
    function, args = pickle.loads((folder / "task").read_bytes())
    (folder / "answer").write_bytes(pickle.dumps(function(*args)))


@contextlib.contextmanager
def two_namespaces(num_cpus: int = 2) -> Iterator[tuple[Machine, Machine]]:
    """Yield two machines with `num_cpus` CPUs each in a Ray cluster; the first is its head."""
    ray = str(Path(sys.executable).with_name("ray"))
    size = (f"--num-cpus={num_cpus}", f"--object-store-memory={2**28}")
    with two_connected_machines() as (head, worker):
        options = (f"--node-ip-address={head.address}", f"--port={PORT}", "--include-dashboard=false")
        head.run(ray, "start", "--head", *options, *size)
        worker.run(ray, "start", f"--address={head.address}:{PORT}", *size)
        yield head, worker


@contextlib.contextmanager
def two_connected_machines() -> Iterator[tuple[Machine, Machine]]:
    """Yield two connected machines without Ray."""
    with _first_process() as one, _first_process() as two:
        machines = Machine(one, "198.51.100.1"), Machine(two, "198.51.100.2")
        _connect(one, two)
        for machine, name in zip(machines, ("one", "two"), strict=True):
            machine.run("bash", "-c", _PREPARE.format(address=machine.address, name=name))
        yield machines


def unavailable_reason() -> str | None:
    """Return the reason why this system cannot create the machines, or None if it can."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"commands not found: {', '.join(missing)}"
    try:
        with two_connected_machines():
            return None
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        return f"cannot create namespaces: {error}"


@contextlib.contextmanager
def _first_process() -> Iterator[int]:
    """Start a process in new namespaces; all processes in them end with it."""
    command = ["unshare", *SPACES, "--mount-proc", "--fork", "--kill-child", "bash", "-c", _FIRST]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=_die_with_parent
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if line != "ready\n":
            raise OSError(line + process.stdout.read())
        yield int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8"))
    finally:
        process.kill()
        process.communicate()  # the child holds the other end of the pipe, so it has exited when this returns


def _connect(one: int, other: int) -> None:
    """Connect the networks of two processes with a pair of interfaces, both named eth0."""
    ends = [f"cs{uuid.uuid4().hex[:8]}" for _ in range(2)]
    _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    try:
        for end, pid in zip(ends, (one, other), strict=True):
            _ip("link", "set", end, "netns", str(pid), "name", "eth0")
    except subprocess.SubprocessError:
        _ip("link", "delete", ends[0])  # also deletes the other end
        raise


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, timeout=10)


def _links_to(file: Path) -> str:
    """Return the target of a link, or "" if the process has exited."""
    try:
        return os.readlink(file)
    except OSError:
        return ""


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _environment() -> dict[str, str]:
    """Return the environment of this process without Ray's variables, and with those of the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
