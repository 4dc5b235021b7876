"""The commands of each model, in the order of their numbers, and the queue that executes them.

    log = CommandLog(queue, gap_timeout=300.0)
    future = log.submit(number, digest, prepare)      # again with the same body: the same future, executed once
    queue.start()                                     # executes commands in a thread

A client numbers the commands of a model 1, 2, 3, ... and sends several at once; the SDK sends the first chunk of a
batch last. A command is queued when all commands with smaller numbers have been queued. The queue executes jobs one
after the other. Jobs with the same `batch` key, which requests for samples have, are executed together.
"""

import hashlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from camshaft.errors import WorkerError
from camshaft.service.errors import CommandError, Refused
from camshaft.service.futures import Future, Result

GATHER_SECONDS = 0.005
"""Time that a batch waits for further requests after the last one."""
MAX_GATHER_SECONDS = 0.05
MAX_ROWS = 1024
"""Maximum number of samples of a batch."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """Work for the queue, whose result resolves a future."""

    future: Future
    execute: Callable[[Sequence["Job"]], Sequence[Result]]
    """Called with this job, or with all jobs of its batch. Return a result for each."""
    argument: Any = None
    batch: Hashable | None = None
    """Jobs with the same key are executed together. None: alone."""
    num_rows: int = 1


@dataclass(frozen=True)
class Command:
    """A numbered command of a model."""

    job: Job
    abandon: Callable[[str], Result]
    """Called instead of the job if a command before it never arrived, with the reason. Return its result."""


class JobQueue:
    """Jobs of all models and samplers, in the order in which they became ready."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._execute_all, name="commands", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Execute the jobs that are queued, and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def put(self, job: Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._jobs)

    def _execute_all(self) -> None:
        while jobs := self._take():
            results = _execute(jobs)
            for job, result in zip(jobs, results, strict=True):
                job.future.resolve(result)

    def _take(self) -> list[Job]:
        """Wait for the next job, and return it with the others of its batch. Return nothing after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_closed)
            if not self._jobs:
                return []
            first = self._jobs[0]
            if first.batch is None:
                return [self._jobs.popleft()]
            self._gather()
            batch, others, num_rows = list[Job](), deque[Job](), 0
            for job in self._jobs:
                fits = job.batch == first.batch and (not batch or num_rows + job.num_rows <= MAX_ROWS)
                (batch if fits else others).append(job)
                num_rows += job.num_rows if fits else 0
            self._jobs = others
            return batch

    def _gather(self) -> None:
        """Wait until no further job arrives for a moment, because clients send the requests of a batch one by one."""
        deadline = time.monotonic() + MAX_GATHER_SECONDS
        while not self._is_closed and time.monotonic() < deadline:
            count = len(self._jobs)
            if not self._changed.wait_for(lambda count=count: len(self._jobs) > count, GATHER_SECONDS):
                return


def _execute(jobs: Sequence[Job]) -> Sequence[Result]:
    """Return a result for each job. An error is the result of all of them."""
    try:
        return jobs[0].execute(jobs)
    except CommandError as error:
        failure = Result.of_error("user", str(error))
    except WorkerError as error:
        logger.error("%s", error)
        failure = Result.of_error("server", str(error).partition("\n")[0])
    except Exception as error:
        logger.exception("a command failed")
        failure = Result.of_error("server", f"{type(error).__name__}: {error}; the log of the server has the traceback")
    return [failure] * len(jobs)


class Repetitions:
    """Numbered requests that have been accepted, so that a repeated one gets the future of the first."""

    def __init__(self, subject: str):
        self.subject = subject
        """Name of a request in errors, such as "command"."""
        self._accepted: dict[int, tuple[bytes, Any]] = {}

    def find(self, number: int, digest: bytes) -> Any:
        """Return what the request got, or None for a new number. Raise `Refused` if its body was another one."""
        if number not in self._accepted:
            return None
        known, value = self._accepted[number]
        if known != digest:
            raise Refused(
                f"{self.subject} {number} was already sent with another body, which has been accepted; use a new number"
            )
        return value

    def add(self, number: int, digest: bytes, value: Any) -> None:
        self._accepted[number] = digest, value


class CommandLog:
    """Commands of one model. Methods are called from several threads."""

    def __init__(self, queue: JobQueue, gap_timeout: float):
        self.queue, self.gap_timeout = queue, gap_timeout
        self._repetitions = Repetitions("command")
        self._waiting: dict[int, Command] = {}
        self._next = 1
        """Number of the next command to be queued."""
        self._waiting_since = 0.0
        self._lock = threading.Lock()

    def submit(self, number: int, digest: bytes, prepare: Callable[[], Command]) -> Future:
        """Accept a command and return its future. `prepare` is called for a new one."""
        if number < 1:
            raise Refused(f"seq_id={number}: the commands of a model are numbered from 1; send seq_id")
        with self._lock:
            future = self._repetitions.find(number, digest)
            if future is not None:
                return future
            if number < self._next:
                raise Refused(
                    f"command {number} came after those that waited for it had been given up; they have failed, so "
                    "send it with a new number"
                )
            command = prepare()
            self._repetitions.add(number, digest, command.job.future)
            if not self._waiting:
                self._waiting_since = time.monotonic()
            self._waiting[number] = command
            while self._next in self._waiting:
                self.queue.put(self._waiting.pop(self._next).job)
                self._next += 1
                self._waiting_since = time.monotonic()
            return command.job.future

    def end_gap(self) -> None:
        """Fail the commands that wait for a number that has not arrived within the time limit."""
        with self._lock:
            if not self._waiting or time.monotonic() < self._waiting_since + self.gap_timeout:
                return
            missing, numbers = self._next, sorted(self._waiting)
            reason = (
                f"command {missing} of this model did not arrive within {self.gap_timeout:g} s (gap_timeout), so "
                f"{'commands' if len(numbers) > 1 else 'command'} {', '.join(map(str, numbers))}, which waited for it, "
                "failed and changed nothing; send them again with new numbers"
            )
            logger.warning("%s", reason)
            for number in numbers:
                command = self._waiting.pop(number)
                self.queue.put(Job(command.job.future, lambda _, command=command: [command.abandon(reason)]))
            self._next = numbers[-1] + 1


def digest_json(path: str, body: Any) -> bytes:
    """Return the digest of a JSON request, which does not depend on the order of its fields."""
    return hashlib.sha256(path.encode() + b"\0" + json.dumps(body, sort_keys=True).encode()).digest()


def digest_message(path: str, message: Any) -> bytes:
    """Return the digest of a protobuf request, which does not depend on the order of its maps."""
    return hashlib.sha256(path.encode() + b"\0" + message.SerializeToString(deterministic=True)).digest()
