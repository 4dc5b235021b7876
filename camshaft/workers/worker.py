"""Owner side of a worker: start the process, send calls, receive results, enforce time limits, and kill it.

    worker = Worker("my_package.my_worker", setup, 120.0, write_output)
    worker.submit([("a", 1), ("b", 2)], timeout=30.0)
    ready, events = wait_for([worker], until)
    for worker, event in events:
        match event:
            case Ready(value): ...                # the process has completed its setup
            case Answer("a", reply): ...
            case Failure("timeout"):              # or "crash"
                worker.kill()                     # with all processes below it
                running, waiting = worker.split_calls()

A call is known by a key of its owner. Calls of a worker run one after the other, or at the same time in its event loop;
the time limit applies to each call. A worker belongs to one thread at a time.
"""

import contextlib
import os
import queue
import secrets
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from io import FileIO
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from camshaft.stacks import innermost_frames, read_stacks
from camshaft.subprocesses import Frames, MessageReader, block_stop_signals, kill_group, pack, send, start_python
from camshaft.workers import guard, processes
from camshaft.workers.messages import Batch, Ready, Reply, Request, Started

Key = TypeVar("Key", bound=Hashable)

CANCEL_SECONDS = 1.0
"""Time that a worker has to cancel a concurrent call after its time limit."""

_EXIT_SECONDS = 2.0


class Answer(NamedTuple, Generic[Key]):
    """The reply to a call."""

    key: Key
    reply: Reply


class Failure(NamedTuple):
    """The end of a worker."""

    kind: Literal["crash", "timeout"]
    """`timeout` if a call or the setup exceeds its limit. The process then still runs."""


Event = Ready | Answer[Key] | Failure


class Worker(Generic[Key]):
    """A process, the calls that it has not answered, and the guard that ends all processes below it."""

    def __init__(
        self,
        module: str,
        setup: Any,
        setup_timeout: float,
        write_output: Callable[[bytes], object],
        environment: Mapping[str, str] = os.environ,
    ):
        """Start the process.

        Args:
            module: Its function `main` runs in the process, with the number of the stack file as a string.
            setup: First message to the process.
            setup_timeout: Time limit for `Ready`, in seconds.
            write_output: Receives what the process writes to stdout and stderr, and b"" at the end.
            environment: Environment variables of the process.
        """
        self._write_output = write_output
        self._reader = MessageReader()
        self.calls: dict[int, Key] = {}
        """Calls without a reply, by the id of their request. If they are not concurrent, the first one is running."""
        self._starts: dict[int, float] = {}
        self._num_requests = 0
        self._timeout = 0.0
        self.is_ready = self.is_concurrent = self.is_closed = False
        self.since = time.monotonic()
        """Start time of the oldest running call, or of the process until it is ready."""
        self.deadline = self.since + setup_timeout
        self.pid: int | None = None
        """Id of the process, once it runs."""
        self._mark = secrets.token_hex(16)
        self._stack_file = tempfile.TemporaryFile()  # noqa: SIM115 - open while the process runs
        self._process, self._lifeline = self._start(module, environment)
        self._kill_lock = threading.Lock()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin, self._stdout, self._stderr = self._process.stdin, self._process.stdout, self._process.stderr
        os.set_blocking(self._stderr.fileno(), False)
        self.guard_pid = self._process.pid
        self.outbox = self._stdout.fileno()
        self.output: int | None = self._stderr.fileno()
        """Pipe with the output of user code, or None if all processes have closed it."""
        self._outgoing: queue.SimpleQueue[Frames | None] = queue.SimpleQueue()
        self._outgoing.put(pack(setup))
        self._writer = threading.Thread(target=self._write_messages, name="worker-calls", daemon=True)
        self._writer.start()

    def _start(self, module: str, environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], FileIO]:
        """Start the guard. Return it with its pipe."""
        stack_file, pipe = self._stack_file.fileno(), subprocess.PIPE
        lifeline, sender = os.pipe()
        args = ["-u", "-m", "camshaft.workers.guard", module, str(lifeline), str(stack_file)]
        env = {**environment, guard.MARK: self._mark}
        descriptors = [stack_file, lifeline]
        owner_end = FileIO(sender, "w")
        try:
            with block_stop_signals():
                process = start_python(args, env, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, pass_fds=descriptors)
        except BaseException:
            owner_end.close()
            raise
        finally:
            os.close(lifeline)
        return process, owner_end

    def submit(self, calls: Iterable[tuple[Key, Any]], timeout: float, concurrent: bool = False) -> None:
        """Send calls, each with its key and payload. A worker has either concurrent calls or others at a time."""
        requests: list[Request] = []
        longest = max(timeout, self._timeout) if self.calls else timeout
        for key, payload in calls:
            requests.append(Request(self._num_requests, payload))
            self.calls[self._num_requests] = key
            self._starts[self._num_requests] = time.monotonic()
            self._num_requests += 1
        if requests:
            self._outgoing.put(pack(Batch(requests, timeout, concurrent)))
            self._timeout, self.is_concurrent = longest, concurrent
            self._set_deadline()

    def split_calls(self) -> tuple[list[Key], list[Key]]:
        """Remove and return the calls that are running, and those that are waiting."""
        calls = list(self.calls.values())
        self.calls.clear()
        count = len(calls) if self.is_concurrent else 1
        return calls[:count], calls[count:]

    def receive(self) -> list[Ready | Answer[Key]]:
        """Read and return events. Set `is_closed` if the process has closed its pipe."""
        data = os.read(self.outbox, 1 << 20)
        self.is_closed = not data
        events: list[Ready | Answer[Key]] = []
        for message in self._reader.feed(data):
            if isinstance(message, Started):
                self.pid = message.pid
            elif isinstance(message, Ready):
                self.is_ready = True
                events.append(message)
            else:
                events.append(Answer(self._end_call(message.id), message))
        return events

    def _end_call(self, request_id: int) -> Key:
        """Remove a call that has a reply."""
        del self._starts[request_id]
        key = self.calls.pop(request_id)
        if not self.is_concurrent and self.calls:
            self._starts[next(iter(self.calls))] = time.monotonic()
        self._set_deadline()
        return key

    def _set_deadline(self) -> None:
        self.since = self._starts[next(iter(self.calls))] if self.calls else time.monotonic()
        self.deadline = self.since + self._timeout + CANCEL_SECONDS * self.is_concurrent

    def forward_output(self) -> None:
        """Read output of user code and write it to its destination."""
        if self.output is not None:
            with contextlib.suppress(BlockingIOError):
                data = os.read(self.output, 1 << 16)
                if data:
                    self._write_output(data)
                else:
                    self.output = None

    def stacks(self, short: bool) -> str:
        """Return the stacks of the process, or only the innermost frames of user code."""
        if self.pid is None:
            return ""
        stacks = read_stacks(self.pid, self._stack_file.fileno())
        return innermost_frames(stacks) if short else stacks

    def _write_messages(self) -> None:
        """Send messages in a thread, because user code can keep the process from reading them."""
        # A broken pipe means that the process died. `wait_for` detects the end of its output.
        with contextlib.suppress(BrokenPipeError):
            while (frames := self._outgoing.get()) is not None:
                send(self._stdin.fileno(), frames)
        self._stdin.close()

    @property
    def is_dead(self) -> bool:
        """True if the process has ended or closed its pipe."""
        poll = select.poll()
        poll.register(self.outbox, 0)  # reports the end only
        return bool(poll.poll(0)) or self._process.poll() is not None

    def close_input(self) -> None:
        """Close the standard input of the process, which makes an idle process exit."""
        self._outgoing.put(None)

    def kill(self, timeout: float = 0.0) -> None:
        """Wait up to `timeout` seconds for the process to exit, then kill it. End all processes below it."""
        with self._kill_lock:  # when the interpreter exits, the thread that waits for events may kill it too
            if self._lifeline.closed:
                return
            if timeout:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout)
            if not self._end_by_guard():
                self._process.kill()
                self._process.wait()
                if self.pid is not None:
                    kill_group(self.pid)
                processes.kill_marked(f"{guard.MARK}={self._mark}")
            self._outgoing.put(None)
            self._writer.join(_EXIT_SECONDS)
            self.forward_output()
            self._write_output(b"")
            for file in (self._stdout, self._stderr, self._stack_file):
                file.close()
            self.output = None

    def _end_by_guard(self) -> bool:
        """Let the guard end all processes. Return False if it has been killed or does not answer."""
        with contextlib.suppress(BrokenPipeError), self._lifeline:
            self._lifeline.write(b"!")
        self._process.send_signal(signal.SIGCONT)  # user code may have suspended it
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(guard.END_SECONDS + _EXIT_SECONDS) != -signal.SIGKILL
        return False

    def describe_exit(self) -> str:
        """Describe how the process ended, for error messages."""
        code = guard.worker_code(self._process.wait())
        if code < 0:
            return f"was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"exited with code {code}"


W = TypeVar("W", bound=Worker[Any])


def wait_for(
    workers: Sequence[W], until: float, *sources: Connection
) -> tuple[list[Connection], list[tuple[W, Event[Any]]]]:
    """Wait for events of workers, a readable one of `sources`, or the time `until` (`time.monotonic`).

    Return the readable sources, and the events with their workers. The output of the workers is forwarded. A worker
    that has failed must be killed.
    """
    busy = {worker.outbox: worker for worker in workers if worker.calls or not worker.is_ready}
    printing = {worker.output: worker for worker in workers if worker.output is not None}
    ready: list[Connection] = []
    events: list[tuple[W, Event[Any]]] = []
    limit = min([until, *(worker.deadline for worker in busy.values())])
    for source in wait([*sources, *busy, *printing], timeout=max(0.0, limit - time.monotonic())):
        if isinstance(source, Connection):
            ready.append(source)
        elif source in printing:
            printing[source].forward_output()  # pyright: ignore[reportArgumentType]
        else:
            worker = busy.pop(source)  # pyright: ignore[reportArgumentType]
            received = worker.receive()
            events += [(worker, event) for event in received]
            if not received and worker.is_closed:
                events.append((worker, Failure("crash")))
    now = time.monotonic()
    events += [(worker, Failure("timeout")) for worker in busy.values() if now >= worker.deadline]
    return ready, events


def count_processes(workers: Iterable[Worker[Any]]) -> int:
    """Return the number of running processes that user code has started in workers."""
    own = {pid for worker in workers if worker.pid is not None for pid in (worker.guard_pid, worker.pid)}
    return processes.count_below(own)


def close_all(workers: list[Any], owner: int) -> None:
    """Let idle workers exit, and end the others, if this process is the owner and not a fork of it."""
    if os.getpid() != owner:
        return
    for worker in workers:
        worker.close_input()
    for worker in workers:
        worker.kill(timeout=_EXIT_SECONDS)
    workers.clear()
