"""The commands of each model, in the order of their numbers, and the queue that executes them.

    log = CommandLog("2f9a:train:0", queue, futures, prepare)
    future = log.submit(number, "optim_step", content)    # again with the same content: the same future
    queue.start()                                         # executes commands in a thread

A client numbers the commands of a model 1, 2, 3, ... and sends several at once; the SDK sends the first chunk of a
batch last. A command is queued when all commands with smaller numbers have been queued. The queue executes jobs one
after the other. Sessions take turns, so a client waits for one job of each other client, however many they have queued.
A turn may have several training commands if all of them together have no more tokens than the largest one that another
session waits for: a client with short commands then gets as many tokens as one with long commands. Jobs with the same
`batch` key, which requests for samples have, are executed together, the oldest ones first.

If a server has processes that only sample, samples have a queue of their own, whose thread runs beside the one that
trains.

A command is in the log of the server (store.py) before its request is answered, and so is its result before a client
gets it. A server that is started again therefore continues where the log ends.
"""

import hashlib
import itertools
import json
import logging
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from camshaft.errors import WorkerError
from camshaft.service.errors import CommandError, Refused
from camshaft.service.futures import Future, Futures, Result
from camshaft.service.store import Entry, Store, abandon_entry, add_entry, session_of, set_result
from camshaft.service.times import SAMPLE, TRAIN, Kind, SessionTimes

GATHER_SECONDS = 0.005
"""Time that a batch waits for further requests after the last one."""
MAX_GATHER_SECONDS = 0.05
MAX_ROWS = 1024
"""Maximum number of samples of a batch."""
MAX_ATTEMPTS = 3
"""Number of times that a job is started if the worker process dies while it runs."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """Work for the queue, whose result resolves a future."""

    future: Future
    execute: Callable[[Sequence["Job"]], Sequence[Result]]
    """Called with this job, or with all jobs of its batch. Return a result for each. Called again after a crash of the
    worker process."""
    argument: Any = None
    batch: Hashable | None = None
    """Jobs with the same key are executed together. None: alone."""
    num_rows: int = 1
    num_tokens: int | None = None
    """Number of tokens of a training command. None: the job is a turn of its own."""
    keeps_content: bool = False
    """True for a command that is executed again when its model is restored, so that the log keeps its body."""
    give_up: Callable[[str], Result] | None = None
    """Called with the reason if the worker process has died in every attempt. Return the result."""
    is_ready: Callable[[], bool] = lambda: True
    """False as long as the job, and those of its session behind it, wait for jobs of other sessions."""


@dataclass(frozen=True)
class Command:
    """A numbered command of a model."""

    job: Job
    abandon: Callable[[str], Result]
    """Called instead of the job if a command before it never arrived, with the reason. Return its result."""


class Postponed(Exception):
    """Raised by a batch that cannot run yet: `queue` executes `prepare`, and then the batch is queued again."""

    def __init__(self, queue: "JobQueue", prepare: Callable[[], object]):
        super().__init__()
        self.queue, self.prepare = queue, prepare


class JobQueue:
    """Jobs of all sessions, which take turns. The jobs of a session are in the order in which they became ready."""

    def __init__(self, store: Store, times: SessionTimes | None = None, kind: Kind | None = None) -> None:
        """`kind` is that of all jobs, if this queue has only one."""
        self.store = store
        self.kind: Kind | None = kind
        self.times = times or SessionTimes()
        self._jobs: dict[str, deque[Job]] = {}
        """Jobs by session. The first session has the next turn."""
        self._turn, self._num_tokens = "", 0
        """Session that had the last job, and the tokens of its turn so far."""
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._execute_all, name="commands", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, jobs: Sequence[Job] = ()) -> None:
        """Execute these jobs in place of those that are queued, which remain in the log, and end the thread."""
        with self._changed:
            self._jobs, self._is_closed = {}, True
            for job in jobs:
                self.times.added(job.future.session)
                self._jobs.setdefault(job.future.session, deque()).append(job)
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def put(self, job: Job) -> None:
        with self._changed:
            if not self._is_closed:
                self.times.added(job.future.session)
                self._append(job)

    def _append(self, job: Job) -> None:
        with self._changed:
            if not self._is_closed:
                self._jobs.setdefault(job.future.session, deque()).append(job)
                self._changed.notify_all()

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def _execute_all(self) -> None:
        while jobs := self._take():
            num_rows, shares = sum(job.num_rows for job in jobs), Counter[str]()
            for job in jobs:
                shares[job.future.session] += job.num_rows
            kind = self.kind or (TRAIN if jobs[0].batch is None else SAMPLE)
            with self.times.working({session: rows / num_rows for session, rows in shares.items()}, kind):
                outcome = _execute(jobs)
            if isinstance(outcome, Postponed):
                outcome.queue.put(self._preparation(jobs, outcome))
            else:
                self._deliver_all(jobs, outcome)

    def _preparation(self, jobs: Sequence[Job], postponed: Postponed) -> Job:
        """Return the job for the other queue. If it fails, so do these jobs."""

        def execute(_: Any) -> list[Result]:
            try:
                postponed.prepare()
            except WorkerError:
                raise
            except Exception as error:
                self._deliver_all(jobs, [failure_of(error)] * len(jobs))
            else:
                for job in jobs:
                    self._append(job)
            return [Result.of_json({})]

        def give_up(reason: str) -> Result:
            self._deliver_all(jobs, [Result.of_error("server", reason)] * len(jobs))
            return Result.of_json({})

        return Job(Future(jobs[0].future.session), execute, give_up=give_up)

    def _deliver_all(self, jobs: Sequence[Job], results: Sequence[Result]) -> None:
        for job, result in zip(jobs, results, strict=True):
            self._deliver(job, result)
            self.times.finished(job.future.session)

    def _deliver(self, job: Job, result: Result) -> None:
        """Resolve the future of a job when its result is in the log."""
        entry = () if job.future.key is None else (set_result(job.future, result, job.keeps_content),)
        self.store.write(*entry, *result.writes, then=lambda: job.future.resolve(result))

    def _take(self) -> list[Job]:
        """Wait for the next job, and return it with the others of its batch. Return nothing after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or any(jobs[0].is_ready() for jobs in self._jobs.values()))
            if not self._jobs:
                return []
            if not self._continues_turn():
                if self._turn in self._jobs:  # it goes behind all clients that wait
                    self._jobs[self._turn] = self._jobs.pop(self._turn)
                self._turn = next(session for session, jobs in self._jobs.items() if jobs[0].is_ready())
                self._num_tokens = 0
            first = self._jobs[self._turn][0]
            if first.batch is not None:
                self._gather()
                if self._is_closed:  # in the meantime, with other jobs
                    return self._take()
            self._num_tokens += first.num_tokens or 0
            batch = [first] if first.batch is None else self._batch_of(first)
            for job in batch:
                jobs = self._jobs[job.future.session]
                jobs.remove(job)
                if not jobs:
                    del self._jobs[job.future.session]
            return batch

    def _continues_turn(self) -> bool:
        """Return True if the next job of the session that had the last one belongs to the same turn."""
        if not self._num_tokens or self._turn not in self._jobs:
            return False
        num_tokens = self._jobs[self._turn][0].num_tokens
        others = (jobs[0].num_tokens or 0 for session, jobs in self._jobs.items() if session != self._turn)
        return num_tokens is not None and self._num_tokens + num_tokens <= max(others, default=0)

    def _batch_of(self, first: Job) -> list[Job]:
        """Return the jobs of the batch of a job, from all sessions, the oldest ones first."""
        batch, num_rows = [first], first.num_rows
        for job in sorted(itertools.chain(*self._jobs.values()), key=lambda job: job.future.age):
            if job is not first and job.batch == first.batch and num_rows + job.num_rows <= MAX_ROWS:
                batch.append(job)
                num_rows += job.num_rows
        return batch

    def _gather(self) -> None:
        """Wait until no further job arrives for a moment, because clients send the requests of a batch one by one."""
        deadline = time.monotonic() + MAX_GATHER_SECONDS
        while not self._is_closed and time.monotonic() < deadline:
            count = len(self)
            if not self._changed.wait_for(lambda count=count: self._is_closed or len(self) > count, GATHER_SECONDS):
                return


def _execute(jobs: Sequence[Job]) -> Sequence[Result] | Postponed:
    """Return a result for each job, or what has to be done before. An error is the result of all jobs."""
    reason = ""
    for _ in range(MAX_ATTEMPTS):
        try:
            results = jobs[0].execute(jobs)
            assert len(results) == len(jobs), "each job has a result"
            return results
        except Postponed as postponed:
            return postponed
        except WorkerError as error:
            logger.error("%s", error)
            reason = f"{error}".partition("\n")[0]
        except Exception as error:
            return [failure_of(error)] * len(jobs)
    reason = f"the worker process ended in each of {MAX_ATTEMPTS} attempts: {reason}"
    return [_give_up(job, reason) for job in jobs]


def _give_up(job: Job, reason: str) -> Result:
    try:
        return Result.of_error("server", reason) if job.give_up is None else job.give_up(reason)
    except Exception as error:
        return failure_of(error)


def failure_of(error: Exception) -> Result:
    """Return the result of a command that has raised an error."""
    if isinstance(error, CommandError | Refused):
        return Result.of_error("user", str(error))
    logger.error("a command failed", exc_info=error)
    return Result.of_error(
        "server", f"{type(error).__name__}: {error}; log.txt in the folder of the server has the traceback"
    )


def failed_job(future: Future, error: Exception) -> Job:
    """Return the job of a request that cannot be executed."""
    result = failure_of(error)
    return Job(future, lambda _: [result])


class Repetitions:
    """Numbered requests that have been accepted, so that a repeated one gets the future of the first.

    A request is known as long as its future is.
    """

    def __init__(self, subject: str):
        self.subject = subject
        """Name of a request in errors, such as "command"."""
        self._accepted: weakref.WeakValueDictionary[int, Future] = weakref.WeakValueDictionary()

    def find(self, number: int, digest: bytes) -> Future | None:
        """Return the future of the request, or None for a new number. Raise `Refused` if its body was another one."""
        future = self._accepted.get(number)
        if future is not None and future.digest != digest:
            raise Refused(
                f"{self.subject} {number} was already sent with another body, which has been accepted; use a new number"
            )
        return future

    def add(self, number: int, future: Future) -> None:
        self._accepted[number] = future

    def are_pending(self) -> bool:
        """Return True if a request has no result yet."""
        return any(future.is_pending for future in list(self._accepted.values()))


class CommandLog:
    """Commands of one model. Methods are called from several threads."""

    def __init__(self, subject: str, queue: JobQueue, futures: Futures, prepare: Callable[[Entry, Future], Command]):
        self.subject, self.queue, self.futures, self.prepare = subject, queue, futures, prepare
        self._repetitions = Repetitions("command")
        self._waiting: dict[int, Command] = {}
        self._next = 1
        """Number of the next command to be queued."""
        self._waiting_since = 0.0
        self._lock = threading.Lock()

    def submit(self, number: int, kind: str, content: bytes, admit: Callable[[], None] = lambda: None) -> Future:
        """Accept a command, and return its future when it is in the log. `admit` may refuse a new one."""
        if number < 1:
            raise Refused(f"seq_id={number}: the commands of a model are numbered from 1; send seq_id")
        digest = digest_of(kind, content)
        with self._lock:
            future = self._repetitions.find(number, digest)
            if future is None:
                if number < self._next:
                    raise Refused(
                        f"command {number} arrived too late: the commands that waited for it have failed "
                        "(gap_timeout), or it has run, and its result has expired (result_ttl); send commands that "
                        "have not run with new numbers"
                    )
                admit()
                future = self.futures.create(session_of(self.subject), (self.subject, number), digest=digest)
                entry = Entry(self.subject, number, kind, digest, future.identifier, content)
                command = self.prepare(entry, future)
                self.queue.store.write(add_entry(entry))
                self._accept(entry, future, command)
        self.queue.store.flush()
        return future

    def restore(self, entry: Entry) -> None:
        """Add an entry of the log after a restart. Entries are added in the order of their numbers."""
        if entry.is_expired:
            self._next = entry.number + 1
            return
        future = restore_future(self.futures, entry)
        if entry.result is None and entry.abandoned is None:
            self._accept(entry, future, self.prepare(entry, future))
            return
        self._repetitions.add(entry.number, future)
        self._next = entry.number + 1
        if entry.result is None:
            self._abandon(self.prepare(entry, future), f"{entry.abandoned}")

    def _accept(self, entry: Entry, future: Future, command: Command) -> None:
        """Queue a command, and those that have waited for it, or let it wait for an earlier one."""
        self._repetitions.add(entry.number, future)
        if not self._waiting:
            self._waiting_since = time.monotonic()
        self._waiting[entry.number] = command
        while self._next in self._waiting:
            self.queue.put(self._waiting.pop(self._next).job)
            self._next += 1
            self._waiting_since = time.monotonic()

    def end_gap(self, gap_timeout: float) -> None:
        """Fail the commands that wait for a number that has not arrived within the time limit."""
        with self._lock:
            if not self._waiting or time.monotonic() < self._waiting_since + gap_timeout:
                return
            missing, numbers = self._next, sorted(self._waiting)
            reason = (
                f"command {missing} of this model did not arrive within {gap_timeout:g} s (gap_timeout), so "
                f"{'commands' if len(numbers) > 1 else 'command'} {', '.join(map(str, numbers))}, which waited for it, "
                "failed and changed no weight; the next optim_step fails too and clears the gradients, so send the "
                "whole batch again with new numbers"
            )
            logger.warning("%s", reason)
            self.queue.store.write(*(abandon_entry(self.subject, number, reason) for number in numbers))
            for number in numbers:
                self._abandon(self._waiting.pop(number), reason)
            self._next = numbers[-1] + 1

    def _abandon(self, command: Command, reason: str) -> None:
        self.queue.put(replace(command.job, execute=lambda _: [command.abandon(reason)]))


def restore_future(futures: Futures, entry: Entry, is_kept: bool = False) -> Future:
    """Create the future of an entry of the log, with its result if it has one."""
    key = entry.subject, entry.number
    future = futures.create(session_of(entry.subject), key, entry.future, entry.digest, is_kept)
    if entry.result is not None:
        future.resolve(entry.result)
    return future


def write_json(body: Any) -> bytes:
    """Return a body of JSON as bytes that do not depend on the order of its fields."""
    return json.dumps(asdict(body), sort_keys=True).encode()


def digest_of(kind: str, content: bytes) -> bytes:
    """Return the digest by which a repeated request is recognized."""
    return hashlib.sha256(kind.encode() + b"\0" + content).digest()
