"""A pool whose ranks are processes: requests go out, answers come in, and what goes wrong is told once.

    class LocalPool(Processes):
        def start(self) -> list[Link]: ...       # one process for each rank
        def parcel(self, frames): ...            # what is sent: made once for all ranks that get the same

A rank answers its requests in their order. Every wait is bounded. A rank that raises, dies or does not answer ends the
whole pool with one `WorkerError` that says which rank, in which call, and shows its stack: what the other ranks hold
after a broken collective is of no use. For an exception its `__cause__` is the exception itself. While one pool is
waited for, the others are watched too.
"""

from __future__ import annotations

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
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from camshaft.controller.dispatch import Call
from camshaft.controller.group import Options, Pool, RoleSpec
from camshaft.controller.host import Failure
from camshaft.controller.resources import PoolSpec
from camshaft.controller.wire import Frames, pack, unpack
from camshaft.controller.worker import Worker
from camshaft.errors import WorkerError
from camshaft.seat import Seat

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""How often the driver looks whether all processes still live; answers wake it at once."""
GRACE_SECONDS = 0.3
"""After one rank failed, how long to look for another that failed or died before it and was the cause."""
START_SECONDS = 180.0
"""How long processes may take to start and to import what they need, if a call may not take longer."""
END_SECONDS = 5.0
"""How long a process may take to end by itself."""
NOTICE_SECONDS = 60.0
"""When the log first says what is awaited; then at twice the age, and so on."""
COLLECTIVE_EXTRA_SECONDS = 60.0
"""Collectives give up this much after the driver does, so that the driver's message is the one to be read."""

Inbox = queue.SimpleQueue[tuple[int, Frames | None]]


class Link(ABC):
    """One process of a pool, as the driver holds it. Its answers come to the pool's inbox, with its rank."""

    rank: int
    pid: int | None = None

    @abstractmethod
    def post(self, parcel: Any) -> None:
        """Send a request, without waiting. (rank, None) in the inbox means that no answer will come any more."""

    @abstractmethod
    def ended(self) -> str | None:
        """How the process ended, None while it runs."""

    @abstractmethod
    def stacks(self) -> str:
        """The stacks of the process' threads, also of a dead one if it left them; "" if there are none."""

    @abstractmethod
    def stop(self) -> None:
        """Ask the process to end when it has answered what it was asked."""

    @abstractmethod
    def kill(self) -> None:
        """End the process and its children now."""

    @abstractmethod
    def join(self, seconds: float) -> None:
        """Wait until the process has ended, at most so long."""


class Sent:
    """A request to some ranks, and their answers so far."""

    def __init__(self, pool: Processes, name: str, method: str, timeout: float, ranks: set[int]):
        self._pool, self.name, self.method, self.timeout = pool, name, method, timeout
        self.num_asked, self.waiting = len(ranks), ranks
        self.answers: dict[int, Any] = {}
        """By rank, in the order in which they came."""
        self.notice = NOTICE_SECONDS
        """The age at which the log says next that it is awaited."""

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self._pool.answers(self)

    @property
    def what(self) -> str:
        return f"{self.name}.{self.method}"


class Processes(Pool):
    """Ranks that are processes, in one process group."""

    def __init__(self, spec: PoolSpec, options: Options):
        super().__init__(spec)
        self.options = options
        self.inbox: Inbox = queue.SimpleQueue()
        self.links: list[Link] = []
        self._ended = ""
        self._lock = threading.RLock()
        self._asked: list[deque[Sent]] = [deque() for _ in range(self.world_size)]
        self._since = [0.0] * self.world_size
        self._roles: dict[int, RoleSpec] = {}
        self._next_key = 0

    def begin(self) -> None:
        """Start the processes; each begins to import what it needs, and none is waited for."""
        _LIVE.add(self)
        try:
            self.start()
        except BaseException:
            self._end("it could not be started")
            raise

    def meet(self) -> None:
        """Wait until all processes have met in one group."""
        try:
            for link, pid in zip(self.links, self.ask("__init__", ("pid",)), strict=True):
                link.pid = pid
            self.ask("__init__", ("join", self.rendezvous()))
        except BaseException:
            self._end("it could not be started")
            raise

    # -- what a backend adds ----------------------------------------------------------------------

    @abstractmethod
    def start(self) -> None:
        """Append a link for each rank to `links`."""

    @abstractmethod
    def rendezvous(self) -> str:
        """Where the ranks meet, as an init_method of torch.distributed."""

    def parcel(self, frames: Frames) -> Any:
        """What a link posts; made once for all ranks that get the same."""
        return frames

    def sendable(self, role_class: type[Worker]) -> Any:
        """What becomes the class again where it is unpickled."""
        return role_class

    def troubled(self) -> str | None:
        """What is wrong with the machines under the pool; None if nothing is. Asked while an answer is awaited."""
        return None

    def tidy(self) -> None:
        """Give back what the processes held beside themselves; they have ended."""

    # -- the pool ---------------------------------------------------------------------------------

    def build(self, role: RoleSpec) -> int:
        self._next_key += 1
        key = self._next_key
        request = ("build", key, role.name, self.sendable(role.role_class), role.args, role.kwargs)
        self._wait(self._send(role.name, "__init__", role.timeout, [request] * self.world_size))
        self._roles[key] = role
        return key

    def seats(self, key: int, method: str) -> list[Seat]:
        role = self._role(key, method)
        request = ("seat_for", key, method)
        return self._wait(self._send(role.name, f"seat_for({method})", role.timeout, [request] * self.world_size))

    def submit(self, key: int, method: str, calls: Sequence[Call | None], keep: Sequence[bool]) -> Sent:
        role = self._role(key, method)
        # Ranks that share a call share its message too, so that it is pickled once.
        made: dict[tuple[int, bool], tuple[Any, ...]] = {}
        messages: list[tuple[Any, ...] | None] = []
        for call, kept in zip(calls, keep, strict=True):
            if call is not None:
                made.setdefault((id(call), kept), ("call", key, method, *call, kept))
            messages.append(None if call is None else made[id(call), kept])
        return self._send(role.name, method, role.timeout, messages)

    def drop(self, key: int) -> None:
        role = self._roles.pop(key, None)
        if role is not None and not self._ended:
            self._wait(self._send(role.name, "drop", role.timeout, [("drop", key)] * self.world_size))

    def shutdown(self) -> None:
        with self._lock:
            if self._ended:
                return
            deadline = time.monotonic() + END_SECONDS
            for link in self.links:
                link.stop()
            for link in self.links:
                link.join(max(0.0, deadline - time.monotonic()))
            self._end("it was shut down")

    def _role(self, key: int, method: str) -> RoleSpec:
        if key not in self._roles:
            raise WorkerError(f"{self.spec.name}.{method}: the role was shut down; spawn it again")
        return self._roles[key]

    # -- one request ------------------------------------------------------------------------------

    def ask(self, what: str, request: tuple[Any, ...], ranks: set[int] | None = None) -> list[Any]:
        """The answers of all ranks, or of these, to a request that is about no role."""
        messages = [request if ranks is None or rank in ranks else None for rank in range(self.world_size)]
        timeout = max(self.options.timeout, START_SECONDS)
        return self._wait(self._send(self.spec.name, what, timeout, messages))

    def _send(self, name: str, method: str, timeout: float, messages: Sequence[tuple[Any, ...] | None]) -> Sent:
        with self._lock:
            self._check_running(f"{name}.{method}")
            parcels = self._parcels(f"{name}.{method}", messages)
            ranks = {rank for rank, message in enumerate(messages) if message is not None}
            sent = Sent(self, name, method, timeout, ranks)
            for link, message in zip(self.links, messages, strict=True):
                if message is not None:
                    if not self._asked[link.rank]:
                        self._since[link.rank] = time.monotonic()
                    self._asked[link.rank].append(sent)
                    link.post(parcels[id(message)])
            return sent

    def _parcels(self, what: str, messages: Sequence[tuple[Any, ...] | None]) -> dict[int, Any]:
        parcels: dict[int, Any] = {}
        for message in messages:
            if message is None or id(message) in parcels:
                continue
            try:
                parcels[id(message)] = self.parcel(pack(message))
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise WorkerError(
                    f"{what}: an argument cannot be sent to a worker process: {error}. "
                    "Functions and classes that are sent must stand at the top level of an importable module"
                ) from error
        return parcels

    def _wait(self, sent: Sent) -> list[Any]:
        """The answers of the ranks that were asked, None for the others."""
        found = dict(sent)
        return [found.get(rank) for rank in range(self.world_size)]

    def answers(self, sent: Sent) -> Iterator[tuple[int, Any]]:
        """(rank, answer) of the ranks that were asked, as they answer; if the wait fails, the pool ends."""
        num_told = 0
        while num_told < sent.num_asked:
            with self._lock:
                if len(sent.answers) == num_told:
                    self._check_running(sent.what)
                    with self._ending(sent):
                        self._look(POLL_SECONDS)
                arrived = list(sent.answers.items())[num_told:]
            num_told += len(arrived)
            yield from arrived
            for other in list(_LIVE):
                if other is not self:
                    other._glance()

    def _check_running(self, what: str) -> None:
        if self._ended:
            raise WorkerError(f"{what}: its workers have ended ({self._ended}); spawn it again")

    @contextlib.contextmanager
    def _ending(self, sent: Sent):
        """Whatever is raised inside ends the pool."""
        try:
            yield
        except BaseException as error:
            self._end(f"{sent.method} failed: {str(error).partition(chr(10))[0] or type(error).__name__}")
            raise

    def _glance(self) -> None:
        """What another pool's wait does for this one, if nobody else waits here."""
        busy = next((asked[0] for asked in self._asked if asked), None)
        if busy is None or not self._lock.acquire(blocking=False):
            return
        try:
            if not self._ended:
                with self._ending(busy):
                    self._look(0.0)
        finally:
            self._lock.release()

    def _look(self, seconds: float) -> None:
        """Take what has come in, after waiting so long for the first, and see that nothing is wrong."""
        answer = self._next(seconds)
        while answer is not None:
            rank, sent, (good, value) = answer
            if not good:
                self._raise_first(sent, {rank: value})
            sent.answers[rank] = value
            answer = self._next(0.0)
        self._check_alive()
        self._check_times()

    def _next(self, seconds: float) -> tuple[int, Sent, tuple[bool, Any]] | None:
        """The next answer of any rank, or None if none came or a connection broke."""
        try:
            rank, frames = self.inbox.get(timeout=seconds) if seconds else self.inbox.get_nowait()
        except queue.Empty:
            return None
        if frames is None:
            self.links[rank].join(END_SECONDS)
            return None
        sent = self._asked[rank].popleft()
        self._since[rank] = time.monotonic()
        sent.waiting.discard(rank)
        return rank, sent, unpack(frames)

    # -- what can go wrong ------------------------------------------------------------------------

    def _check_alive(self) -> None:
        for link in self.links:
            how = link.ended()
            if how is not None:
                raise self._died(link, how)
        sent, trouble = next((asked[0] for asked in self._asked if asked), None), self.troubled()
        if sent is not None and trouble is not None:
            raise WorkerError(f"{sent.what}: {trouble}")

    def _check_times(self) -> None:
        now = time.monotonic()
        for sent in {asked[0] for asked in self._asked if asked}:
            late = [rank for rank in sent.waiting if self._asked[rank][0] is sent]
            age = now - min(self._since[rank] for rank in late)
            if age > sent.timeout:
                raise self._timed_out(sent, sorted(late), age)
            if age > sent.notice:
                ranks = ", ".join(str(rank) for rank in sorted(late))
                logger.warning("%s: rank(s) %s have not answered for %.0f s", sent.what, ranks, age)
                sent.notice *= 2

    def _raise_first(self, sent: Sent, failures: dict[int, Failure]) -> NoReturn:
        """Raise for the rank that failed first: the others may only have lost their peer."""
        deadline = time.monotonic() + GRACE_SECONDS
        while sent.waiting and (left := deadline - time.monotonic()) > 0:
            answer = self._next(left)
            self._check_alive()
            if answer is not None and answer[1] is sent and not answer[2][0]:
                failures[answer[0]] = answer[2][1]
        rank, failure = min(failures.items(), key=lambda item: item[1].at)
        raise WorkerError(
            f"{sent.what} raised on rank {rank} of {self.world_size}: {failure.summary}\n\n"
            f"On rank {rank}:\n{failure.traceback}"
        ) from failure.original()

    def _died(self, link: Link, how: str) -> WorkerError:
        asked = self._asked[link.rank] or next((asked for asked in self._asked if asked), ())
        name, method = (asked[0].name, asked[0].method) if asked else (self.spec.name, "between two calls")
        hint = ""
        if method == "__init__":
            hint = ". A script that starts workers must do so under `if __name__ == '__main__':`"
        text = link.stacks()
        return WorkerError(
            f"rank {link.rank} of {self.world_size} of {name} (process {link.pid}) "
            f"died in {method} ({how}){hint}" + (f"\n\nOn rank {link.rank}:\n{text}" if text else "")
        )

    def _timed_out(self, sent: Sent, late: list[int], age: float) -> WorkerError:
        missing = "(no stack: the process did not react to a signal)"
        stacks = "\n\n".join(f"On rank {rank}:\n{self.links[rank].stacks() or missing}" for rank in late)
        ranks = ", ".join(str(rank) for rank in late)
        return WorkerError(
            f"{sent.what}: rank(s) {ranks} of {self.world_size} have not answered for {age:.1f} s. "
            f"If the call is only slow, give spawn(..., timeout={sent.timeout:g}) more seconds\n\n{stacks}"
        )

    def _end(self, why: str) -> None:
        """Kill what still runs; a second time does nothing."""
        if self._ended:
            return
        self._ended = why
        _LIVE.discard(self)
        for link in self.links:
            link.kill()
        for link in self.links:
            link.join(END_SECONDS)
        self.tidy()


_LIVE: set[Processes] = set()


@atexit.register
def _end_all() -> None:
    for pool in list(_LIVE):
        pool._end("the driver ended")


# A forked child of the driver owns none of its workers.
os.register_at_fork(after_in_child=_LIVE.clear)
