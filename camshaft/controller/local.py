"""The backend `local`: pools on this machine.

    BACKENDS["local"] = "camshaft.controller.local:start"

A single pool of one rank runs in the driver's process; all other ranks are worker processes. They are forked from a
server that has imported `PRELOAD`, so that all starts but the first take well under a second. A worker process leads a
session: Ctrl-C reaches only the driver, and ending the session also ends child processes of the roles. It ends on
request or when the driver ends. SIGUSR1 dumps its stacks; SIGTERM, which asks the driver to save and exit, has no
effect on it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from camshaft.controller.executor import Executor, log_to_file, set_environment
from camshaft.controller.group import InProcess, Options, Pool
from camshaft.controller.process_pool import COLLECTIVE_EXTRA_SECONDS, Inbox, ProcessPool, WorkerProcess
from camshaft.controller.resources import PoolSpec
from camshaft.controller.stacks import dump_stacks_on_signal, read_stacks
from camshaft.controller.worker import RankInfo
from camshaft.errors import ConfigError
from camshaft.stop import block_stop_signals, ignore_stop_signals
from camshaft.subprocesses import (
    Frames,
    describe_exit,
    end_with,
    kill_group,
    kill_own_group,
    receive,
    send,
    without_watcher,
)

logger = logging.getLogger(__name__)

PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "camshaft.controller.local",
]
"""Modules that the fork server imports. A program can extend the list before its first worker process."""
STOP: Frames = []
"""The message that ends a worker process."""


def start(specs: Sequence[PoolSpec], options: Options) -> list[Pool]:
    """Start all pools or none."""
    pools: list[Pool] = []
    first_device, ranks = 0, sum(spec.world_size for spec in specs)
    if all(spec.device in (None, "cpu") for spec in specs):
        _warn_of_threads(ranks, len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", ""))
    try:
        for spec in specs:
            pools.append(_start_pool(spec, options, first_device, other_ranks=ranks - spec.world_size))
            first_device += spec.world_size  # pools that are started together do not share devices
        for pool in pools:
            if isinstance(pool, ProcessPool):
                pool.join_ranks()
    except BaseException:
        for pool in pools:
            pool.shutdown()
        raise
    return pools


def _warn_of_threads(ranks: int, cores: int, variable: str) -> None:
    """Warn if OMP_NUM_THREADS gives the ranks more threads than cores: they then wait for each other."""
    threads = int(variable) if variable.isdigit() else 0
    if ranks > 1 and threads > 1 and ranks * threads > cores:
        logger.warning(
            "OMP_NUM_THREADS=%d: %d ranks have %d threads on %d cores, which can make a step ten times slower. "
            "Unset it, and the ranks share the cores; or set OMP_NUM_THREADS=%d",
            *(threads, ranks, ranks * threads, cores, max(1, cores // ranks)),
        )


def _start_pool(spec: PoolSpec, options: Options, first_device: int, other_ranks: int) -> Pool:
    """Start one pool; a single rank next to other pools is a process too, so that they run at the same time."""
    if spec.nnodes > 1:
        raise ConfigError(f"pool '{spec.name}': nnodes={spec.nnodes} needs the controller backend 'ray'")
    if spec.world_size == 1 and not other_ranks:
        return InProcess(spec, device_of(0, 1, spec.device))
    pool = LocalPool(spec, options, first_device, other_ranks)
    pool.start()
    return pool


def process_pool(spec: PoolSpec, options: Options | None = None) -> LocalPool:
    """Start a pool whose ranks are worker processes in a process group, also for a single rank."""
    pool = LocalPool(spec, options)
    pool.start()
    pool.join_ranks()
    return pool


class LocalPool(ProcessPool):
    """Worker processes of this machine."""

    def __init__(self, spec: PoolSpec, options: Options | None = None, first_device: int = 0, other_ranks: int = 0):
        super().__init__(spec, options or Options())
        self._first_device, self._other_ranks = first_device, other_ranks
        self._folder = Path(tempfile.mkdtemp(prefix="camshaft-"))

    def create_processes(self) -> None:
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
            self.processes.append(LocalProcess(rank_info, self._folder, self.inbox, self.options.preload))

    def rendezvous(self) -> str:
        return (self._folder / "rendezvous").as_uri()

    def release(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class LocalProcess(WorkerProcess):
    """A worker process, with a thread that exchanges messages, so that a stuck worker does not block the driver."""

    def __init__(self, rank_info: RankInfo, folder: Path, inbox: Inbox, preload: Sequence[str]):
        self.rank = rank_info.rank
        self._folder, self._inbox = folder, inbox
        self._requests: queue.SimpleQueue[Frames | None] = queue.SimpleQueue()
        self._socket, child_socket = socket.socketpair()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, *preload])
        name = f"{rank_info.pool}-{rank_info.rank}"
        # Not a daemon: a role may have child processes.
        self._process: BaseProcess = context.Process(
            target=serve, args=(child_socket, rank_info, folder, os.getpid(), dict(os.environ)), name=name
        )
        resource_tracker.ensure_running()  # started here, since starting it unblocks SIGTERM
        with child_socket, block_stop_signals():  # the fork server must survive the signal too
            self._process.start()
        self.pid = self._process.pid
        threading.Thread(target=self._exchange_messages, name=f"messages-{name}", daemon=True).start()

    def post(self, payload: Frames) -> None:
        self._requests.put(payload)

    def stop(self) -> None:
        self._requests.put(STOP)

    def exit_description(self) -> str | None:
        return None if self._process.is_alive() else describe_exit(self._process.exitcode)

    def join(self, seconds: float) -> None:
        self._process.join(seconds)

    def stacks(self) -> str:
        assert self.pid is not None
        return without_watcher(read_stacks(self.pid, _stack_file(self._folder, self.rank)))

    def kill(self) -> None:
        self._requests.put(None)
        assert self.pid is not None
        kill_group(self.pid)
        self._process.kill()  # a process that has just started does not lead a session yet

    def _exchange_messages(self) -> None:
        with self._socket:
            while self._exchange():
                pass

    def _exchange(self) -> bool:
        """Exchange one request and its answer; both are freed before the next wait."""
        frames = self._requests.get()
        if frames is None:
            return False
        try:
            send(self._socket.fileno(), frames)
            if frames is STOP:
                return True
            answer = receive(self._socket.fileno())
        except OSError:
            self._inbox.put((self.rank, None))
            return False
        self._inbox.put((self.rank, answer))
        return True


def device_of(index: int, count: int, kind: str | None) -> str:
    """Return the accelerator with this index if the machine has `count`, else "cpu": ranks cannot share a device."""
    if kind == "cpu":
        return "cpu"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or torch.accelerator.device_count() < count:
        return "cpu"
    return f"{accelerator.type}:{index}"


# -- in the worker process ------------------------------------------------------------------------


def serve(
    connection: socket.socket, rank_info: RankInfo, folder: Path, driver: int, environment: dict[str, str]
) -> None:
    """Run one rank: answer requests until the driver stops it or ends."""
    os.setsid()
    dump_stacks_on_signal(_stack_file(folder, rank_info.rank))
    ignore_stop_signals(signal.SIGTERM)
    end_with(driver, partial(_end_session, folder))  # the fork server cannot end before its worker processes
    os.environ.clear()  # it has the variables of the start of the fork server
    set_environment(rank_info, environment)
    log_to_file(rank_info)
    executor = Executor(rank_info)
    try:
        while (request := receive(connection.fileno())) != STOP:
            send(connection.fileno(), executor.answer(request))
    except OSError:
        _end_session(folder)
    # A regular exit of the interpreter sometimes aborts while gloo threads run.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.txt"


def _end_session(folder: Path) -> None:
    """Delete the pool's folder for the driver, which has ended, and kill this rank with its child processes."""
    shutil.rmtree(folder, ignore_errors=True)
    kill_own_group()
