"""The controller's backend for one machine: this process for one rank, worker processes for several.

    BACKENDS["local"] = "camshaft.controller.local:start"

Worker processes come from a fork server that has imported `PRELOAD` once, so all but the first start
take well under a second. Every wait is bounded. A rank that raises, dies or does not answer ends the
whole group with one `WorkerError` that says which rank, in which call, and shows its stack: what the other
ranks hold after a broken collective is of no use. For an exception its `__cause__` is the exception itself.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import pickle
import queue
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from operator import methodcaller
from pathlib import Path
from typing import Any, NoReturn

import torch

from camshaft.controller.dispatch import Call
from camshaft.controller.group import Launch, Ranks
from camshaft.controller.serve import STACK_SIGNAL, Failure, read_stacks, serve
from camshaft.controller.wire import Frames, pack, receive, send, unpack
from camshaft.controller.worker import Place, Worker, build_worker
from camshaft.errors import WorkerError, how_it_ended
from camshaft.seat import Seat

logger = logging.getLogger(__name__)

PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "camshaft.controller.serve",
]
"""What the fork server imports. A program may append to it before its first worker process."""

POLL_SECONDS = 0.2
"""How often the driver looks whether all processes still live; answers wake it at once."""
GRACE_SECONDS = 0.3
"""After one rank failed, how long to look for another that failed or died before it and was the cause."""
END_SECONDS = 5.0
"""How long a process may take to end by itself."""
NOTICE_SECONDS = 60.0
"""When the log first says what is awaited; then at twice the age, and so on."""
COLLECTIVE_EXTRA_SECONDS = 60.0
"""Collectives give up this much after the driver does, so that the driver's message is the one to be read."""


def start(launch: Launch) -> Ranks:
    return InProcess(launch) if launch.world_size == 1 else Processes(launch)


class InProcess(Ranks):
    """One rank: the role is an object of this process."""

    def __init__(self, launch: Launch):
        self._name = launch.name
        self._role: Worker | None = build_worker(
            launch.role_class, Place(device=_device(0, 1)), launch.args, launch.kwargs
        )

    def seats(self, method: str) -> list[Seat]:
        return [self._running().seat_for(method)]

    def call(self, method: str, calls: Sequence[Call | None], keep: Sequence[bool]) -> list[Any]:
        (call,) = calls
        assert call is not None
        args, kwargs = call
        return [methodcaller(method, *args, **kwargs)(self._running())]

    def shutdown(self) -> None:
        self._role = None

    def _running(self) -> Worker:
        if self._role is None:
            raise WorkerError(f"{self._name} was shut down; spawn it again")
        return self._role


class Processes(Ranks):
    """Several ranks: one worker process each, in one process group."""

    def __init__(self, launch: Launch):
        self._launch = launch
        self._ended = ""
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[tuple[int, Frames | None]] = queue.SimpleQueue()
        self._folder = Path(tempfile.mkdtemp(prefix="camshaft-"))
        self._links: list[_Link] = []
        _LIVE.add(self)
        try:
            for rank in range(launch.world_size):
                self._links.append(_Link(rank, launch, self._folder, self._inbox))
            self._ask("__init__", [("build", launch.role_class, launch.args, launch.kwargs)] * launch.world_size)
        except BaseException:
            self._end("it could not be started")
            raise

    def seats(self, method: str) -> list[Seat]:
        return self._ask(f"seat_for({method})", [("seat_for", method)] * self._launch.world_size)

    def call(self, method: str, calls: Sequence[Call | None], keep: Sequence[bool]) -> list[Any]:
        # Ranks that share a call share its message too, so that it is pickled once.
        made: dict[tuple[int, bool], tuple[Any, ...]] = {}
        messages: list[tuple[Any, ...] | None] = []
        for call, kept in zip(calls, keep, strict=True):
            if call is not None:
                made.setdefault((id(call), kept), ("call", method, *call, kept))
            messages.append(None if call is None else made[id(call), kept])
        return self._ask(method, messages)

    def shutdown(self) -> None:
        with self._lock:
            if self._ended:
                return
            for link in self._links:
                link.requests.put(pack(("stop",)))
            deadline = time.monotonic() + END_SECONDS
            for link in self._links:
                link.process.join(max(0.0, deadline - time.monotonic()))
            self._end("it was shut down")

    # -- one call ---------------------------------------------------------------------------------

    def _ask(self, what: str, messages: Sequence[tuple[Any, ...] | None]) -> list[Any]:
        """Send each rank its message and wait for all answers; if that fails, the group ends."""
        with self._lock:
            if self._ended:
                raise WorkerError(f"{self._launch.name}.{what}: its workers have ended ({self._ended}); spawn it again")
            packed = self._pack(what, messages)
            try:
                for link, message in zip(self._links, messages, strict=True):
                    if message is not None:
                        link.requests.put(packed[id(message)])
                return self._wait(what, {rank for rank, message in enumerate(messages) if message is not None})
            except BaseException as error:
                self._end(f"{what} failed: {str(error).partition(chr(10))[0] or type(error).__name__}")
                raise

    def _pack(self, what: str, messages: Sequence[tuple[Any, ...] | None]) -> dict[int, Frames]:
        packed: dict[int, Frames] = {}
        for message in messages:
            if message is None or id(message) in packed:
                continue
            try:
                packed[id(message)] = pack(message)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise WorkerError(
                    f"{self._launch.name}.{what}: an argument cannot be sent to a worker process: {error}. "
                    "Functions and classes that are sent must stand at the top level of an importable module"
                ) from error
        return packed

    def _wait(self, what: str, waiting: set[int]) -> list[Any]:
        """The answers of the ranks in `waiting`, None for the others."""
        answers: list[Any] = [None] * self._launch.world_size
        started = time.monotonic()
        notice = NOTICE_SECONDS
        while waiting:
            answer = self._next(POLL_SECONDS)
            if answer is not None:
                rank, (good, value) = answer
                waiting.discard(rank)
                if not good:
                    self._raise_first(what, {rank: value}, len(waiting))
                answers[rank] = value
            self._check_alive(what)
            age = time.monotonic() - started
            if waiting and age > self._launch.timeout:
                raise self._timed_out(what, sorted(waiting), age)
            if waiting and age > notice:
                logger.warning("%s.%s: rank(s) %s have not answered for %.0f s", *self._of(what, waiting), age)
                notice *= 2
        return answers

    def _next(self, seconds: float) -> tuple[int, tuple[bool, Any]] | None:
        """The next answer of any rank, or None if none came or a connection broke."""
        try:
            rank, frames = self._inbox.get(timeout=seconds)
        except queue.Empty:
            return None
        if frames is None:
            self._links[rank].process.join(END_SECONDS)
            return None
        return rank, unpack(frames)

    def _check_alive(self, what: str) -> None:
        dead = [link for link in self._links if not link.process.is_alive()]
        if dead:
            raise self._died(what, dead[0])

    # -- what can go wrong ------------------------------------------------------------------------

    def _of(self, what: str, ranks: set[int] | list[int]) -> tuple[str, str, str]:
        return self._launch.name, what, ", ".join(str(rank) for rank in sorted(ranks))

    def _raise_first(self, what: str, failures: dict[int, Failure], waiting: int) -> NoReturn:
        """Raise for the rank that failed first: the others may only have lost their peer."""
        deadline = time.monotonic() + GRACE_SECONDS
        while waiting and (left := deadline - time.monotonic()) > 0:
            answer = self._next(left)
            self._check_alive(what)
            if answer is not None:
                waiting -= 1
                if not answer[1][0]:
                    failures[answer[0]] = answer[1][1]
        rank, failure = min(failures.items(), key=lambda item: item[1].at)
        raise WorkerError(
            f"{self._launch.name}.{what} raised on rank {rank} of {self._launch.world_size}: {failure.summary}\n\n"
            f"On rank {rank}:\n{failure.traceback}"
        ) from _original(failure)

    def _died(self, what: str, link: _Link) -> WorkerError:
        how = how_it_ended(link.process.exitcode)
        hint = ""
        if what == "__init__":
            hint = ". A script that starts workers must do so under `if __name__ == '__main__':`"
        text = read_stacks(self._folder, link.rank)
        return WorkerError(
            f"rank {link.rank} of {self._launch.world_size} of {self._launch.name} (process {link.process.pid}) "
            f"died in {what} ({how}){hint}" + (f"\n\nOn rank {link.rank}:\n{text}" if text else "")
        )

    def _timed_out(self, what: str, waiting: list[int], age: float) -> WorkerError:
        name, _, ranks = self._of(what, waiting)
        stacks = "\n\n".join(f"On rank {rank}:\n{self._links[rank].stacks(self._folder)}" for rank in waiting)
        return WorkerError(
            f"{name}.{what}: rank(s) {ranks} of {self._launch.world_size} have not answered for {age:.1f} s. "
            f"If the call is only slow, give spawn(..., timeout={self._launch.timeout:g}) more seconds\n\n{stacks}"
        )

    def _end(self, why: str) -> None:
        """Kill what still runs; a second time does nothing."""
        if self._ended:
            return
        self._ended = why
        _LIVE.discard(self)
        for link in self._links:
            link.kill()
        for link in self._links:
            link.process.join(END_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)


class _Link:
    """One worker process and the thread that talks to it, so that no driver blocks on a stuck worker."""

    def __init__(self, rank: int, launch: Launch, folder: Path, inbox: queue.SimpleQueue[tuple[int, Frames | None]]):
        self.rank = rank
        self.requests: queue.SimpleQueue[Frames | None] = queue.SimpleQueue()
        self._inbox = inbox
        self._socket, theirs = socket.socketpair()
        meeting = (folder / "rendezvous").as_uri()
        place = Place(
            rank,
            launch.world_size,
            _device(rank, launch.world_size),
            meeting,
            launch.timeout + COLLECTIVE_EXTRA_SECONDS,
        )
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, launch.role_class.__module__])
        # Not a daemon: a role may have child processes of its own.
        self.process: BaseProcess = context.Process(
            target=serve, args=(theirs, place, folder, dict(os.environ)), name=f"{launch.name}-{rank}"
        )
        with theirs:
            self.process.start()
        threading.Thread(target=self._carry, name=f"link-{launch.name}-{rank}", daemon=True).start()

    def _carry(self) -> None:
        with self._socket:
            while self._exchange():
                pass

    def _exchange(self) -> bool:
        """One request and its answer, which are let go of before the next wait."""
        frames = self.requests.get()
        if frames is None:
            return False
        try:
            send(self._socket, frames)
            answer = receive(self._socket)
        except OSError:
            self._inbox.put((self.rank, None))
            return False
        self._inbox.put((self.rank, answer))
        return True

    def stacks(self, folder: Path) -> str:
        """The stacks of the process' threads, written by itself."""
        pid = self.process.pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
        deadline = time.monotonic() + 1.0
        text, before = "", ""
        while time.monotonic() < deadline and not (text and text == before):  # until no more is being written
            time.sleep(0.05)
            text, before = read_stacks(folder, self.rank), text
        return text or "(no stack: the process did not react to a signal)"

    def kill(self) -> None:
        """End the process and its children."""
        self.requests.put(None)
        pid = self.process.pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):  # it has ended, or has not yet begun to lead a session
            os.killpg(pid, signal.SIGKILL)
        self.process.kill()


def _device(rank: int, world: int) -> str:
    """An accelerator of its own for each rank, or none for any: collectives refuse two ranks on one device."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or torch.accelerator.device_count() < world:
        return "cpu"
    return f"{accelerator.type}:{rank}"


def _original(failure: Failure) -> BaseException | None:
    if failure.pickled is None:
        return None
    try:
        return pickle.loads(failure.pickled)
    except Exception:  # its class exists on the worker alone; the text tells it all the same
        return None


_LIVE: set[Processes] = set()


@atexit.register
def _end_all() -> None:
    for ranks in list(_LIVE):
        ranks._end("the driver ended")


# A forked child of the driver owns none of its workers.
os.register_at_fork(after_in_child=_LIVE.clear)
