"""Pool of worker processes for reward functions: starts them on demand and replaces them after a timeout or crash.

    pool = WorkerPool(spec, num_workers=8, ...)
    pool.check()                         # starts one worker, which loads the function
    job = Job(len(samples))
    job.put(0, samples)                  # another thread may add samples while the job runs
    pool.run(job)                        # fills job.outcomes, one per sample
    pool.close()

A single thread sends each worker several calls at a time. It waits on the pipes of all workers and on a pipe that
becomes readable when samples are added. Workers answer each call separately, so the time limit applies to each call,
and the pool detects which call hangs. A call contains one sample, or all samples for a batched function. If the call of
a batched function fails, each half of its samples is retried until the failing samples are isolated. Only `manager.py`
uses this module.
"""

import contextlib
import logging
import math
import os
import pickle
import queue
import signal
import subprocess
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Pipe, wait
from typing import Any, Literal

from camshaft.errors import RewardError, ScoringAbandoned
from camshaft.rewards.messages import CallResult, LoadResult, Sample, Spec
from camshaft.rewards.output import Output
from camshaft.stacks import innermost_frames, read_stacks
from camshaft.stop import Stop
from camshaft.subprocesses import (
    NO_LIMIT,
    POLL_SECONDS,
    Limit,
    MessageReader,
    Wait,
    describe_process,
    kill_group,
    pack,
    send,
    start_python,
)

Kind = Literal["ok", "error", "invalid", "timeout", "crash"]
Rows = tuple[int, ...]
"""Row indices of the samples of one call."""

TIMEOUTS_TO_REJECT = 8
"""Number of timeouts without any result after which the function is rejected."""

_MAX_CHUNK = 64
_EXIT_SECONDS = 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """Result of one sample. `score`, `parts` and `answer` are valid only if `kind` is "ok"."""

    kind: Kind
    score: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    message: str = ""
    trace: str = ""
    answer: str | None = None
    seconds: float = 0.0
    """Duration in seconds of the call that produced this outcome."""


class WorkerPool:
    """Pool of up to `num_workers` processes, each of which loads the function of `spec`."""

    def __init__(
        self, spec: Spec, num_workers: int, load_timeout: float, output: Output, stop: Stop, stop_timeout: float
    ):
        """Create a pool without processes. The arguments are those of `RewardManager`."""
        self.spec = spec
        self.num_workers = num_workers
        self._load_limit = Limit(load_timeout, f"custom_reward_function.load_timeout={load_timeout:g}")
        self._output = output
        self._stop_request, self._stop_timeout = stop, stop_timeout
        self.function = LoadResult(None)
        """Properties of the function. `check` sets this attribute."""
        self._workers: list[_Worker] = []
        self._has_result, self._num_timeouts = False, 0
        # finalize also runs at interpreter exit. A forked child inherits the workers but must not close them.
        self.close = weakref.finalize(self, _close_all, self._workers, os.getpid())
        """Stop all workers permanently. This also happens when the pool is deleted or the interpreter exits."""

    def check(self) -> None:
        """Start one worker. Raise RewardError if it cannot load the function."""
        with self._all_stopped_on_error():
            worker = self._start_worker()
            job, wait = Job(0), Wait("loading", RewardError, NO_LIMIT)  # `_wait` enforces the limit
            while not worker.is_ready:
                self._wait(job, time.monotonic() + POLL_SECONDS)
                wait.check(partial(self._describe_loading, worker), worker.stacks)
            assert worker.function is not None
            self.function = worker.function

    def run(self, job: "Job") -> None:
        """Run the calls of a job until all samples have an outcome, including samples that are added during the run."""
        if not self.close.alive:
            raise RewardError("the reward workers are closed; create a new RewardManager")
        self._stop([worker for worker in self._workers if worker.is_dead])
        wait = Wait("scoring", RewardError, NO_LIMIT)  # the time limit of each call bounds the job
        busy_since: float | None = None
        with self._all_stopped_on_error():
            while not job.done:
                is_busy = any(worker.calls for worker in self._workers)
                busy_since = (busy_since or time.monotonic()) if is_busy else None
                if busy_since is not None:
                    wait.check(partial(self._describe, job), self._stacks, busy_since)
                stop = self._stop_request
                if stop.requested and time.monotonic() > stop.request_time + self._stop_timeout:
                    raise ScoringAbandoned(
                        f"{stop.requested.name}: {job.progress()} within trainer.stop_timeout={self._stop_timeout:g} s"
                    )
                num_idle = sum(not worker.calls for worker in self._workers)
                for _ in range(min(job.num_queued - num_idle, self.num_workers - len(self._workers))):
                    self._start_worker()
                for worker in self._workers:
                    if worker.is_ready and not worker.calls and job.num_queued:
                        worker.assign(job, job.pop_calls(self.num_workers))
                self._wait(job, time.monotonic() + POLL_SECONDS)
        wait.finish(busy_since or time.monotonic())
        self._stop([worker for worker in self._workers if worker.calls])

    def _start_worker(self) -> "_Worker":
        worker = _Worker(self.spec, self._load_limit.seconds, self._output)
        self._workers.append(worker)
        return worker

    def _name(self) -> str:
        return f"the reward function {self.spec.path or ''} '{self.spec.name}'".replace("  ", " ")

    def _describe_loading(self, worker: "_Worker") -> str:
        return f"{describe_process(worker.pid)}, which imports {self._name()} ({self._load_limit.setting}),"

    def _describe(self, job: "Job") -> str:
        """Describe the calls that run, and the progress of the job."""
        processes = "; ".join(describe_process(worker.pid) for worker in self._workers if worker.calls)
        return f"{self._name()} ({job.progress()}; {processes})"

    def _stacks(self, short: bool) -> str:
        """Return the stacks of the process with the oldest call, and only the innermost frames if `short`."""
        busy = [worker for worker in self._workers if worker.calls]
        return min(busy, key=lambda worker: worker.since).stacks(short) if busy else ""

    @contextlib.contextmanager
    def _all_stopped_on_error(self) -> Iterator[None]:
        """Stop all workers if an exception occurs, because they may still run calls whose results will not be read."""
        try:
            yield
        except BaseException:
            self._stop(list(self._workers))
            raise

    def _wait(self, job: "Job", until: float) -> None:
        """Wait for messages, the next deadline or the time `until`, and process messages and exceeded deadlines."""
        busy = {worker.outbox: worker for worker in self._workers if worker.calls or not worker.is_ready}
        printing = {worker.output: worker for worker in self._workers if worker.output is not None}
        limit = min([until, *(worker.deadline for worker in busy.values())])
        for source in wait([job.wakeup_receiver, *busy, *printing], timeout=max(0.0, limit - time.monotonic())):
            if source in printing:
                printing[source].forward_output()  # pyright: ignore[reportArgumentType]
                continue
            if source is job.wakeup_receiver:
                job.receive(self.function.batched)
                self._stop([w for w in self._workers if w.is_dead and w.is_ready and not w.calls])
                continue
            worker = busy.pop(source)  # pyright: ignore[reportArgumentType]
            is_open = worker.receive(job)
            self._has_result |= worker.has_result
            if not is_open:
                self._handle_failure(worker, job, "crash")
        for worker in busy.values():
            if time.monotonic() >= worker.deadline:
                self._handle_failure(worker, job, "timeout")

    def _handle_failure(self, worker: "_Worker", job: "Job", kind: Literal["crash", "timeout"]) -> None:
        """Stop a worker that crashed or exceeded its deadline, fail its current call and requeue its other calls."""
        self._stop([worker])
        if not worker.is_ready:
            late = f"did not load it within {self._load_limit.seconds:g} s; increase {self._load_limit.setting}"
            reason = worker.describe_exit() if kind == "crash" else late
            raise RewardError(f"the process that loads {self._name()} {reason}")
        timeout = f"no result within {self.spec.timeout:g} s; the process was killed"
        message = timeout if kind == "timeout" else f"the process {worker.describe_exit()}"
        self._num_timeouts += kind == "timeout"
        if not self._has_result and self._num_timeouts >= max(TIMEOUTS_TO_REJECT, self.num_workers):
            raise RewardError(
                f"the first {self._num_timeouts} calls of the reward function '{self.spec.name}' returned nothing "
                f"within {self.spec.timeout:g} s each; correct the function, or raise custom_reward_function.timeout"
            )
        rows = worker.calls.popleft()
        job.requeue(worker.calls)
        job.fail(rows, Outcome(kind, message=message, seconds=time.monotonic() - worker.since))

    def _stop(self, workers: "Sequence[_Worker]") -> None:
        for worker in workers:
            worker.kill()
            self._workers.remove(worker)


class Job:
    """Samples, queued calls and outcomes of one `WorkerPool.run`.

    Any thread may call `put` and `cancel`. Only the thread that runs the job may call the other methods.
    """

    def __init__(self, num_rows: int, stop_at_failure: bool = False):
        """Create a job. With `stop_at_failure`, outcomes after the first failed sample may be None."""
        self.samples: dict[int, Sample] = {}
        self.outcomes: list[Outcome | None] = [None] * num_rows
        self._put: queue.SimpleQueue[tuple[int, Sequence[Sample]] | None] = queue.SimpleQueue()
        self.wakeup_receiver, self._wakeup_sender = Pipe(duplex=False)
        """Pipe that becomes readable when samples are added or the job is cancelled."""
        self._queue: deque[Rows] = deque()
        self._stop_at_failure = stop_at_failure
        self._end = num_rows
        """Index of the first row that is ignored; all later rows are ignored as well."""
        self._num_open = num_rows
        """Number of rows before `_end` that have no outcome yet."""

    def put(self, first: int, samples: Sequence[Sample]) -> None:
        """Add the samples of consecutive rows from `first` on. Batched functions require all rows in one `put`."""
        self._notify((first, samples))

    def cancel(self) -> None:
        """Cancel the job; the thread that runs it raises RewardError."""
        self._notify(None)

    def _notify(self, item: tuple[int, Sequence[Sample]] | None) -> None:
        self._put.put(item)
        self._wakeup_sender.send_bytes(b"1")

    def receive(self, batched: bool) -> None:
        """Queue the calls for the samples of one `put`. Raise RewardError if the job was cancelled."""
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

    def progress(self) -> str:
        """Describe how many samples have an outcome, for example "12 of 32 responses scored, 3 timed out"."""
        kinds = [outcome.kind for outcome in self.outcomes if outcome is not None]
        failures = {
            "timed out": kinds.count("timeout"),
            "failed": len(kinds) - kinds.count("ok") - kinds.count("timeout"),
        }
        text = f"{kinds.count('ok')} of {len(self.outcomes)} responses scored"
        return text + "".join(f", {count} {name}" for name, count in failures.items() if count)

    def pop_calls(self, num_workers: int) -> list[Rows]:
        """Remove and return the next calls for a worker.

        The shorter the queue, the fewer calls are returned, so that all workers finish at about the same time.
        """
        count = min(_MAX_CHUNK, math.ceil(len(self._queue) / (4 * num_workers)))
        return [self._queue.popleft() for _ in range(count)]

    def requeue(self, calls: Iterable[Rows]) -> None:
        """Insert calls at the head of the queue in the given order, without ignored rows."""
        self._queue.extendleft(reversed(self._drop_ignored_rows(calls)))

    def record_result(self, rows: Rows, result: CallResult) -> None:
        """Record the result of a call."""
        outcomes = [Outcome(**reply._asdict(), seconds=result.seconds) for reply in result.replies]
        if len(outcomes) == len(rows):
            for row, outcome in zip(rows, outcomes, strict=True):
                self.record_outcome(row, outcome)
        else:
            self.fail(rows, outcomes[0])

    def fail(self, rows: Rows, outcome: Outcome) -> None:
        """Record a failed call: store the outcome of a single sample, or requeue each half of a batch."""
        if len(rows) == 1:
            self.record_outcome(rows[0], outcome)
            return
        logger.warning(
            "a batched reward call with %d samples failed; retrying each half: %s", len(rows), outcome.message
        )
        middle = len(rows) // 2
        self.requeue([rows[:middle], rows[middle:]])

    def record_outcome(self, row: int, outcome: Outcome) -> None:
        self.outcomes[row] = outcome
        if self._stop_at_failure and outcome.kind != "ok" and row < self._end:
            # The first failure is reported. Calls for earlier rows continue, because these rows may fail too.
            self._end = row
            self._queue = deque(self._drop_ignored_rows(self._queue))
            self._num_open = self.outcomes[:row].count(None)
        elif row < self._end:
            self._num_open -= 1

    def _drop_ignored_rows(self, calls: Iterable[Rows]) -> list[Rows]:
        active_calls = (tuple(row for row in rows if row < self._end) for rows in calls)
        return [rows for rows in active_calls if rows]


class _Worker:
    """A worker process and its pending calls."""

    def __init__(self, spec: Spec, load_timeout: float, output: Output):
        self._timeout, self._output = spec.timeout, output
        self._reader = MessageReader()
        self.calls: deque[Rows] = deque()
        """Calls without a result, of which the first one is running."""
        self.function: LoadResult | None = None
        """Properties of the function, once it is loaded."""
        self.has_result = False
        self.since = time.monotonic()
        """Start time of the current call, or of the process while it loads the function."""
        self.deadline = self.since + load_timeout
        self._stack_file = tempfile.TemporaryFile()  # noqa: SIM115 - open while the process runs
        stack_file, pipe = self._stack_file.fileno(), subprocess.PIPE
        command = ["-u", "-m", "camshaft.rewards.worker", str(stack_file)]
        self._process = start_python(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, pass_fds=[stack_file])
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin, self._stdout, self._stderr = self._process.stdin, self._process.stdout, self._process.stderr
        os.set_blocking(self._stderr.fileno(), False)
        self.pid = self._process.pid
        self.outbox = self._stdout.fileno()
        self.output: int | None = self._stderr.fileno()
        """Pipe with the output of user code, or None if the process has closed it."""
        self._send(spec)

    def assign(self, job: Job, calls: list[Rows]) -> None:
        self._send([[pickle.dumps(job.samples[row], protocol=5) for row in rows] for rows in calls])
        self.calls.extend(calls)
        self._next_call()

    def receive(self, job: Job) -> bool:
        """Read and process messages. Return False if the process has closed its pipe."""
        data = os.read(self.outbox, 1 << 20)
        for message in self._reader.feed(data):
            self._process_message(message, job)
        return bool(data)

    def forward_output(self) -> None:
        """Read output of user code and write it to its destination."""
        if self.output is not None:
            with contextlib.suppress(BlockingIOError):
                data = os.read(self.output, 1 << 16)
                if data:
                    self._output.write(data)
                else:
                    self.output = None

    def stacks(self, short: bool) -> str:
        """Return the stacks of the process, or only the innermost frames of user code."""
        stacks = read_stacks(self.pid, self._stack_file.fileno())
        return innermost_frames(stacks) if short else stacks

    def _process_message(self, message: LoadResult | CallResult, job: Job) -> None:
        if isinstance(message, LoadResult):
            if message.error is not None:
                raise RewardError(message.error)
            self.function = message
            return
        self.has_result = True
        job.record_result(self.calls.popleft(), message)
        self._next_call()

    def _next_call(self) -> None:
        self.since = time.monotonic()
        self.deadline = self.since + self._timeout

    def _send(self, message: Any) -> None:
        # A broken pipe means that the process died while idle. The next `_wait` detects the end of its output.
        with contextlib.suppress(BrokenPipeError):
            send(self._stdin.fileno(), pack(message))

    @property
    def is_ready(self) -> bool:
        return self.function is not None

    @property
    def is_dead(self) -> bool:
        return self._process.poll() is not None

    def close_input(self) -> None:
        """Close the standard input of the process, which makes an idle process exit."""
        self._stdin.close()

    def kill(self, timeout: float = 0.0) -> None:
        """Wait up to `timeout` seconds for the process to exit, then kill it and its children."""
        if timeout:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        kill_group(self._process.pid)
        self._process.wait()
        self.forward_output()
        for file in (self._stdin, self._stdout, self._stderr, self._stack_file):
            file.close()
        self.output = None

    def describe_exit(self) -> str:
        """Describe how the process ended, for error messages."""
        code = self._process.returncode
        if code is not None and code < 0:
            return f"was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"exited with code {code}"


def _close_all(workers: list[_Worker], owner: int) -> None:
    if os.getpid() != owner:
        return
    for worker in workers:
        worker.close_input()
    for worker in workers:
        worker.kill(timeout=_EXIT_SECONDS)
    workers.clear()
