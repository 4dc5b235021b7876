"""Base class of pools whose ranks are processes, with requests, answers, time limits and errors.

    class LocalPool(ProcessPool):
        def create_processes(self): ...       # one WorkerProcess per rank
        def payload(self, frames): ...        # converts a request for sending, once for all ranks with the same request

Each rank answers its requests in order. All waits have a time limit. If a rank raises an exception, dies or does not
answer, the entire pool ends, because the other ranks are in an undefined state after a broken collective. The driver
then raises one `WorkerError` that contains the rank, the method and the stack. If the rank raised an exception,
`__cause__` is this exception. While the driver waits for one pool, it monitors all pools with pending calls.

A pool whose roles can be restored (`PoolSpec.max_restarts`) instead starts again if a process dies: it builds the roles
again, repeats the last call of each method that sets their state, and sends the unfinished requests again.
"""

import atexit
import contextlib
import logging
import os
import pickle
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

from camshaft.controller.executor import Failure
from camshaft.controller.group import LateAnswers, Listener, Options, Pool, RoleSpec
from camshaft.controller.resources import PoolSpec
from camshaft.controller.worker import Call, RankInfo, Worker
from camshaft.errors import GeneratorError, WorkerError
from camshaft.masking import remembered_secrets
from camshaft.seat import Seat
from camshaft.stacks import innermost_frames
from camshaft.subprocesses import POLL_SECONDS, Frames, Limit, Wait, describe_process, pack, resident_memory, unpack

GRACE_SECONDS = 0.3
"""Time to wait, after a rank has failed, for an earlier failure of another rank that may be the cause."""
START_SECONDS = 180.0
"""Minimum time limit for processes to start and import their modules."""
END_SECONDS = 5.0
"""Time limit for a process to exit before it is killed."""
MAX_STACKS = 4
"""Maximum number of ranks whose stacks are read for a report. An error contains the stacks of all ranks."""
COLLECTIVE_EXTRA_SECONDS = 60.0
"""Additional time limit of collectives, so that the driver reports a timeout before a collective does."""

Inbox = queue.SimpleQueue[tuple[int, Frames | Exception | None]]
Messages = Sequence[tuple[Any, ...] | None]
"""Message to each rank, or None for ranks that do not get the request."""

logger = logging.getLogger(__name__)


class WorkerProcess(ABC):
    """The driver's handle of one process of a pool. It puts pairs of rank and answer into the inbox of the pool.

    Instead of an answer, it puts the exception if the driver could not exchange messages with the process.
    """

    rank: int
    pid: int | None = None

    @abstractmethod
    def post(self, payload: Any) -> None:
        """Send a request without waiting. If no more answers can arrive, put (rank, None) into the inbox."""

    def local_pid(self) -> int | None:
        """Return the process id if the process runs on this machine, else None."""
        return self.pid

    @abstractmethod
    def exit_description(self) -> str | None:
        """Return a description of how the process ended, or None while it runs."""

    @abstractmethod
    def stacks(self) -> str:
        """Return the stacks of the process's threads, even after a crash, or "" if they cannot be read."""

    @abstractmethod
    def stop(self) -> None:
        """Tell the process to exit after it has answered all requests."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the process and its children."""

    @abstractmethod
    def join(self, seconds: float) -> None:
        """Wait at most `seconds` for the process to end."""


class Request(LateAnswers):
    """A request to some ranks and the answers received so far. Iterating over it waits for the answers."""

    def __init__(self, pool: "ProcessPool", role: str, method: str, limit: Limit, messages: Messages):
        self._pool, self.role, self.method, self.limit, self.messages = pool, role, method, limit, messages
        self.waiting = self.ranks()
        self.num_ranks = len(self.waiting)
        self.answers: dict[int, Any] = {}
        """Answers by rank, in the order of arrival."""
        self.wait = Wait(str(self), WorkerError, limit)
        self.listener: Listener | None = None

    def ranks(self) -> set[int]:
        return {rank for rank, message in enumerate(self.messages) if message is not None}

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self._pool.answers(self)

    def listen(self, listener: Listener) -> None:
        self._pool.add_listener(self, listener)

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"


class ProcessPool(Pool):
    """A pool whose ranks are processes in one process group."""

    def __init__(self, spec: PoolSpec, options: Options, other_ranks: int):
        """Create a pool without processes. `RankInfo` describes `other_ranks`."""
        super().__init__(spec)
        self.options, self._other_ranks = options, other_ranks
        self.inbox: Inbox = queue.SimpleQueue()
        self.processes: list[WorkerProcess] = []
        self._end_reason = ""
        self._resident = [0] * self.world_size
        self._lock = threading.RLock()
        self._requests: list[deque[Request]] = [deque() for _ in range(self.world_size)]
        self._unfinished: list[Request] = []
        """Requests that some rank has not answered, in the order of submission."""
        self._restored: dict[str, Request] = {}
        """Last call of each method that sets the state of a role."""
        self._death: WorkerError | None = None
        """Error about the last process that has died."""
        self._num_restarts = 0
        """Restarts since the last call that was answered and sets no state."""
        self._is_restarting = False
        self._waiting_since = [0.0] * self.world_size
        self._roles: dict[int, RoleSpec] = {}
        self._next_key = 0

    def start(self) -> None:
        """Start the processes without waiting until they have imported their modules."""
        _LIVE.add(self)
        try:
            self.create_processes()
        except BaseException:
            self.terminate("it could not be started")
            raise

    def rank_info(self, rank: int, device: str) -> RankInfo:
        """Return the placement of a rank, whose machine has `ranks_per_node` consecutive ranks of the pool."""
        return RankInfo(
            rank,
            self.world_size,
            device,
            self.options.longest_timeout() + COLLECTIVE_EXTRA_SECONDS,
            local_rank=rank % self.spec.ranks_per_node,
            local_world=self.spec.ranks_per_node,
            other_ranks=self._other_ranks,
            pool=self.spec.name,
            log_folder=self.options.log_folder,
            secrets=remembered_secrets(),
        )

    def join_ranks(self) -> None:
        """Wait until all processes have joined the process group."""
        try:
            for process, pid in zip(self.processes, self.request("__init__", ("pid",)), strict=True):
                process.pid = pid
            self.request("__init__", ("join", self.rendezvous()))
            self._resident = [resident_memory(process.local_pid()) for process in self.processes]
        except BaseException:
            self.terminate("it could not be started")
            raise

    # -- implemented by a backend -----------------------------------------------------------------

    @abstractmethod
    def create_processes(self) -> None:
        """Append one process per rank to `processes`."""

    @abstractmethod
    def rendezvous(self) -> str:
        """Return the init_method of torch.distributed for the ranks."""

    def payload(self, frames: Frames) -> Any:
        """Convert a request for `WorkerProcess.post`. This is called once for all ranks that get the same request."""
        return frames

    def portable_class(self, role_class: type[Worker]) -> Any:
        """Return an object that unpickles to the class in a worker process."""
        return role_class

    def missing_service(self, probe: bool = False) -> str | None:
        """Return a message if a machine or a process is dead on which the pool depends, else None.

        This is called while the driver waits. `probe` checks them now, because a rank has failed, and they may be the
        cause.
        """
        return None

    def release(self) -> None:
        """Release all resources except the processes, which have already ended."""

    # -- the interface of pools -------------------------------------------------------------------

    def build(self, role: RoleSpec) -> int:
        self._next_key += 1
        self._build(self._next_key, role)
        self._roles[self._next_key] = role
        return self._next_key

    def _build(self, key: int, role: RoleSpec) -> None:
        message = ("build", key, role.name, self.portable_class(role.role_class), role.args, role.kwargs)
        limit = role.limit("__init__", self.options)
        self._wait(self._send(role.name, "__init__", limit, [message] * self.world_size))

    def seats(self, key: int, method: str) -> list[Seat]:
        role = self._role(key, method)
        message = ("seat_for", key, method)
        limit = role.limit("seat_for", self.options)
        return self._wait(self._send(role.name, f"seat_for({method})", limit, [message] * self.world_size))

    def submit(self, key: int, method: str, calls: Sequence[Call | None], send_result: Sequence[bool]) -> Request:
        role = self._role(key, method)
        limit = role.limit(method, self.options)
        # Ranks with the same call share one message, so that it is pickled once.
        messages_by_call: dict[tuple[int, bool], tuple[Any, ...]] = {}
        messages: list[tuple[Any, ...] | None] = []
        for call, should_send in zip(calls, send_result, strict=True):
            if call is not None:
                messages_by_call.setdefault((id(call), should_send), ("call", key, method, *call, should_send, limit))
            messages.append(None if call is None else messages_by_call[id(call), should_send])
        return self._send(role.name, method, limit, messages)

    def drop(self, key: int) -> None:
        role = self._roles.pop(key, None)
        if role is not None and not self._end_reason:
            limit = role.limit("drop", self.options)
            self._wait(self._send(role.name, "drop", limit, [("drop", key)] * self.world_size))

    def shutdown(self) -> None:
        with self._lock:
            if not self._end_reason:
                deadline = time.monotonic() + END_SECONDS
                for process in self.processes:
                    process.stop()
                for process in self.processes:
                    process.join(max(0.0, deadline - time.monotonic()))
            self.terminate("it was shut down")

    def _role(self, key: int, method: str) -> RoleSpec:
        if key not in self._roles:
            raise WorkerError(f"{self.spec.name}.{method}: the role was shut down; spawn it again")
        return self._roles[key]

    # -- requests ---------------------------------------------------------------------------------

    def request(self, method: str, message: tuple[Any, ...], ranks: set[int] | None = None) -> list[Any]:
        """Send a request that does not belong to a role to all ranks, or to `ranks`, and wait for the answers."""
        messages = [message if ranks is None or rank in ranks else None for rank in range(self.world_size)]
        limit = self.options.limit(method)._replace(seconds=max(self.options.timeout, START_SECONDS))
        return self._wait(self._send(self.spec.name, method, limit, messages))

    def _send(self, role: str, method: str, limit: Limit, messages: Messages) -> Request:
        with self._lock:
            self._check_running(f"{role}.{method}")
            request = Request(self, role, method, limit, messages)
            self._post(request)
            return request

    def _post(self, request: Request) -> None:
        payloads = self._payloads(str(request), request.messages)
        self._unfinished.append(request)
        for process, message in zip(self.processes, request.messages, strict=True):
            if message is not None:
                if not self._requests[process.rank]:
                    self._waiting_since[process.rank] = time.monotonic()
                self._requests[process.rank].append(request)
                process.post(payloads[id(message)])

    def _payloads(self, request: str, messages: Messages) -> dict[int, Any]:
        payloads: dict[int, Any] = {}
        for message in messages:
            if message is None or id(message) in payloads:
                continue
            try:
                payloads[id(message)] = self.payload(pack(message))
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise WorkerError(
                    f"{request}: an argument cannot be sent to a worker process: {error}. Define functions and classes "
                    "in arguments at the top level of an importable module"
                ) from error
        return payloads

    def _wait(self, request: Request) -> list[Any]:
        """Wait for the answers and return one per rank, with None for ranks that did not get the request."""
        answers = dict(request)
        return [answers.get(rank) for rank in range(self.world_size)]

    def answers(self, request: Request) -> Iterator[tuple[int, Any]]:
        """Yield pairs of rank and answer in the order of arrival. An error ends the pool."""
        num_yielded = 0
        while num_yielded < request.num_ranks:
            with self._lock:
                if len(request.answers) == num_yielded:
                    self._check_running(str(request))
                    with self._end_on_error(request):
                        self._poll(POLL_SECONDS)
                new_answers = list(request.answers.items())[num_yielded:]
            num_yielded += len(new_answers)
            yield from new_answers
            for pool in list(_LIVE):
                if pool is not self:
                    pool._poll_if_unattended()

    def add_listener(self, request: Request, listener: Listener) -> None:
        """Call `listener` with the answers that are there, and with each other one in the thread that receives it."""
        with self._lock:
            for rank, value in request.answers.items():
                listener(rank, value)
            request.listener = listener

    def _check_running(self, request: str) -> None:
        if self._end_reason:
            raise WorkerError(f"{request}: its workers have ended ({self._end_reason}); spawn it again")

    @contextlib.contextmanager
    def _end_on_error(self, request: Request) -> Generator[None]:
        """End the pool after an error, and start it again if a process has died and this is allowed."""
        try:
            yield
        except BaseException as error:
            if error is self._death and not self._is_restarting and self._may_restart():
                self._restart(error)
                return
            self.terminate(f"{request.method} failed: {str(error).partition(chr(10))[0] or type(error).__name__}")
            if error is self._death and self._num_restarts and not self._may_restart():
                error.add_note(f"Number of restarts of the pool '{self.spec.name}' in a row: {self._num_restarts}.")
            raise

    def _poll_if_unattended(self) -> None:
        """Poll this pool while the driver waits for another pool, unless a thread is already waiting for this pool."""
        request = next((requests[0] for requests in self._requests if requests), None)
        if request is None or not self._lock.acquire(blocking=False):
            return
        try:
            if not self._end_reason:
                with self._end_on_error(request):
                    self._poll(0.0)
        finally:
            self._lock.release()

    def _poll(self, seconds: float) -> None:
        """Wait up to `seconds` for an answer, store all arrived answers, and check the processes and time limits."""
        answer = self._next_answer(seconds)
        while answer is not None:
            rank, request, (succeeded, value, busy_seconds) = answer
            self.busy_seconds[rank] += busy_seconds
            if not succeeded:
                self._raise_first(request, {rank: value})
            if rank not in request.answers:  # unless it was answered before a restart
                self._store(request, rank, value)
            answer = self._next_answer(0.0)
        self._check_alive()
        self._check_times()

    def _next_answer(self, seconds: float) -> tuple[int, Request, tuple[bool, Any, float]] | None:
        """Return (rank, request, (succeeded, value, time)) of the next answer; None on a timeout or lost connection."""
        try:
            rank, frames = self.inbox.get(timeout=seconds) if seconds else self.inbox.get_nowait()
        except queue.Empty:
            return None
        if frames is None:
            self.processes[rank].join(END_SECONDS)
            return None
        request = self._requests[rank].popleft()
        if isinstance(frames, Exception):
            raise WorkerError(
                f"{request}: the driver cannot exchange messages with rank {rank} of {self.world_size}: "
                f"{type(frames).__name__}: {frames}; check the memory and the open files of the driver"
            ) from frames
        request.waiting.discard(rank)
        if not request.waiting:
            request.wait.finish(self._waiting_since[rank])
        self._waiting_since[rank] = time.monotonic()
        return rank, request, unpack(frames)

    def _store(self, request: Request, rank: int, value: Any) -> None:
        """Store an answer. After the last one, forget the messages, unless the state of a role depends on them."""
        request.answers[rank] = value
        if request.listener is not None:
            request.listener(rank, value)
        if len(request.answers) < request.num_ranks:
            return
        self._unfinished.remove(request)
        if self.spec.max_restarts and request.method in self.options.restored:
            self._restored.pop(str(request), None)  # the new call is the last one
            self._restored[str(request)] = request
        elif request.method != "__init__":
            self._num_restarts, request.messages = 0, ()

    # -- restarts ---------------------------------------------------------------------------------

    def _may_restart(self) -> bool:
        """Return True unless the pool has died too often, or before its first role was built."""
        return bool(self._roles) and self._num_restarts < self.spec.max_restarts

    def _restart(self, cause: BaseException) -> None:
        """Start the pool again until this succeeds, or raise the last error."""
        unfinished, self._is_restarting = self._unfinished, True
        try:
            while True:
                self._num_restarts += 1
                reason = str(cause).partition("\n")[0]
                counts = self._num_restarts, self.spec.max_restarts
                logger.warning(
                    "pool '%s' starts again (restart %d of %d in a row): %s", self.spec.name, *counts, reason
                )
                self.terminate(reason)
                try:
                    self._start_again(unfinished)
                    return
                except WorkerError as error:
                    if error is not self._death or not self._may_restart():
                        raise
                    cause = error
        finally:
            self._is_restarting = False

    def _start_again(self, unfinished: Sequence[Request]) -> None:
        """Start processes, build and restore the roles in them, and send the unfinished requests again."""
        self._end_reason, self.processes, self.inbox = "", [], queue.SimpleQueue()
        self._requests, self._unfinished = [deque() for _ in range(self.world_size)], []
        self.start()
        self.join_ranks()
        for key, role in self._roles.items():
            self._build(key, role)
        replaced = unfinished[0].method if unfinished else ""  # a call that sets the same state next
        for call in list(self._restored.values()):
            if call.method != replaced:
                self._wait(self._send(call.role, call.method, call.limit, call.messages))
        for request in unfinished:
            request.waiting = request.ranks()
            self._post(request)

    # -- errors -----------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        dead = next((process for process in self.processes if process.exit_description() is not None), None)
        request = next((requests[0] for requests in self._requests if requests), None)
        has_work = request is not None or dead is not None
        if has_work and (error := self.missing_service(probe=dead is not None)) is not None:
            raise WorkerError(f"{request or self.spec.name}: {error}")
        if dead is not None:
            raise self._death_error(dead)

    def _check_times(self) -> None:
        for request in {requests[0] for requests in self._requests if requests}:
            late_ranks = sorted(rank for rank in request.waiting if self._requests[rank][0] is request)
            since = min(self._waiting_since[rank] for rank in late_ranks)
            request.wait.check(partial(self._describe, late_ranks), partial(self._stacks, late_ranks), since)

    def _describe(self, ranks: list[int]) -> str:
        processes = "; ".join(describe_process(self.processes[rank].local_pid()) for rank in ranks)
        return f"rank(s) {', '.join(map(str, ranks))} of {self.world_size} ({processes})"

    def _stacks(self, ranks: list[int], short: bool) -> str:
        """Return the stacks of ranks for a message, or only the innermost frames of some of them."""
        texts: list[str] = []
        for rank in ranks[:MAX_STACKS] if short else ranks:
            stacks = self.processes[rank].stacks()
            stacks = innermost_frames(stacks) if short else stacks
            texts.append(f"On rank {rank}:\n{stacks or '(no stack: the process did not react to a signal)'}")
        return "\n\n".join(texts)

    def _raise_first(self, request: Request, failures: dict[int, Failure]) -> NoReturn:
        """Raise the error of the rank that failed first. The other ranks may have failed as a consequence."""
        deadline = time.monotonic() + GRACE_SECONDS
        while request.waiting and (remaining_seconds := deadline - time.monotonic()) > 0:
            answer = self._next_answer(remaining_seconds)
            self._check_alive()
            if answer is not None and answer[1] is request and not answer[2][0]:
                failures[answer[0]] = answer[2][1]
        if (cluster_error := self.missing_service(probe=True)) is not None:
            raise WorkerError(f"{request}: {cluster_error}")
        rank, failure = min(failures.items(), key=lambda item: item[1].at)
        summary = f"{request} raised on rank {rank} of {self.world_size}: {failure.summary}"
        error = WorkerError(f"{summary}\n\nOn rank {rank}:\n{failure.traceback}")
        error.peak_memory, original = failure.device_peak or self._growth(), failure.original()
        if isinstance(original, GeneratorError):
            self._death = error
        raise error from original

    def _death_error(self, process: WorkerProcess) -> WorkerError:
        requests = self._requests[process.rank] or next((requests for requests in self._requests if requests), ())
        role, method = (requests[0].role, requests[0].method) if requests else (self.spec.name, "between two calls")
        hint = self.hint_at_start() if method == "__init__" else ""
        stacks = process.stacks()
        name = f"rank {process.rank} of {self.world_size} of {role} (process {process.pid})"
        trace = f"\n\nOn rank {process.rank}:\n{stacks}" if stacks else ""
        error = WorkerError(f"{name} died in {method} ({process.exit_description()}){hint}{trace}")
        error.peak_memory, self._death = self._growth(), error
        return error

    def hint_at_start(self) -> str:
        """Return a possible cause of a death in the first call."""
        return ""

    def _growth(self) -> int | None:
        """Return the largest growth of memory of the ranks that are alive on this machine, in bytes, or None."""
        pairs = zip(self.processes, self._resident, strict=True)
        growths = [resident_memory(process.local_pid(), "VmHWM") - start for process, start in pairs]
        return max(growths, default=0) or None

    def terminate(self, reason: str) -> None:
        """Kill all processes. Calling it again has no effect, unless an interrupt ended the first call."""
        if self._end_reason and self not in _LIVE:
            return
        self._end_reason = self._end_reason or reason
        for process in self.processes:
            process.kill()
        _LIVE.discard(self)
        for process in self.processes:
            process.join(END_SECONDS)
        self.release()


_LIVE: set[ProcessPool] = set()


@atexit.register
def _terminate_all() -> None:
    for pool in list(_LIVE):
        pool.terminate("the driver ended")


# A forked child of the driver must not terminate the driver's workers.
os.register_at_fork(after_in_child=_LIVE.clear)
