"""Worker processes for reward functions: started on demand, killed on timeout, replaced after a crash.

    pool = WorkerPool(spec, num_workers=8)
    job = Job(len(samples))
    job.put(0, samples)                  # or in parts from another thread while the job runs
    pool.run(job)                        # job.outcomes: one per sample, in order
    pool.close()

A single thread sends each worker several calls at a time and waits on the pipes of all workers and on the pipe that
announces new samples. Workers answer each call separately, so the time limit applies per call and a hanging call is
identified. A call contains one sample, or all samples for a batched function. A batch that fails as a whole is retried
in halves until the failing sample is isolated. Used only by `manager.py`.
"""

import contextlib
import logging
import math
import os
import pickle
import queue
import signal
import subprocess
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe, wait
from typing import Any, Literal

from camshaft.errors import RewardError
from camshaft.rewards.messages import Answer, Loaded, Sample, Spec
from camshaft.subprocesses import MessageReader, kill_group, pack, send, start_python

Kind = Literal["ok", "error", "invalid", "timeout", "crash"]
Rows = tuple[int, ...]
"""Row numbers of the samples of one call."""

LOAD_SECONDS = 120.0
"""Time limit for loading the function in a worker."""

_MAX_CHUNK = 64
_EXIT_SECONDS = 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """Result of one sample. `score`, `parts` and `answer` are valid if `kind` is "ok"."""

    kind: Kind
    score: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    message: str = ""
    trace: str = ""
    answer: str | None = None
    seconds: float = 0.0
    """Duration of the call that produced this outcome."""


class WorkerPool:
    """Up to `num_workers` processes, each with the function of `spec` loaded."""

    def __init__(self, spec: Spec, num_workers: int):
        self.spec = spec
        self.num_workers = num_workers
        self.batched = False
        """True if the function takes batches; set by `check`."""
        self._workers: list[_Worker] = []
        # Also runs at interpreter exit. A forked child inherits these objects but must not close them.
        self.close = weakref.finalize(self, _close_all, self._workers, os.getpid())
        """Stop all workers permanently. Called automatically when the pool is deleted or the interpreter exits."""

    def check(self) -> None:
        """Start one worker; raise RewardError if it cannot load the function."""
        with self._all_stopped_on_error():
            worker = _Worker(self.spec)
            self._workers.append(worker)
            while not worker.ready:
                self._wait(Job(0))
            self.batched = worker.batched

    def run(self, job: "Job") -> None:
        """Run the calls of a job, including samples that are added later, until all have an outcome."""
        if not self.close.alive:
            raise RewardError("the reward workers are closed; create a new RewardManager")
        self._stop([worker for worker in self._workers if worker.is_dead])
        with self._all_stopped_on_error():
            while not job.done:
                num_idle = sum(not worker.calls for worker in self._workers)
                for _ in range(min(job.num_queued - num_idle, self.num_workers - len(self._workers))):
                    self._workers.append(_Worker(self.spec))
                for worker in self._workers:
                    if worker.ready and not worker.calls and job.num_queued:
                        worker.assign(job, job.take(self.num_workers))
                self._wait(job)
        self._stop([worker for worker in self._workers if worker.calls])

    @contextlib.contextmanager
    def _all_stopped_on_error(self) -> Iterator[None]:
        """Stop all workers on an exception, so that none keeps a call whose answer is not read."""
        try:
            yield
        except BaseException:
            self._stop(list(self._workers))
            raise

    def _wait(self, job: "Job") -> None:
        """Wait for messages or the next deadline, and handle them."""
        busy = {worker.outbox: worker for worker in self._workers if worker.calls or not worker.ready}
        limits = [max(0.0, worker.deadline - time.monotonic()) for worker in busy.values()]
        for source in wait([job.wakeup_receiver, *busy], timeout=min(limits, default=None)):
            if source is job.wakeup_receiver:
                job.receive(self.batched)
                self._stop([w for w in self._workers if w.is_dead and w.ready and not w.calls])
                continue
            worker = busy.pop(source)  # pyright: ignore[reportArgumentType]
            if not worker.receive(job):
                self._lost(worker, job, "crash")
        for worker in busy.values():
            if time.monotonic() >= worker.deadline:
                self._lost(worker, job, "timeout")

    def _lost(self, worker: "_Worker", job: "Job", kind: Literal["crash", "timeout"]) -> None:
        """Handle a crashed or late worker: fail its current call and requeue the others."""
        self._stop([worker])
        if not worker.ready:
            outcome = worker.fate() if kind == "crash" else f"did not finish within {LOAD_SECONDS:g} s"
            raise RewardError(f"loading the reward function {self.spec.path or ''} '{self.spec.name}' {outcome}")
        timeout = f"no answer within {self.spec.timeout:g} s; the process was killed"
        message = timeout if kind == "timeout" else f"it {worker.fate()}"
        rows = worker.calls.popleft()
        job.put_back(worker.calls)
        job.fail(rows, Outcome(kind, message=message, seconds=time.monotonic() - worker.since))

    def _stop(self, workers: "Sequence[_Worker]") -> None:
        for worker in workers:
            worker.kill()
            self._workers.remove(worker)


class Job:
    """Samples, queued calls and outcomes of one `run`.

    `put` and `cancel` can be called from any thread, the other methods only from the thread that runs the job.
    """

    def __init__(self, num_rows: int, stop_at_failure: bool = False):
        """With `stop_at_failure`, outcomes after the first failed sample may be None."""
        self.samples: dict[int, Sample] = {}
        self.outcomes: list[Outcome | None] = [None] * num_rows
        self._put: queue.SimpleQueue[tuple[int, Sequence[Sample]] | None] = queue.SimpleQueue()
        self.wakeup_receiver, self._wakeup_sender = Pipe(duplex=False)
        """Pipe that becomes readable when samples were added."""
        self._queue: deque[Rows] = deque()
        self._stop_at_failure = stop_at_failure
        self._end = num_rows
        """Rows from here on are ignored."""
        self._num_open = num_rows
        """Number of rows before `_end` without an outcome."""

    def put(self, first: int, samples: Sequence[Sample]) -> None:
        """Add the samples of the rows from `first` on; for batched functions, of all rows."""
        self._notify((first, samples))

    def cancel(self) -> None:
        """Cancel the job."""
        self._notify(None)

    def _notify(self, item: tuple[int, Sequence[Sample]] | None) -> None:
        self._put.put(item)
        self._wakeup_sender.send_bytes(b"1")

    def receive(self, batched: bool) -> None:
        """Move one `put` into the queue; raise RewardError if the job was cancelled."""
        self.wakeup_receiver.recv_bytes()
        item = self._put.get()
        if item is None:
            raise RewardError("the reward calls were cancelled")
        first_row, samples = item
        rows = tuple(range(first_row, first_row + len(samples)))
        self.samples.update(zip(rows, samples, strict=True))
        self._queue.extend(self._drop_ignored_rows([rows] if batched else [(row,) for row in rows]))

    @property
    def done(self) -> bool:
        return self._num_open == 0

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def take(self, num_workers: int) -> list[Rows]:
        """Return the next calls for a worker: large chunks first, single calls last, to balance the workers."""
        count = min(_MAX_CHUNK, math.ceil(len(self._queue) / (4 * num_workers)))
        return [self._queue.popleft() for _ in range(count)]

    def put_back(self, calls: Iterable[Rows]) -> None:
        """Requeue calls at the head of the queue, in order, without ignored rows."""
        self._queue.extendleft(reversed(self._drop_ignored_rows(calls)))

    def answer(self, rows: Rows, answer: Answer) -> None:
        """Record the answer of a call."""
        outcomes = [Outcome(**reply._asdict(), seconds=answer.seconds) for reply in answer.replies]
        if len(outcomes) == len(rows):
            for row, outcome in zip(rows, outcomes, strict=True):
                self.settle(row, outcome)
        else:
            self.fail(rows, outcomes[0])

    def fail(self, rows: Rows, outcome: Outcome) -> None:
        """Record a failed call: settle a single sample, or requeue each half of several samples."""
        if len(rows) == 1:
            self.settle(rows[0], outcome)
            return
        logger.warning("a call with %d samples failed and is retried in halves: %s", len(rows), outcome.message)
        middle = len(rows) // 2
        self.put_back([rows[:middle], rows[middle:]])

    def settle(self, row: int, outcome: Outcome) -> None:
        self.outcomes[row] = outcome
        if self._stop_at_failure and outcome.kind != "ok" and row < self._end:
            # Earlier rows may still fail, so their calls continue; they determine the first failure.
            self._end = row
            self._queue = deque(self._drop_ignored_rows(self._queue))
            self._num_open = self.outcomes[:row].count(None)
        elif row < self._end:
            self._num_open -= 1

    def _drop_ignored_rows(self, calls: Iterable[Rows]) -> list[Rows]:
        kept = (tuple(row for row in rows if row < self._end) for rows in calls)
        return [rows for rows in kept if rows]


class _Worker:
    """One worker process with its pending calls."""

    def __init__(self, spec: Spec):
        self._timeout = spec.timeout
        self._reader = MessageReader()
        self.calls: deque[Rows] = deque()
        """Calls without an answer; the first one is running."""
        self.ready = self.batched = False
        self.since = time.monotonic()
        """Start time of the current call."""
        self.deadline = self.since + LOAD_SECONDS
        pipe = subprocess.PIPE
        self._process = start_python(["-u", "-m", "camshaft.rewards.worker"], stdin=pipe, stdout=pipe, bufsize=0)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.outbox = self._stdout.fileno()
        self._send(spec)

    def assign(self, job: Job, calls: list[Rows]) -> None:
        self._send([[pickle.dumps(job.samples[row], protocol=5) for row in rows] for rows in calls])
        self.calls.extend(calls)
        self._next_call()

    def receive(self, job: Job) -> bool:
        """Read and handle messages; return False if the process closed its pipe."""
        data = os.read(self.outbox, 1 << 20)
        for message in self._reader.feed(data):
            self._take(message, job)
        return bool(data)

    def _take(self, message: Loaded | Answer, job: Job) -> None:
        if isinstance(message, Loaded):
            if message.problem is not None:
                raise RewardError(message.problem)
            self.ready, self.batched = True, message.batched
            return
        job.answer(self.calls.popleft(), message)
        self._next_call()

    def _next_call(self) -> None:
        self.since = time.monotonic()
        self.deadline = self.since + self._timeout

    def _send(self, message: Any) -> None:
        # The process died while it was idle; the next wait detects the end of its output.
        with contextlib.suppress(BrokenPipeError):
            send(self._stdin.fileno(), pack(message))

    @property
    def is_dead(self) -> bool:
        return self._process.poll() is not None

    def close_input(self) -> None:
        """Close the input of the process; an idle process exits."""
        self._stdin.close()

    def kill(self, patience: float = 0.0) -> None:
        """Kill the process and its children, after waiting up to `patience` seconds for it to exit."""
        if patience:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
        kill_group(self._process.pid)
        self._process.wait()
        self._stdin.close()
        self._stdout.close()

    def fate(self) -> str:
        """Describe how the process ended, for error messages."""
        code = self._process.returncode
        if code is not None and code < 0:
            return f"was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"ended its process (exit code {code})"


def _close_all(workers: list[_Worker], owner: int) -> None:
    if os.getpid() != owner:
        return
    for worker in workers:
        worker.close_input()
    for worker in workers:
        worker.kill(patience=_EXIT_SECONDS)
    workers.clear()
