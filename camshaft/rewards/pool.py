"""Pool of worker processes for reward functions: starts them on demand and replaces them after a timeout or crash.

    pool = WorkerPool(spec, num_workers=8, ...)
    pool.check()                         # starts one worker, which loads the function
    job = Job(len(samples), pool.functions)
    job.put(0, samples)                  # another thread may add samples while the job runs
    pool.run(job)                        # fills job.outcomes, one per function and sample
    pool.close()

A single thread sends each worker several calls at a time. It waits on the pipes of all workers and on a pipe that
becomes readable when samples are added. Workers answer each call separately, so the time limit applies to each call,
and the pool detects which call hangs. A call contains one sample, or all samples for a batched function. If the call of
a batched function fails, each half of its samples is retried until the failing samples are isolated.

Calls of coroutine functions are concurrent: a worker runs many at a time, and cancels a call at the time limit. If its
process crashes or stops answering, any of its calls may be the cause. The pool then retries each half of them
separately until the failing call is isolated. Only `manager.py` uses this module.
"""

import contextlib
import logging
import math
import os
import pickle
import queue
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Pipe
from typing import Literal, NamedTuple

from camshaft.errors import RewardError, ScoringAbandoned
from camshaft.rewards.messages import FunctionInfo, Kind, LoadResult, Outcome, Sample, Samples, Spec
from camshaft.rewards.output import Output, OutputStream
from camshaft.stop import Stop
from camshaft.subprocesses import NO_LIMIT, POLL_SECONDS, Limit, Wait, describe_process
from camshaft.workers.messages import Ready, Reply
from camshaft.workers.worker import Answer, Worker, close_all, count_processes, wait_for

TIMEOUTS_TO_REJECT = 8
"""Number of timeouts without any result after which the function is rejected."""

_PROGRAM = "camshaft.rewards.worker"
_MAX_CHUNK = 64

logger = logging.getLogger(__name__)


class Call(NamedTuple):
    """A call of one function with one sample, or with several samples if the function is batched."""

    function: int
    """Index of the function in `Spec.functions`."""
    rows: tuple[int, ...]


class _Worker(Worker[Call]):
    is_isolated = False
    """True while calls run of which one has made an earlier worker fail."""


class WorkerPool:
    """Pool of up to `num_workers` processes, each of which loads the functions of `spec`."""

    def __init__(
        self,
        spec: Spec,
        num_workers: int,
        max_concurrency: int,
        load_timeout: float,
        output: Output,
        stop: Stop,
        stop_timeout: float,
    ):
        """Create a pool without processes. The arguments are those of `RewardManager`."""
        self.spec = spec
        self.num_workers, self.max_concurrency = num_workers, max_concurrency
        self._load_limit = Limit(load_timeout, f"custom_reward_function.load_timeout={load_timeout:g}")
        self._output = output
        self._stop_request, self._stop_timeout = stop, stop_timeout
        self.functions: tuple[FunctionInfo, ...] = ()
        """Properties of the functions. `check` sets this attribute."""
        self._workers: list[_Worker] = []
        self._num_timeouts: list[int | None] = [0] * len(spec.functions)
        """Number of timeouts of each function, or None after its first result."""
        # finalize also runs at interpreter exit. A forked child inherits the workers but must not close them.
        self.close = weakref.finalize(self, close_all, self._workers, os.getpid())
        """Stop all workers permanently. This also happens when the pool is deleted or the interpreter exits."""

    def check(self) -> None:
        """Start one worker. Raise RewardError if it cannot load the function."""
        with self._all_stopped_on_error():
            worker = self._start_worker()
            job, wait = Job(0, ()), Wait("loading", RewardError, NO_LIMIT)  # `_wait` enforces the limit
            while not worker.is_ready:
                self._wait(job, time.monotonic() + POLL_SECONDS)
                wait.check(partial(self._describe_loading, worker), worker.stacks)

    def run(self, job: "Job") -> None:
        """Run the calls of a job until all samples have an outcome, including samples that are added during the run."""
        if not self.close.alive:
            raise RewardError("the reward workers are closed; create a new RewardManager")
        self._stop([worker for worker in self._workers if worker.is_dead])
        wait = Wait("scoring", RewardError, NO_LIMIT)  # the time limit of each call bounds the job
        busy_since: float | None = None
        with self._all_stopped_on_error():
            while job.num_open:
                is_busy = job.num_queued > 0 or any(worker.calls for worker in self._workers)
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
                    if worker.is_ready:
                        self._assign(worker, job)
                self._wait(job, time.monotonic() + POLL_SECONDS)
        wait.finish(busy_since or time.monotonic())
        self._stop([worker for worker in self._workers if worker.calls])

    def count_processes(self) -> int:
        """Return the number of running processes that the functions have started."""
        return count_processes(self._workers)

    def _start_worker(self) -> _Worker:
        worker = _Worker(_PROGRAM, self.spec, self._load_limit.seconds, OutputStream(self._output).write)
        self._workers.append(worker)
        return worker

    def _assign(self, worker: _Worker, job: "Job") -> None:
        """Send queued calls to a worker that is idle or can run more concurrent calls.

        If both kinds of calls are queued, some of the workers run concurrent calls and the others run the rest.
        """
        busy = [other for other in self._workers if other.calls]
        num_free = self.max_concurrency - sum(len(other.calls) for other in busy if other.is_concurrent)
        share = min(num_free, -(-self.max_concurrency // self.num_workers) - len(worker.calls))
        if worker.calls:
            if worker.is_concurrent and not worker.is_isolated and share > 0:
                self._send(worker, job, job.pop_concurrent_calls(share), concurrent=True)
            return
        num_concurrent = sum(other.is_concurrent for other in busy)
        only_blocking = not (job.concurrent or job.suspects)
        if job.blocking and (only_blocking or num_concurrent > len(busy) - num_concurrent):
            self._send(worker, job, job.pop_calls(self.num_workers))
        elif suspects := job.pop_suspects(num_free):
            self._send(worker, job, suspects, concurrent=True, isolated=True)
        elif share > 0:
            self._send(worker, job, job.pop_concurrent_calls(share), concurrent=True)

    def _send(
        self, worker: _Worker, job: "Job", calls: Iterable[Call], concurrent: bool = False, isolated: bool = False
    ) -> None:
        """Send calls to a worker. It does not receive further calls while `isolated` ones run."""
        worker.is_isolated = isolated
        worker.submit(((call, job.payload(call)) for call in calls), self.spec.timeout, concurrent)

    def _name(self) -> str:
        names = [f"{function.path or ''} '{function.name}'".strip() for function in self.spec.functions]
        return f"the reward function{'s' * (len(names) > 1)} {', '.join(names)}"

    def _describe_loading(self, worker: _Worker) -> str:
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
        ready, events = wait_for(self._workers, until, job.wakeup_receiver)
        if ready:
            job.receive()
            self._stop([worker for worker in self._workers if worker.is_dead and worker.is_ready and not worker.calls])
        for worker, event in events:
            if isinstance(event, Ready):
                self._process_loading(event.value)
            elif isinstance(event, Answer):
                self._process_reply(event.key, event.reply, job)
            else:
                self._handle_failure(worker, job, event.kind)

    def _process_loading(self, result: LoadResult) -> None:
        if result.error is not None:
            raise RewardError(result.error)
        self.functions = result.functions

    def _process_reply(self, call: Call, reply: Reply, job: "Job") -> None:
        timeout = Outcome("timeout", message=f"no result within {self.spec.timeout:g} s; the call was cancelled")
        outcomes: list[Outcome] = [timeout] if reply.cancelled else reply.value
        if any(outcome.kind != "timeout" for outcome in outcomes):
            self._num_timeouts[call.function] = None
        else:
            self._count_timeout(call.function)
        job.record_result(call, [outcome._replace(seconds=reply.seconds) for outcome in outcomes])

    def _count_timeout(self, function: int) -> None:
        """Raise RewardError if only timeouts and no result of a function have been counted."""
        count = self._num_timeouts[function]
        if count is None:
            return
        self._num_timeouts[function] = count = count + 1
        num_parallel = self.max_concurrency if self.functions[function].concurrent else self.num_workers
        if count >= max(TIMEOUTS_TO_REJECT, num_parallel):
            raise RewardError(
                f"the first {count} calls of the reward function '{self.spec.functions[function].name}' returned "
                f"nothing within {self.spec.timeout:g} s each; correct the function, or raise "
                "custom_reward_function.timeout"
            )

    def _handle_failure(self, worker: _Worker, job: "Job", kind: Literal["crash", "timeout"]) -> None:
        """Stop a worker that crashed or exceeded its deadline, fail its current calls and requeue its other calls."""
        self._stop([worker])
        if not worker.is_ready:
            late = f"did not load it within {self._load_limit.seconds:g} s; increase {self._load_limit.setting}"
            reason = worker.describe_exit() if kind == "crash" else late
            raise RewardError(f"the process that loads {self._name()} {reason}")
        timeout = f"no result within {self.spec.timeout:g} s; the process was killed"
        message = timeout if kind == "timeout" else f"the process {worker.describe_exit()}"
        running, waiting = worker.split_calls()
        if kind == "timeout" and len(running) == 1:
            self._count_timeout(running[0].function)
        job.requeue(waiting)
        job.fail(running, Outcome(kind, message=message, seconds=time.monotonic() - worker.since))

    def _stop(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            worker.kill()
            self._workers.remove(worker)


class Job:
    """Samples, queued calls and outcomes of one `WorkerPool.run`.

    Any thread may call `put` and `cancel`. Only the thread that runs the job may call the other methods.
    """

    def __init__(self, num_rows: int, functions: Sequence[FunctionInfo], stop_at_failure: bool = False):
        """Create a job. With `stop_at_failure`, outcomes of the first failed sample and later ones may be None."""
        self.samples: dict[int, Sample] = {}
        self.outcomes: list[list[Outcome | None]] = [[None] * num_rows for _ in functions]
        """Outcomes of each function, one per row."""
        self._functions = functions
        self._put: queue.SimpleQueue[tuple[int, Sequence[Sample]] | None] = queue.SimpleQueue()
        self.wakeup_receiver, self._wakeup_sender = Pipe(duplex=False)
        """Pipe that becomes readable when samples are added or the job is cancelled."""
        self.blocking: deque[Call] = deque()
        """Queued calls of functions that are not coroutine functions."""
        self.concurrent: deque[Call] = deque()
        self.suspects: deque[tuple[Call, ...]] = deque()
        """Concurrent calls of workers that crashed or stopped answering. Each group needs a worker of its own."""
        self._stop_at_failure = stop_at_failure
        self._end = num_rows
        """Index of the first row that is ignored; all later rows are ignored as well."""
        self.num_open = num_rows * len(functions)
        """Number of outcomes before row `_end` that are missing."""

    def record(self, samples: Sequence[Sample], rows: Sequence[Sequence[Outcome]]) -> None:
        """Record for each row the outcomes of the functions that the processes of environments have called."""
        self.samples.update(enumerate(samples))
        called = [number for number, info in enumerate(self._functions) if info.takes_environments]
        for row, outcomes in enumerate(rows):
            for function, outcome in zip(called, outcomes, strict=True):
                self.record_outcome(function, row, outcome)

    def put(self, first: int, samples: Sequence[Sample]) -> None:
        """Add the samples of consecutive rows from `first` on. Batched functions are called when all rows are added."""
        self._notify((first, samples))

    def cancel(self) -> None:
        """Cancel the job; the thread that runs it raises RewardError."""
        self._notify(None)

    def _notify(self, item: tuple[int, Sequence[Sample]] | None) -> None:
        self._put.put(item)
        self._wakeup_sender.send_bytes(b"1")

    def receive(self) -> None:
        """Queue the calls for the samples of one `put`. Raise RewardError if the job was cancelled."""
        self.wakeup_receiver.recv_bytes()
        item = self._put.get()
        if item is None:
            raise RewardError("the reward calls were cancelled")
        first_row, samples = item
        self.samples.update(enumerate(samples, first_row))
        for function, info in enumerate(self._functions):
            if info.takes_environments:
                continue
            if not info.batched:
                calls = [Call(function, (row,)) for row in range(first_row, first_row + len(samples))]
                (self.concurrent if info.concurrent else self.blocking).extend(self._drop_ignored_rows(calls))
            elif len(samples) and len(self.samples) == len(self.outcomes[function]):
                self.blocking.extend(self._drop_ignored_rows([Call(function, tuple(range(len(self.samples))))]))

    @property
    def num_queued(self) -> int:
        return len(self.blocking) + len(self.concurrent) + len(self.suspects)

    def progress(self) -> str:
        """Describe how many samples have an outcome, for example "12 of 32 responses scored, 3 timed out"."""
        kinds = [_row_kind(outcomes) for outcomes in zip(*self.outcomes, strict=True)]
        failures = {"timed out": kinds.count("timeout"), "failed": kinds.count("error")}
        text = f"{kinds.count('ok')} of {len(kinds)} responses scored"
        return text + "".join(f", {count} {name}" for name, count in failures.items() if count)

    def pop_calls(self, num_workers: int) -> list[Call]:
        """Remove and return the next calls for a worker.

        The shorter the queue, the fewer calls are returned, so that all workers finish at about the same time.
        """
        count = min(_MAX_CHUNK, math.ceil(len(self.blocking) / (4 * num_workers)))
        return [self.blocking.popleft() for _ in range(count)]

    def pop_concurrent_calls(self, count: int) -> list[Call]:
        return [self.concurrent.popleft() for _ in range(min(count, len(self.concurrent)))]

    def pop_suspects(self, max_count: int) -> list[Call]:
        """Remove and return the next group of suspects, or no calls if it has more than `max_count`."""
        if not self.suspects or len(self.suspects[0]) > max_count:
            return []
        return list(self.suspects.popleft())

    def requeue(self, calls: Iterable[Call]) -> None:
        """Insert calls at the head of the queue in the given order, without ignored rows."""
        self.blocking.extendleft(reversed(self._drop_ignored_rows(calls)))

    def payload(self, call: Call) -> Samples:
        return Samples(call.function, [pickle.dumps(self.samples[row], protocol=5) for row in call.rows])

    def record_result(self, call: Call, outcomes: Sequence[Outcome]) -> None:
        if len(outcomes) == len(call.rows):
            for row, outcome in zip(call.rows, outcomes, strict=True):
                self.record_outcome(call.function, row, outcome)
        else:
            self.fail([call], outcomes[0])

    def fail(self, calls: Sequence[Call], outcome: Outcome) -> None:
        """Record a failure of one of the calls: store the outcome of a single sample, or requeue each half."""
        function, rows = calls[0]
        if len(calls) == len(rows) == 1:
            self.record_outcome(function, rows[0], outcome)
            return
        if len(calls) > 1:
            kind, middle = f"a process with {len(calls)} concurrent reward calls", len(calls) // 2
            groups = [tuple(self._drop_ignored_rows(half)) for half in (calls[:middle], calls[middle:])]
            self.suspects.extend(group for group in groups if group)
        else:
            kind, middle = f"a batched reward call with {len(rows)} samples", len(rows) // 2
            self.requeue([Call(function, rows[:middle]), Call(function, rows[middle:])])
        logger.warning("%s failed; retrying each half: %s", kind, outcome.message)

    def record_outcome(self, function: int, row: int, outcome: Outcome) -> None:
        self.outcomes[function][row] = outcome
        if self._stop_at_failure and outcome.failed and row < self._end:
            # The first failure is reported. Calls for earlier rows continue, because these rows may fail too.
            self._end = row
            self.blocking = deque(self._drop_ignored_rows(self.blocking))
            self.concurrent = deque(self._drop_ignored_rows(self.concurrent))
            groups = [tuple(self._drop_ignored_rows(group)) for group in self.suspects]
            self.suspects = deque(group for group in groups if group)
            self.num_open = sum(outcomes[:row].count(None) for outcomes in self.outcomes)
        elif row < self._end:
            self.num_open -= 1

    def _drop_ignored_rows(self, calls: Iterable[Call]) -> list[Call]:
        active_calls = (Call(call.function, tuple(row for row in call.rows if row < self._end)) for call in calls)
        return [call for call in active_calls if call.rows]


def _row_kind(outcomes: Iterable[Outcome | None]) -> Kind | None:
    """Return "timeout", "error" (another failure), "ok" if all functions are done, or None for a row."""
    kinds = {outcome.kind if outcome is not None else None for outcome in outcomes}
    if "timeout" in kinds:
        return "timeout"
    if kinds - {"ok", "unscored", None}:
        return "error"
    return None if None in kinds else "ok"
