"""Child processes: start them, exchange messages, limit the time to wait for them, and end them with their parent.

    process = start_python(["-m", "package.child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    send(descriptor, pack(value))              # in the child: value = unpack(receive(descriptor))
    kill_group(process.pid)                    # kill the child and all processes that it started

    end_with(parent)                           # in the child: end it when the process `parent` ends or is killed
    guard = GroupGuard(process.pid)            # the same, for programs that cannot call `end_with`

    wait = Wait("critic.update_critic", WorkerError, Limit(3600.0, "trainer.worker_timeout"))
    while not has_answered():                  # polls for `POLL_SECONDS`
        wait.check(lambda: "rank 1 of 2")      # logs a warning after 10, 20, 40, ... s, and raises at the limit
    wait.finish()

The controller backends, killable workers, the process and server rollouts, the tokenizer pool and copies to remote file
systems use this module. It imports only the standard library, because some child processes must not import torch.
"""

import contextlib
import logging
import math
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
from concurrent import futures
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""Interval at which a wait checks the process that it waits for. An answer ends the wait immediately."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that stop a run after its current step; see `stop.py`."""
REPORT_SECONDS = 10.0
"""Time after which a wait is first reported. It doubles for each further report."""
REPORT_FACTOR = 1.5
"""A wait is reported only after this factor times the longest earlier wait for the same call."""
WATCH_SECONDS = 0.5
"""Interval at which a child process checks whether the process that it must end with is running."""

_MAPPED_BYTES = 2**20
_CANCEL = "cancel"
_GUARD = f"""
exec 3<&0
(
    read -r message
    [ "$message" = {_CANCEL} ] && exit
    polls=$1; shift
    [ "$polls" -gt 0 ] && kill -s TERM "$0"
    while [ "$polls" -gt 0 ] && kill -s 0 -- "-$0"; do
        sleep {POLL_SECONDS}; polls=$((polls - 1))
    done
    kill -s KILL -- "-$0"
    [ $# -gt 0 ] && sleep 10 && rm -f -- "$@"
) <&3 &
"""
"""Shell script that waits for the end of its input, kills the group, and deletes the files ten seconds later.

Before the kill, it may send SIGTERM to the leader and poll as many times whether the group has ended. It runs in the
background, because Ray kills the direct children of an actor that exits.
"""
FREE_SECONDS = 12.0
"""Seconds that a `VariableGuard` waits before it kills the remaining processes: longer than a `GroupGuard`."""
_VARIABLE_GUARD = f"""
exec 3<&0
(
    read -r message
    [ "$message" = {_CANCEL} ] && exit
    sleep "$1"
    for file in $(grep -lzxF -- "$0" /proc/[0-9]*/environ); do
        pid=${{file#/proc/}}
        kill -s KILL -- "${{pid%/environ}}"
    done
) <&3 &
"""
"""Shell script that waits for the end of its input and then kills the processes with a variable, such as `name=1`."""


def open_closed_streams() -> None:
    """Connect closed standard streams to /dev/null, as for a daemon that closed them.

    The next files that the process opens would otherwise get their descriptors, and receive what its libraries and
    child processes print.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The new descriptor is the lowest free one, which is this one, because all lower ones are open.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


@contextlib.contextmanager
def block_stop_signals() -> Iterator[None]:
    """Block stop signals in processes that are started within the block, until they call `ignore_stop_signals`."""
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


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
    """Append the missing entries to the import path of this process, after all installed packages."""
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
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"signal {-code}"
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


def end_with(pid: int, end: Callable[[], object] = kill_own_group) -> threading.Thread:
    """Start a thread that calls `end` when the process `pid`, usually the parent, has ended for any reason."""
    thread = threading.Thread(target=_watch_process, args=(pid, end), name="process-watch", daemon=True)
    thread.start()
    return thread


def _watch_process(pid: int, end: Callable[[], object]) -> None:
    while is_running(pid):
        time.sleep(WATCH_SECONDS)
    end()


def is_running(pid: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    return _state(pid) not in "ZX"


def describe_process(pid: int | None) -> str:
    """Return the process id for a message, with the fix if the process is suspended."""
    if pid is None:
        return "process unknown"
    return f"process {pid}" + (f" (suspended; `kill -CONT {pid}` resumes it)" if _state(pid) in "Tt" else "")


def resident_memory(pid: int | None, entry: str = "VmRSS") -> int:
    """Return the resident memory of a process in bytes, or its maximum (`VmHWM`). 0 if it is gone or runs elsewhere."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{entry}:")), 0)


def _state(pid: int) -> str:
    """Return the state letter of a process in /proc, X if it does not exist, or R if the state cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    except OSError:  # for example, too many files are open
        return "R"
    return stat.rpartition(")")[2].split()[0]


def without_watcher(stacks: str) -> str:
    """Remove the stack of the thread that `end_with` starts from a dump of all stacks."""
    return "\n\n".join(block for block in stacks.split("\n\n") if _watch_process.__name__ not in block)


class _Guard:
    """A shell in a separate session that acts when this process ends, even by SIGKILL.

    It reads from a pipe, which is closed when this process ends, or when this object is garbage collected.
    """

    def __init__(self, script: str, arguments: Sequence[str], env: Mapping[str, str] | None = None):
        script = f"trap '' TERM HUP USR1 INT\n{script}"  # a scheduler may signal all processes of a job
        command, silent = ["/bin/sh", "-c", script, *arguments], subprocess.DEVNULL
        shell = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=silent, stderr=silent, env=env, start_new_session=True
        )
        assert shell.stdin is not None
        self._pipe = shell.stdin
        shell.wait()  # the guard is its background process

    def cancel(self) -> None:
        """End the guard without killing a process."""
        with contextlib.suppress(BrokenPipeError), self._pipe:
            self._pipe.write(f"{_CANCEL}\n".encode())


class GroupGuard(_Guard):
    """A guard that kills a process group, and deletes `files` ten seconds later.

    With `grace_seconds`, the leader of the group is terminated first, and the group has this time to end.
    """

    def __init__(self, group: int, *files: Path, grace_seconds: float = 0.0):
        polls = math.ceil(grace_seconds / POLL_SECONDS)
        super().__init__(_GUARD, [str(group), str(polls), *map(str, files)])


class VariableGuard(_Guard):
    """A guard that kills all processes in whose environment a variable has this value, after `seconds`."""

    def __init__(self, name: str, value: str, seconds: float = FREE_SECONDS):
        environment = {other: text for other, text in os.environ.items() if other != name}
        super().__init__(_VARIABLE_GUARD, [f"{name}={value}", f"{seconds:g}"], environment)


# -- waits -----------------------------------------------------------------------------------------


class Limit(NamedTuple):
    """Time limit of a call."""

    seconds: float
    setting: str
    """Setting that determines the limit, with its value, for messages."""


NO_LIMIT = Limit(math.inf, "")
DEFAULT_LIMIT = Limit(3600.0, "engine_kwargs.timeout=3600")
"""Limit of the calls of a rollout outside of a run."""

_call_limits: list[tuple[Limit, float]] = []
"""Limits of the calls that this process runs, outermost first, and the times at which they end."""
_thread_limits = threading.local()
"""Limits of a background thread whose work does not belong to the call of the main thread."""


@contextlib.contextmanager
def limit_waits(limit: Limit, margin: float = 0.0) -> Iterator[None]:
    """Bound all waits within the block by `limit`, which counts from the start of the block.

    With `margin`, they end this many seconds earlier. In the main thread, the limit also applies to the waits of other
    threads, unless these have limits of their own.
    """
    if threading.current_thread() is threading.main_thread():
        limits = _call_limits
    else:
        limits = _thread_limits.__dict__.setdefault("limits", [])
    limits.append((limit, time.monotonic() + limit.seconds - margin))
    try:
        yield
    finally:
        limits.pop()


def call_limit() -> tuple[Limit, float]:
    """Return the limit of the call that this thread works for, and the time at which it ends."""
    limits = _thread_limits.__dict__.get("limits") or _call_limits
    return limits[-1] if limits else (NO_LIMIT, math.inf)


class ReportTimes:
    """Times at which something that lasts is reported: after 10, 20, 40, ... s, unless that is usual for its name."""

    longest: ClassVar[dict[str, float]] = {}
    """Longest duration by name so far, in seconds."""

    def __init__(self, name: str):
        self._name = name
        self._next = max(REPORT_SECONDS, REPORT_FACTOR * self.longest.get(name, 0.0))
        self.num_reports = 0

    def is_due(self, age: float) -> bool:
        return age > self._next

    def reported(self, age: float) -> None:
        self.num_reports += 1
        self._next = max(age, 2 * self._next)

    def record(self, duration: float) -> None:
        """Record the duration, which determines the times of later reports."""
        self.longest[self._name] = max(self.longest.get(self._name, 0.0), duration)


class Wait(ReportTimes):
    """A wait for other processes. It is logged while it lasts, and `check` raises `error` at the limit.

    The limit of the call that this process runs (`limit_waits`) applies in addition to `limit`. If both are absent,
    `DEFAULT_LIMIT` applies.
    """

    _checked_at: ClassVar[float] = -math.inf
    """Time of the latest check of a wait."""

    def __init__(self, call: str, error: type[Exception], limit: Limit | None = None):
        super().__init__(call)
        self.call, self._error = call, error
        self._call_limit, self._deadline = call_limit()
        self.limit = limit or (DEFAULT_LIMIT if self._call_limit is NO_LIMIT else NO_LIMIT)
        self._start = time.monotonic()

    @classmethod
    def is_active(cls) -> bool:
        """Return True if this process waits for another one at the moment."""
        return time.monotonic() - cls._checked_at < 5 * POLL_SECONDS

    def check(
        self, target: Callable[[], str], stacks: Callable[[bool], str] | None = None, since: float | None = None
    ) -> None:
        """Report the wait if it is due, and raise the error if the limit has passed.

        Args:
            target: Returns a description of the processes that have not answered.
            stacks: Returns the stacks of these processes, and only their innermost frames if its argument is True.
            since: Start of the wait, if it is not the time at which the object was created.
        """
        now = Wait._checked_at = time.monotonic()
        age = now - (self._start if since is None else since)
        if age > self.limit.seconds or now > self._deadline:
            limit = self.limit if age > self.limit.seconds else self._call_limit
            text = stacks(False) if stacks is not None else ""
            raise self._error(
                f"{self.call}: no answer from {target()} for {age:.1f} s. If the call is only slow, increase the limit "
                f"{limit.setting}" + (f"\n\n{text}" if text else "")
            )
        if self.is_due(age):
            # Most slow calls end soon after the first report, so stacks are read only for the later ones.
            text = stacks(True) if stacks is not None and self.num_reports else ""
            limit = min(self.limit, self._call_limit)
            note = f"; the limit is {limit.setting}" if limit.setting else ""
            logger.warning(
                "%s: no answer from %s for %.0f s%s%s", self.call, target(), age, note, f"\n{text}" if text else ""
            )
            self.reported(age)

    def finish(self, since: float | None = None) -> None:
        """Record the duration of the wait, which determines when later waits for the same call are reported."""
        self.record(time.monotonic() - (self._start if since is None else since))


def run_in_thread(function: Callable[[], T], wait: Wait, target: Callable[[], str]) -> T:
    """Run a function that waits for another process without polling, and return its result.

    At the limit, the error is raised and the thread remains. It does not keep the process alive.
    """
    future = start_thread(function, wait.call)
    while not futures.wait([future], POLL_SECONDS).done:
        wait.check(target)
    result = future.result()
    wait.finish()
    return result


def start_thread(function: Callable[[], T], name: str) -> futures.Future[T]:
    """Run a function in a thread that does not keep the process alive, and return its future result."""
    future: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


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


def send(descriptor: int, frames: Frames, poll: Callable[[], object] | None = None) -> None:
    """Write a message to a blocking pipe or socket. If the socket has a timeout, call `poll` whenever it expires."""
    sizes = [len(frame) for frame in frames]
    for part in (struct.pack(f"!Q{len(sizes)}Q", len(sizes), *sizes), *frames):
        view = memoryview(part)
        while view:
            try:
                view = view[os.write(descriptor, view) :]
            except BlockingIOError:
                if poll is None:
                    raise
                poll()


def receive(descriptor: int, poll: Callable[[], object] | None = None) -> Frames:
    """Read the next message from a pipe or socket; raise BrokenPipeError if the other end is closed.

    If the socket has a timeout, call `poll` whenever it expires.
    """
    (count,) = struct.unpack("!Q", _read(descriptor, 8, poll))
    sizes = struct.unpack(f"!{count}Q", _read(descriptor, 8 * count, poll))
    return [_read(descriptor, size, poll) for size in sizes]


def _read(descriptor: int, size: int, poll: Callable[[], object] | None) -> memoryview:
    # The pages of an anonymous mapping are zero-filled on first access. A bytearray would be filled with zeros here.
    large = size >= _MAPPED_BYTES
    view = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if large else bytearray(size))
    filled = 0
    while filled < size:
        try:
            count = os.readv(descriptor, [view[filled:]])
        except BlockingIOError:
            if poll is None:
                raise
            poll()
            continue
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
