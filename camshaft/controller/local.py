"""The backend `local`, which starts pools on this machine.

    BACKENDS["local"] = "camshaft.controller.local:start"

If there is only one pool and it has one rank, the rank runs in the driver's process. All other ranks are worker
processes. They are forked from a server that has imported `PRELOAD`, so every start except the first takes well under a
second. A worker process is the leader of a new session. Ctrl-C therefore reaches only the driver, and killing the
session also kills child processes of the roles. A worker process ends on request or when the driver ends. SIGUSR1 dumps
its stacks. It ignores SIGTERM and SIGHUP, which tell the driver to save a checkpoint and exit.
"""

import contextlib
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
import time
from collections.abc import Generator, Sequence
from functools import partial
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from camshaft.controller.executor import Executor, log_to_file, set_environment
from camshaft.controller.group import InProcessPool, Options, Pool
from camshaft.controller.process_pool import END_SECONDS, Inbox, ProcessPool, WorkerProcess
from camshaft.controller.resources import PoolSpec
from camshaft.controller.worker import RankInfo
from camshaft.errors import ConfigError, WorkerError
from camshaft.machine import omp_threads
from camshaft.stacks import dump_stacks_on_signal, read_stacks
from camshaft.stop import ignore_stop_signals
from camshaft.subprocesses import (
    Frames,
    block_stop_signals,
    describe_exit,
    end_with,
    is_running,
    kill_group,
    kill_own_group,
    receive,
    safe_import_environment,
    send,
    without_watcher,
)
from camshaft.temporary import process_folder, remove

logger = logging.getLogger(__name__)

PRELOAD = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "camshaft.controller.local"]
"""Modules that the fork server imports. A program can extend the list before it starts the first worker process."""
_OUT_OF_MEMORY = "as after SIGKILL, which the kernel sends when memory runs out; start the run again"
_LOST_EXIT_CODE = 255
"""Exit code that `multiprocessing` reports for the processes of a fork server that has ended."""
STOP: Frames = []
"""Message that ends a worker process."""


def start(specs: Sequence[PoolSpec], options: Options) -> list[Pool]:
    """Start all pools or none."""
    pools: list[Pool] = []
    first_device, ranks = 0, sum(spec.world_size for spec in specs)
    if all(spec.device in (None, "cpu") for spec in specs):
        _warn_of_threads(ranks, len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", ""))
    try:
        for spec in specs:
            pools.append(_start_pool(spec, options, first_device, other_ranks=ranks - spec.world_size))
            first_device += spec.world_size  # pools that start together do not share devices
        for pool in pools:
            if isinstance(pool, ProcessPool):
                pool.join_ranks()
    except BaseException:
        for pool in pools:
            pool.shutdown()
        raise
    return pools


def _warn_of_threads(ranks: int, cores: int, variable: str) -> None:
    """Warn if OMP_NUM_THREADS gives the ranks more threads than there are cores; threads then wait for each other."""
    threads = omp_threads(variable)
    if ranks > 1 and threads > 1 and ranks * threads > cores:
        logger.warning(
            "OMP_NUM_THREADS=%d: %d ranks have %d threads on %d cores, which can make a step ten times slower. "
            "Unset OMP_NUM_THREADS, so that the ranks share the cores, or set OMP_NUM_THREADS=%d",
            *(threads, ranks, ranks * threads, cores, max(1, cores // ranks)),
        )


def _start_pool(spec: PoolSpec, options: Options, first_device: int, other_ranks: int) -> Pool:
    """Start one pool. If there are other pools, even a single rank is a process, so that the pools run concurrently."""
    if spec.nnodes > 1:
        raise ConfigError(
            f"pool '{spec.name}': nnodes={spec.nnodes} is unsupported by the controller backend 'local'; use the "
            "backend 'ray'"
        )
    if spec.world_size == 1 and not other_ranks:
        return InProcessPool(spec, device_of(0, 1, spec.device), options)
    pool = LocalPool(spec, options, first_device, other_ranks)
    pool.start()
    return pool


def process_pool(
    spec: PoolSpec, options: Options | None = None, first_device: int = 0, other_ranks: int = 0
) -> "LocalPool":
    """Start a pool whose ranks are worker processes in a process group, even for a single rank.

    It runs beside `other_ranks` of another pool, which shares the cores with it.
    """
    pool = LocalPool(spec, options, first_device, other_ranks)
    try:
        pool.start()
        pool.join_ranks()
    except BaseException:
        pool.shutdown()
        raise
    return pool


class LocalPool(ProcessPool):
    """A pool of worker processes on this machine."""

    def __init__(self, spec: PoolSpec, options: Options | None = None, first_device: int = 0, other_ranks: int = 0):
        super().__init__(spec, options or Options(), other_ranks)
        self._first_device = first_device
        self._folder = Path()

    def hint_at_start(self) -> str:
        return ". A script must start workers under `if __name__ == '__main__':`" if self.options.import_main else ""

    def create_processes(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="pool-", dir=process_folder()))
        devices = self._first_device + self.world_size
        for rank in range(self.world_size):
            rank_info = self.rank_info(rank, device_of(self._first_device + rank, devices, self.spec.device))
            self.processes.append(LocalProcess(rank_info, self._folder, self.inbox, self.options))

    def rendezvous(self) -> str:
        return (self._folder / "rendezvous").as_uri()

    def missing_service(self, probe: bool = False) -> str | None:
        """Return a message if the fork server has ended. Its processes then seem to end with exit code 255."""
        for process in self.processes if probe else ():
            if isinstance(process, LocalProcess) and process.has_lost_fork_server():
                return (
                    f"the fork server (process {process.fork_server}), which has started the worker processes, has "
                    f"ended, {_OUT_OF_MEMORY}"
                )
        return None

    def release(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class LocalProcess(WorkerProcess):
    """A worker process. A thread exchanges messages with it, so a worker that hangs does not block the driver."""

    def __init__(self, rank_info: RankInfo, folder: Path, inbox: Inbox, options: Options):
        self.rank = rank_info.rank
        self._folder, self._inbox = folder, inbox
        self._requests: queue.SimpleQueue[Frames | None] = queue.SimpleQueue()
        self._socket, child_socket = socket.socketpair()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, *options.preload])
        name = f"{rank_info.pool}-{rank_info.rank}"
        # Not a daemon, because daemonic processes cannot have child processes, and a role may start some.
        self._process: BaseProcess = context.Process(
            target=serve, args=(child_socket, rank_info, folder, os.getpid(), dict(os.environ)), name=name
        )
        with safe_import_environment(), _temporary_files_in(process_folder()), child_socket:
            resource_tracker.ensure_running()  # started before the signals are blocked, because this unblocks SIGTERM
            main_module = contextlib.nullcontext() if options.import_main else _hidden_main_module()
            with block_stop_signals(), main_module:  # a signal must not end the fork server either
                try:
                    self._process.start()
                except (EOFError, ConnectionError) as error:
                    raise WorkerError(f"the fork server ended while it started {name}, {_OUT_OF_MEMORY}") from error
        self.pid = self._process.pid
        private_names: Any = forkserver
        self.fork_server: int = private_names._forkserver._forkserver_pid
        threading.Thread(target=self._exchange_messages, name=f"messages-{name}", daemon=True).start()

    def post(self, payload: Frames) -> None:
        self._requests.put(payload)

    def stop(self) -> None:
        self._requests.put(STOP)

    def exit_description(self) -> str | None:
        return None if self._process.is_alive() else describe_exit(self._process.exitcode)

    def has_lost_fork_server(self) -> bool:
        """Return True if this process seems to have ended because the fork server has."""
        if self._process.exitcode != _LOST_EXIT_CODE:
            return False
        deadline = time.monotonic() + END_SECONDS
        while is_running(self.fork_server) and time.monotonic() < deadline:  # its pipes close before it has ended
            time.sleep(0.01)
        return not is_running(self.fork_server)

    def join(self, seconds: float) -> None:
        self._process.join(seconds)

    def stacks(self) -> str:
        assert self.pid is not None
        return without_watcher(read_stacks(self.pid, _stack_file(self._folder, self.rank)))

    def kill(self) -> None:
        self._requests.put(None)
        assert self.pid is not None
        kill_group(self.pid)
        self._process.kill()  # a process that has just started has not created its session yet

    def _exchange_messages(self) -> None:
        with self._socket:
            while self._exchange():
                pass

    def _exchange(self) -> bool:
        """Send one request and receive its answer. Both are freed before the next call waits."""
        frames = self._requests.get()
        if frames is None:
            return False
        try:
            send(self._socket.fileno(), frames)
            if frames is STOP:
                return True
            answer = receive(self._socket.fileno())
        except ConnectionError:
            self._inbox.put((self.rank, None))
            return False
        except Exception as error:  # for example, there is not enough memory for the answer
            self._inbox.put((self.rank, error))
            return False
        self._inbox.put((self.rank, answer))
        return True


@contextlib.contextmanager
def _hidden_main_module() -> Generator[None]:
    """Keep `multiprocessing` from running the program of this process again in a process that it starts.

    It would do so for the classes of `__main__`, and run a script without `if __name__ == "__main__"` twice.
    """
    main_module = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main_module


@contextlib.contextmanager
def _temporary_files_in(folder: Path) -> Generator[None]:
    """Let `multiprocessing`, which starts the fork server once, create its socket in the folder.

    Its default folder would stay behind if this process is killed.
    """
    previous = tempfile.tempdir
    tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = previous


def device_of(index: int, count: int, kind: str | None) -> str:
    """Return the device of a rank: the accelerator with this index, or "cpu" if `kind` is "cpu".

    If the machine has fewer than `count` accelerators, all ranks use the CPU, because they cannot share an accelerator.
    """
    if kind == "cpu":
        return "cpu"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or torch.accelerator.device_count() < count:
        return "cpu"
    return f"{accelerator.type}:{index}"


# -- in the worker process ------------------------------------------------------------------------


def serve(connection: socket.socket, rank_info: RankInfo, folder: Path, driver: int, variables: dict[str, str]) -> None:
    """Answer the requests to one rank until the driver stops it or ends."""
    os.setsid()
    dump_stacks_on_signal(_stack_file(folder, rank_info.rank))
    ignore_stop_signals(signal.SIGTERM, signal.SIGHUP)
    watcher = end_with(driver, partial(_end_session, folder))  # the fork server exits only after its worker processes
    os.environ.clear()  # remove the variables from the time at which the fork server started
    set_environment(rank_info, variables)
    log_to_file(rank_info)
    executor = Executor(rank_info)
    status = 0
    try:
        while (request := receive(connection.fileno())) != STOP:
            send(connection.fileno(), executor.answer(request))
    except ConnectionError:
        watcher.join()  # the driver has ended, or it is about to kill this rank and needs its folder for other pools
    except Exception:
        logger.exception("rank %d cannot exchange messages with the driver and exits", rank_info.rank)
        status = 1
    # Remove semaphores, such as that of tqdm, which the resource tracker would report as leaked.
    private_names: Any = util
    private_names._run_finalizers(0)
    # Exit without finalizing the interpreter, because finalization sometimes aborts while gloo threads run.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the disk may be full
            stream.flush()
    os._exit(status)


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.txt"


def _end_session(folder: Path) -> None:
    """Delete the driver's folder, because the driver has ended, and kill this rank with its child processes."""
    remove(folder.parent)
    kill_own_group()
