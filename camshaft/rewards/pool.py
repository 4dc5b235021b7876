"""The processes that reward functions run in: started when needed, killed when late, replaced when dead.

    pool = WorkerPool(spec, num_workers=8)
    job = Job(len(samples))
    job.put(0, samples)                  # or part by part, by another thread while it runs
    pool.run(job)                        # job.outcomes: one per sample, in order, whatever happened
    pool.close()

One thread, no locks: it sends each worker a few calls at a time and waits on all their pipes at once, and on one that
tells of more samples. A worker answers call by call, so the time limit is that of one call and it is known which call
hangs. A call has one sample, or all of them if the function takes batches; a batch that fails as a whole is tried again
in halves, down to the sample that is to blame. Used by `manager.py` only.
"""

import contextlib
import logging
import math
import os
import queue
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any, Literal

import camshaft
from camshaft.errors import RewardError
from camshaft.rewards.wire import Answer, FrameReader, Loaded, Sample, Spec, pack

Kind = Literal["ok", "error", "invalid", "timeout", "crash"]
Rows = tuple[int, ...]
"""The samples of one call."""

LOAD_SECONDS = 120.0
"""A worker that has not loaded its function by then is not going to."""

_MAX_CHUNK = 64
_EXIT_SECONDS = 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What became of one sample. `score`, `parts` and `answer` are what the function gave, if `kind` is "ok"."""

    kind: Kind
    score: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    message: str = ""
    trace: str = ""
    answer: str | None = None
    seconds: float = 0.0
    """What the call took that decided it."""


class WorkerPool:
    """At most `num_workers` processes, each with the function of `spec` loaded."""

    def __init__(self, spec: Spec, num_workers: int):
        self.spec = spec
        self.num_workers = num_workers
        self.batched = False
        """Whether the function takes batches; known after `check`."""
        self._workers: list[_Worker] = []
        # Also runs at the end of the interpreter. A forked child has these objects, but they are not its own.
        self.close = weakref.finalize(self, _close_all, self._workers, os.getpid())
        """End all workers, for good. Happens by itself when the pool is dropped or the interpreter exits."""

    def check(self) -> None:
        """Start one worker and see that the function loads, or raise why not."""
        with self._all_stopped_on_error():
            worker = _Worker(self.spec)
            self._workers.append(worker)
            while not worker.ready:
                self._wait(Job(0))
            self.batched = worker.batched

    def run(self, job: "Job") -> None:
        """Find the outcomes of all samples of the job, waiting for those that are still to be put."""
        if not self.close.alive:
            raise RewardError("the reward workers have been closed")
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
        """Whatever interrupts us, no worker may still hold a sample whose answer nobody takes."""
        try:
            yield
        except BaseException:
            self._stop(list(self._workers))
            raise

    def _wait(self, job: "Job") -> None:
        """Until something arrives or a limit passes; then act on it."""
        watched = {worker.outbox: worker for worker in self._workers if worker.calls or not worker.ready}
        limits = [max(0.0, worker.deadline - time.monotonic()) for worker in watched.values()]
        for source in wait([job.bell, *watched], timeout=min(limits, default=None)):
            if source is job.bell:
                job.take_in(self.batched)
                self._stop([one for one in self._workers if one.is_dead and one.ready and not one.calls])
                continue
            worker = watched.pop(source)  # pyright: ignore[reportArgumentType]
            if not worker.receive(job):
                self._lost(worker, job, "crash")
        for worker in watched.values():
            if time.monotonic() >= worker.deadline:
                self._lost(worker, job, "timeout")

    def _lost(self, worker: "_Worker", job: "Job", kind: Literal["crash", "timeout"]) -> None:
        """A worker is gone: its current call is to blame, the others go back to the queue."""
        self._stop([worker])
        if not worker.ready:
            how = worker.fate() if kind == "crash" else f"did not finish within {LOAD_SECONDS:g} s"
            raise RewardError(f"loading the reward function {self.spec.path or ''} '{self.spec.name}' {how}")
        late = f"no answer within {self.spec.timeout:g} s; the process was killed"
        message = late if kind == "timeout" else f"it {worker.fate()}"
        rows = worker.calls.popleft()
        job.put_back(worker.calls)
        job.fail(rows, Outcome(kind, message=message, seconds=time.monotonic() - worker.since))

    def _stop(self, workers: "Sequence[_Worker]") -> None:
        for worker in workers:
            worker.kill()
            self._workers.remove(worker)


class Job:
    """The samples of one `run`, which calls wait, and what became of the others.

    Any thread may `put` samples and `give_up`; the rest is for the one that runs it.
    """

    def __init__(self, num_rows: int, stop_at_failure: bool = False):
        """With `stop_at_failure` the outcomes after that of the first failed sample may be None."""
        self.samples: dict[int, Sample] = {}
        self.outcomes: list[Outcome | None] = [None] * num_rows
        self._put: queue.SimpleQueue[tuple[int, Sequence[Sample]] | None] = queue.SimpleQueue()
        self.bell, self._button = Pipe(duplex=False)
        """Can be read from when something was put."""
        self._queue: deque[Rows] = deque()
        self._stop_at_failure = stop_at_failure
        self._end = num_rows
        """Rows from here on do not matter any more."""
        self._num_open = num_rows
        """Rows before `_end` that have no outcome."""

    def put(self, first: int, samples: Sequence[Sample]) -> None:
        """The samples of the rows from `first` on; where the function takes batches, of all rows."""
        self._tell((first, samples))

    def give_up(self) -> None:
        """Nobody waits for the outcomes any more."""
        self._tell(None)

    def _tell(self, news: tuple[int, Sequence[Sample]] | None) -> None:
        self._put.put(news)
        self._button.send_bytes(b"1")

    def take_in(self, batched: bool) -> None:
        """What was put, once for each time that the bell rings."""
        self.bell.recv_bytes()
        news = self._put.get()
        if news is None:
            raise RewardError("the scores were given up")
        rows = tuple(range(news[0], news[0] + len(news[1])))
        self.samples.update(zip(rows, news[1], strict=True))
        self._queue.extend(self._wanted([rows] if batched else [(row,) for row in rows]))

    @property
    def done(self) -> bool:
        return self._num_open == 0

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def take(self, num_workers: int) -> list[Rows]:
        """The next calls for one worker: many at first, single ones towards the end, so that all end together."""
        count = min(_MAX_CHUNK, math.ceil(len(self._queue) / (4 * num_workers)))
        return [self._queue.popleft() for _ in range(count)]

    def put_back(self, calls: Iterable[Rows]) -> None:
        """To the head of the queue, in their order and without what does not matter any more."""
        self._queue.extendleft(reversed(self._wanted(calls)))

    def answer(self, rows: Rows, answer: Answer) -> None:
        """Take in what a call gave."""
        outcomes = [Outcome(**reply._asdict(), seconds=answer.seconds) for reply in answer.replies]
        if len(outcomes) == len(rows):
            for row, outcome in zip(rows, outcomes, strict=True):
                self.settle(row, outcome)
        else:
            self.fail(rows, outcomes[0])

    def fail(self, rows: Rows, outcome: Outcome) -> None:
        """A call failed: that is its sample's outcome, or of several samples, a reason to try each half alone."""
        if len(rows) == 1:
            self.settle(rows[0], outcome)
            return
        logger.warning("a call with %d samples failed and is tried again in halves: %s", len(rows), outcome.message)
        middle = len(rows) // 2
        self.put_back([rows[:middle], rows[middle:]])

    def settle(self, row: int, outcome: Outcome) -> None:
        self.outcomes[row] = outcome
        if self._stop_at_failure and outcome.kind != "ok" and row < self._end:
            # Rows before this one are with a worker or in the queue; their outcomes decide which failure is the first.
            self._end = row
            self._queue = deque(self._wanted(self._queue))
            self._num_open = self.outcomes[:row].count(None)
        elif row < self._end:
            self._num_open -= 1

    def _wanted(self, calls: Iterable[Rows]) -> list[Rows]:
        kept = (tuple(row for row in rows if row < self._end) for rows in calls)
        return [rows for rows in kept if rows]


class _Worker:
    """One process and what it is busy with."""

    def __init__(self, spec: Spec):
        self._timeout = spec.timeout
        self._frames = FrameReader()
        self.calls: deque[Rows] = deque()
        """Sent and not yet answered; the first one is being computed."""
        self.ready = self.batched = False
        self.since = time.monotonic()
        """When it began what it is doing."""
        self.deadline = self.since + LOAD_SECONDS
        home = str(Path(camshaft.__file__).resolve().parent.parent)
        paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), home]))
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "camshaft.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": paths},
            start_new_session=True,  # so that it can be killed with whatever it has started
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.outbox = self._stdout.fileno()
        self._send(spec)

    def assign(self, job: Job, calls: list[Rows]) -> None:
        self._send([[job.samples[row].packed() for row in rows] for rows in calls])
        self.calls.extend(calls)
        self._next_call()

    def receive(self, job: Job) -> bool:
        """Take in what has arrived; False if the process has closed its end."""
        data = os.read(self.outbox, 1 << 20)
        for message in self._frames.feed(data):
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
        data = memoryview(pack(message))
        # A process that died while it was idle: the end of its output tells, at the next wait.
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(self._stdin.fileno(), data) :]

    @property
    def is_dead(self) -> bool:
        return self._process.poll() is not None

    def let_go(self) -> None:
        """Tell it that nothing more will come; it exits by itself if it is idle."""
        self._stdin.close()

    def kill(self, patience: float = 0.0) -> None:
        """End the process and all that it started, after `patience` seconds in which it may end by itself."""
        if patience:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._stdin.close()
        self._stdout.close()

    def fate(self) -> str:
        """How the process ended, for messages."""
        code = self._process.returncode
        if code is not None and code < 0:
            return f"was ended by signal {-code} ({signal.strsignal(-code)})"
        return f"ended its process (exit code {code})"


def _close_all(workers: list[_Worker], owner: int) -> None:
    if os.getpid() != owner:
        return
    for worker in workers:
        worker.let_go()
    for worker in workers:
        worker.kill(patience=_EXIT_SECONDS)
    workers.clear()
