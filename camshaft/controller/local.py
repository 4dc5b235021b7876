"""Pools on this machine: this process for one rank that is all there is, worker processes for several.

    BACKENDS["local"] = "camshaft.controller.local:start"

Worker processes come from a fork server that has imported `PRELOAD` once, so all but the first start take well under
a second. `processes.py` does what is the same for every backend; here are the process and the socket to it.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import queue
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from camshaft.controller.group import InProcess, Options, Pool
from camshaft.controller.processes import COLLECTIVE_EXTRA_SECONDS, Inbox, Link, Processes
from camshaft.controller.resources import PoolSpec
from camshaft.controller.serve import STOP, serve, stacks_of
from camshaft.controller.wire import Frames, receive, send
from camshaft.controller.worker import RankInfo
from camshaft.errors import ConfigError, how_it_ended
from camshaft.stop import held_back

logger = logging.getLogger(__name__)

PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "camshaft.controller.serve",
]
"""What the fork server imports. A program may append to it before its first worker process."""


def start(specs: Sequence[PoolSpec], options: Options) -> list[Pool]:
    pools: list[Pool] = []
    first, ranks = 0, sum(spec.world_size for spec in specs)
    if all(spec.device in (None, "cpu") for spec in specs):
        _tell_of_threads(ranks, len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", ""))
    try:
        for spec in specs:
            pools.append(_begun(spec, options, first, other_ranks=ranks - spec.world_size))
            first += spec.world_size  # pools that are started together have devices of their own
        for pool in pools:
            if isinstance(pool, Processes):
                pool.meet()
    except BaseException:
        for pool in pools:
            pool.shutdown()
        raise
    return pools


def _tell_of_threads(ranks: int, cores: int, asked: str) -> None:
    """Threads that outnumber the cores wait for each other in turns, and there are many turns in a step."""
    threads = int(asked) if asked.isdigit() else 0
    if ranks > 1 and threads > 1 and ranks * threads > cores:
        logger.warning(
            "OMP_NUM_THREADS=%d: %d ranks have %d threads in all, and there are %d cores: a step can take ten times as "
            "long. Unset it, and the ranks share the cores; or set OMP_NUM_THREADS=%d",
            *(threads, ranks, ranks * threads, cores, max(1, cores // ranks)),
        )


def _begun(spec: PoolSpec, options: Options, first_device: int, other_ranks: int) -> Pool:
    """Start one pool; a single rank next to other pools is a process too, so that they run at the same time."""
    if spec.nnodes > 1:
        raise ConfigError(f"pool '{spec.name}': nnodes={spec.nnodes} needs the controller backend 'ray'")
    if spec.world_size == 1 and not other_ranks:
        return InProcess(spec, device_of(0, 1, spec.device))
    pool = LocalPool(spec, options, first_device, other_ranks)
    pool.begin()
    return pool


def processes(spec: PoolSpec, options: Options | None = None) -> LocalPool:
    """A pool whose ranks are worker processes in a process group, even if there is one rank alone."""
    pool = LocalPool(spec, options)
    pool.begin()
    pool.meet()
    return pool


class LocalPool(Processes):
    """Worker processes of this machine."""

    def __init__(self, spec: PoolSpec, options: Options | None = None, first_device: int = 0, other_ranks: int = 0):
        super().__init__(spec, options or Options())
        self._first_device, self._other_ranks = first_device, other_ranks
        self._folder = Path(tempfile.mkdtemp(prefix="camshaft-"))

    def start(self) -> None:
        devices = self._first_device + self.world_size
        for rank in range(self.world_size):
            rank_info = RankInfo(
                rank,
                self.world_size,
                device_of(self._first_device + rank, devices, self.spec.device),
                self.options.timeout + COLLECTIVE_EXTRA_SECONDS,
                local_rank=rank,
                local_world=self.world_size,
                other_ranks=self._other_ranks,
                pool=self.spec.name,
                log_folder=self.options.log_folder,
            )
            self.links.append(_LocalLink(rank_info, self._folder, self.inbox, self.options.preload))

    def rendezvous(self) -> str:
        return (self._folder / "rendezvous").as_uri()

    def tidy(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class _LocalLink(Link):
    """One worker process and the thread that talks to it, so that no driver blocks on a stuck worker."""

    def __init__(self, rank_info: RankInfo, folder: Path, inbox: Inbox, preload: Sequence[str]):
        self.rank = rank_info.rank
        self._folder, self._inbox = folder, inbox
        self._requests: queue.SimpleQueue[Frames | None] = queue.SimpleQueue()
        self._socket, theirs = socket.socketpair()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, *preload])
        # Not a daemon: a role may have child processes of its own.
        name = f"{rank_info.pool}-{rank_info.rank}"
        self._process: BaseProcess = context.Process(
            target=serve, args=(theirs, rank_info, folder, dict(os.environ)), name=name
        )
        resource_tracker.ensure_running()  # where it is started, it lets SIGTERM through
        with theirs, held_back():  # the fork server too is to live on
            self._process.start()
        self.pid = self._process.pid
        threading.Thread(target=self._carry, name=f"link-{name}", daemon=True).start()

    def post(self, parcel: Frames) -> None:
        self._requests.put(parcel)

    def stop(self) -> None:
        self._requests.put(STOP)

    def ended(self) -> str | None:
        return None if self._process.is_alive() else how_it_ended(self._process.exitcode)

    def join(self, seconds: float) -> None:
        self._process.join(seconds)

    def stacks(self) -> str:
        assert self.pid is not None
        return stacks_of(self.pid, self._folder, self.rank)

    def kill(self) -> None:
        self._requests.put(None)
        assert self.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it has ended, or has not yet begun to lead a session
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()

    def _carry(self) -> None:
        with self._socket:
            while self._exchange():
                pass

    def _exchange(self) -> bool:
        """One request and its answer, which are let go of before the next wait."""
        frames = self._requests.get()
        if frames is None:
            return False
        try:
            send(self._socket, frames)
            if frames is STOP:
                return True
            answer = receive(self._socket)
        except OSError:
            self._inbox.put((self.rank, None))
            return False
        self._inbox.put((self.rank, answer))
        return True


def device_of(number: int, wanted: int, kind: str | None) -> str:
    """An accelerator of its own for each of `wanted`, or none for any: collectives refuse two ranks on one device."""
    if kind == "cpu":
        return "cpu"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or torch.accelerator.device_count() < wanted:
        return "cpu"
    return f"{accelerator.type}:{number}"
