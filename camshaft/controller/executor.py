"""Execute the driver's requests in a worker process, which holds several roles and runs one request at a time.

    executor = Executor(rank_info)
    answer = executor.answer(request)       # both are frames of a message, see `camshaft.subprocesses`

Every worker process has one executor. A request consists of the name of a method of `Executor` and its arguments. An
exception is returned as a `Failure`. Each line of the log names the role and rank that runs (`log_to_file`).
"""

import gc
import logging
import os
import pickle
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from camshaft.controller.worker import RankInfo, Worker, build_worker
from camshaft.device import backend_for, create_store, peak_memory
from camshaft.garbage import freeze_objects
from camshaft.machine import omp_threads
from camshaft.masking import PrintableFormatter, remember_secrets
from camshaft.seat import Seat
from camshaft.subprocesses import Frames, Limit, limit_waits, pack, unpack

MARGIN_SECONDS = 5.0
"""Time by which waits within a call end before the time limit of the call."""
LOG_FORMAT = "%(asctime)s %(levelname)s %(role)s %(name)s: %(message)s"
"""Format of a worker's log lines. `role` is "critic/3" for rank 3 of the critic."""


@dataclass(frozen=True)
class Failure:
    """An exception of a role in the form that is sent to the driver."""

    summary: str
    traceback: str
    at: float
    """Wall clock time of the failure, by which the failures of several ranks are ordered."""
    pickled: bytes | None
    """The pickled exception, or None if it cannot be pickled."""
    device_peak: int | None
    """Peak of the tensors on the device of the rank in bytes; None on a CPU."""

    def original(self) -> BaseException | None:
        """Return the exception, or None if it cannot be unpickled in this process."""
        if self.pickled is None:
            return None
        try:
            return pickle.loads(self.pickled)
        except Exception:  # the class may exist only on the worker; `summary` and `traceback` contain the message
            return None


class Executor:
    """Executor of the driver's requests, which owns the roles of this process."""

    def __init__(self, rank_info: RankInfo):
        self._rank_info = rank_info
        self._roles: dict[int, tuple[str, Worker]] = {}
        self._store: TCPStore | None = None
        freeze_objects()

    def answer(self, frames: Frames) -> Frames:
        """Run a request and return its result or its failure, and its time in seconds."""
        start = time.perf_counter()
        try:
            request, *arguments = unpack(frames)
            result = methodcaller(request, *arguments)(self)
            return pack((True, result, time.perf_counter() - start))
        except BaseException as error:
            return pack((False, _failure(error, self._rank_info.device), time.perf_counter() - start))

    # -- requests ---------------------------------------------------------------------------------

    def pid(self) -> int:
        return os.getpid()

    def open_rendezvous(self) -> str:
        """Start the rendezvous store of the pool on a free port of this process and return its address."""
        rank_info = self._rank_info
        self._store = create_store(rank_info.address, rank_info.world, timedelta(seconds=rank_info.timeout))
        return f"tcp://{rank_info.address}:{self._store.port}"

    def join(self, rendezvous: str) -> None:
        init_process_group(self._rank_info, rendezvous, self._store)

    def build(
        self, key: int, name: str, role_class: type[Worker], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        _RoleFilter.role = f"{name}/{self._rank_info.rank}"
        self._roles[key] = name, build_worker(role_class, self._rank_info, args, kwargs)

    def seat_for(self, key: int, method: str) -> Seat:
        return self._roles[key][1].seat_for(method)

    def call(
        self, key: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], send_result: bool, limit: Limit
    ) -> Any:
        name, role = self._roles[key]
        _RoleFilter.role = f"{name}/{self._rank_info.rank}"
        # Waits within the call end before that of the driver, because their errors name the process that hangs.
        with limit_waits(limit, margin=min(MARGIN_SECONDS, limit.seconds / 10)):
            result = methodcaller(method, *args, **kwargs)(role)
        return result if send_result else None

    def drop(self, key: int) -> None:
        """Delete a role and free its memory."""
        del self._roles[key]
        gc.collect()


def _failure(error: BaseException, device: str) -> Failure:
    internal_files = {__file__, build_worker.__code__.co_filename}
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in internal_files:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    summary = "".join(traceback.format_exception_only(error)).strip()
    device_peak = None if device == "cpu" else peak_memory(device)
    return Failure(summary, text.rstrip(), time.time(), _pickled(error), device_peak)


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # many exceptions can be pickled but not unpickled
    except Exception:
        return None
    return data


class _RoleFilter(logging.Filter):
    """Logging filter that adds the running role to log records."""

    role = "-"

    def filter(self, record: logging.LogRecord) -> bool:
        record.role = _RoleFilter.role
        return True


def log_to_file(rank_info: RankInfo) -> None:
    """Redirect the output of this process and its child processes to the log file of its rank, if it has one."""
    _RoleFilter.role = f"{rank_info.pool}/{rank_info.rank}"
    if rank_info.log_folder is None:
        return
    file = Path(rank_info.log_folder) / f"{rank_info.pool}_rank{rank_info.rank}.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    handler = logging.StreamHandler()
    handler.addFilter(_RoleFilter())
    handler.setFormatter(PrintableFormatter(LOG_FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def set_environment(rank_info: RankInfo, environment: dict[str, str]) -> None:
    """Set the driver's environment variables, those of torchrun, the number of threads, and the secrets to mask.

    Unless OMP_NUM_THREADS is set, the ranks on this machine share its cores equally.
    """
    os.environ.update(environment)
    remember_secrets({"secrets": rank_info.secrets})
    os.environ.update(RANK=str(rank_info.rank), WORLD_SIZE=str(rank_info.world))
    os.environ.update(LOCAL_RANK=str(rank_info.local_rank), LOCAL_WORLD_SIZE=str(rank_info.local_world))
    cores = len(os.sched_getaffinity(0))
    share = max(1, cores // (rank_info.local_world + rank_info.other_ranks))
    threads = omp_threads(environment.get("OMP_NUM_THREADS", "")) or share
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # torch has already been imported and has read the previous value.
    torch.set_num_threads(threads)


def init_process_group(rank_info: RankInfo, rendezvous: str, store: TCPStore | None = None) -> None:
    """Join the default process group, which connects the ranks of a pool.

    `rendezvous` is an init_method of torch.distributed. `store` is the rendezvous store if it runs in this process.
    """
    device = torch.device(rank_info.device)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)  # barriers use the current device
    timeout = timedelta(seconds=rank_info.timeout)
    if store is None and rendezvous.startswith("tcp://"):
        host, port = rendezvous.removeprefix("tcp://").rsplit(":", 1)
        store = TCPStore(host, int(port), rank_info.world, is_master=False, timeout=timeout)
    dist.init_process_group(
        backend_for(device),
        init_method=rendezvous if store is None else None,
        store=store,
        rank=rank_info.rank,
        world_size=rank_info.world,
        timeout=timeout,
    )
