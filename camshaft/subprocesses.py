"""Child processes: start them, exchange messages with them, and end them when their parent ends.

    process = start_python(["-m", "camshaft.rewards.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    send(descriptor, pack(value))              # in the child: value = unpack(receive(descriptor))
    kill_group(process.pid)                    # kill the child and all processes that it started

    end_with(parent)                           # in the child: end it when the process `parent` ends or is killed
    guard_group(process.pid)                   # the same, for programs that cannot call `end_with`

The controller backends, reward workers, the process and server rollouts, and the tokenizer pool use this module. It
imports only the standard library, because some child processes must not import torch.
"""

import contextlib
import mmap
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

WATCH_SECONDS = 0.5
"""Interval at which a child process checks whether the process that it must end with is running."""

_MAPPED_BYTES = 2**20
_GUARD = 'read _; kill -s KILL -- "-$0"; [ $# -gt 0 ] && sleep 10 && rm -f -- "$@"'
"""Shell script that waits for the end of its input, kills the group, and deletes the files ten seconds later."""


def start_python(
    arguments: Sequence[str], env: dict[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a Python process in a new process group, with this package on its import path.

    The working directory is not on the import path. A process that imports code of users adds the result of
    `import_path` of its parent to the end of its path. `options` are passed to `Popen`.
    """
    environment = dict(os.environ if env is None else env)
    environment["PYTHONPATH"] = _python_path(environment)
    command = [sys.executable, "-P", *arguments]
    return subprocess.Popen[bytes](command, env=environment, start_new_session=True, **options)


def _python_path(environment: Mapping[str, str]) -> str:
    """Return a value of PYTHONPATH that contains the folder of this package."""
    root = str(Path(__file__).resolve().parent.parent)
    return os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), root]))


def import_path() -> list[str]:
    """Return the import path of this process with absolute entries, for a process that imports the same modules."""
    return [entry or os.getcwd() for entry in sys.path]


def extend_import_path(entries: Sequence[str]) -> None:
    """Append the entries that are missing to the import path of this process, behind all installed packages."""
    sys.path.extend(entry for entry in dict.fromkeys(entries) if entry not in sys.path)


@contextlib.contextmanager
def safe_import_environment() -> Iterator[None]:
    """Let Python processes that other libraries start in the block import as those of `start_python`."""
    settings = {"PYTHONPATH": _python_path(os.environ), "PYTHONSAFEPATH": "1"}
    previous = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def describe_exit(code: int | None) -> str:
    """Format the exit code of a process for an error message."""
    if code is None or code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}, which the kernel sends when the machine is out of memory" if name == "SIGKILL" else name


# -- ends ------------------------------------------------------------------------------------------


def kill_group(group: int) -> None:
    """Send SIGKILL to a process group. A group that does not exist is ignored."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def kill_own_group() -> NoReturn:
    """Kill this process and all other processes of its group."""
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("SIGKILL returned")


def end_with(pid: int, end: Callable[[], object] = kill_own_group) -> None:
    """Start a thread that calls `end` when the process `pid`, usually the parent, has ended for any reason."""
    threading.Thread(target=_watch_process, args=(pid, end), name="process-watch", daemon=True).start()


def _watch_process(pid: int, end: Callable[[], object]) -> None:
    while is_running(pid):
        time.sleep(WATCH_SECONDS)
    end()


def is_running(pid: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def without_watcher(stacks: str) -> str:
    """Remove the stack of the thread that `end_with` starts from a dump of all stacks."""
    return "\n\n".join(block for block in stacks.split("\n\n") if _watch_process.__name__ not in block)


def guard_group(group: int, *files: Path) -> subprocess.Popen[bytes]:
    """Start a guard process that kills a process group when this process ends, even by SIGKILL.

    The guard is a shell in a separate session. It reads from a pipe that is closed when this process ends, or when the
    returned object is garbage collected. It deletes `files` ten seconds after it has killed the group. To remove the
    guard without killing the group, kill the guard.
    """
    command = ["/bin/sh", "-c", _GUARD, str(group), *map(str, files)]
    silent = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=silent, stderr=silent, start_new_session=True)


# -- messages --------------------------------------------------------------------------------------

Frames = Sequence[bytes | memoryview]
"""A message: a pickle, followed by its out-of-band buffers. On a pipe, the number and sizes of the frames are sent
first."""


def pack(value: Any) -> Frames:
    """Pickle `value` without copying the buffers of its tensors and arrays."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return [head, *(buffer.raw() for buffer in buffers)]


def unpack(frames: Frames) -> Any:
    """Restore the value of a message. Its tensors and arrays share memory with the frames."""
    return pickle.loads(frames[0], buffers=frames[1:])


def send(descriptor: int, frames: Frames) -> None:
    """Write a message to a blocking pipe or socket."""
    sizes = [len(frame) for frame in frames]
    for part in (struct.pack(f"!Q{len(sizes)}Q", len(sizes), *sizes), *frames):
        view = memoryview(part)
        while view:
            view = view[os.write(descriptor, view) :]


def receive(descriptor: int) -> Frames:
    """Read the next message from a pipe or socket; raise BrokenPipeError if the other end is closed."""
    (count,) = struct.unpack("!Q", _read(descriptor, 8))
    return [_read(descriptor, size) for size in struct.unpack(f"!{count}Q", _read(descriptor, 8 * count))]


def _read(descriptor: int, size: int) -> memoryview:
    # The pages of an anonymous mapping are zero-filled on first access. A bytearray would be filled with zeros here.
    large = size >= _MAPPED_BYTES
    view = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if large else bytearray(size))
    filled = 0
    while filled < size:
        count = os.readv(descriptor, [view[filled:]])
        if not count:
            raise BrokenPipeError("the other end of the connection is closed")
        filled += count
    return view


class MessageReader:
    """Assemble messages from chunks of bytes, for a process that reads from several pipes at the same time."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Add `data` to the buffer, and yield the values of all messages that are complete."""
        self._buffer += data
        while (frames := self._next()) is not None:
            yield unpack(frames)

    def _next(self) -> Frames | None:
        count = struct.unpack_from("!Q", self._buffer)[0] if len(self._buffer) >= 8 else 0
        end = 8 + 8 * count
        if len(self._buffer) < end:
            return None
        sizes = struct.unpack_from(f"!{count}Q", self._buffer, 8)
        if len(self._buffer) < end + sum(sizes):
            return None
        frames = []
        for size in sizes:
            frames.append(bytes(self._buffer[end : end + size]))
            end += size
        del self._buffer[:end]
        return frames
