"""What one process of a pool holds, and how it answers the driver: several roles by number, one request at a time.

    host = Host(rank_info)
    frames = host.answer(frames)            # the request's and the answer's, see `wire.py`

Every backend whose ranks are processes runs one of these in each. A request is the name of a method of `Host` with
its arguments; an exception becomes a `Failure`, which is an answer like any other. While a role is at work its name
and rank stand in each line that it logs (`log_to_file`).
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import sys
import time
import traceback
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from camshaft.controller.wire import Frames, pack, unpack
from camshaft.controller.worker import RankInfo, Worker, build_worker, init_process_group, open_store
from camshaft.seat import Seat

LINE = "%(asctime)s %(levelname)s %(role)s %(name)s: %(message)s"
"""A line of a worker's log; `role` is "critic/3" for rank 3 of the critic."""


@dataclass(frozen=True)
class Failure:
    """An exception of a role, on its way to the driver."""

    summary: str
    traceback: str
    at: float
    """Wall clock, to tell which rank failed first."""
    pickled: bytes | None
    """The exception itself, if it can be sent."""

    def original(self) -> BaseException | None:
        if self.pickled is None:
            return None
        try:
            return pickle.loads(self.pickled)
        except Exception:  # its class exists on the worker alone; the text tells it all the same
            return None


class Host:
    """The roles of this process."""

    def __init__(self, rank_info: RankInfo):
        self._rank_info = rank_info
        self._roles: dict[int, tuple[str, Worker]] = {}
        self._store: TCPStore | None = None

    def answer(self, frames: Frames) -> Frames:
        """What the driver asked for, or why it cannot be had."""
        try:
            request, *rest = unpack(frames)
            return pack((True, methodcaller(request, *rest)(self)))
        except BaseException as error:
            return pack((False, _failure(error)))

    # -- requests ---------------------------------------------------------------------------------

    def pid(self) -> int:
        return os.getpid()

    def open_rendezvous(self) -> str:
        """Where the ranks can meet: a store in this process, on a port that the system chose."""
        self._store, address = open_store(self._rank_info)
        return address

    def join(self, rendezvous: str) -> None:
        """Meet the other ranks."""
        init_process_group(self._rank_info, rendezvous, self._store)

    def build(
        self, key: int, name: str, role_class: type[Worker], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        _Role.now = f"{name}/{self._rank_info.rank}"
        self._roles[key] = name, build_worker(role_class, self._rank_info, args, kwargs)

    def seat_for(self, key: int, method: str) -> Seat:
        return self._roles[key][1].seat_for(method)

    def call(self, key: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], keep: bool) -> Any:
        name, role = self._roles[key]
        _Role.now = f"{name}/{self._rank_info.rank}"
        result = methodcaller(method, *args, **kwargs)(role)
        return result if keep else None

    def drop(self, key: int) -> None:
        """Let go of a role; its memory is free for the others."""
        del self._roles[key]
        gc.collect()


def _failure(error: BaseException) -> Failure:
    own_files = {__file__, build_worker.__code__.co_filename}
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in own_files:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    summary = "".join(traceback.format_exception_only(error)).strip()
    return Failure(summary, text.rstrip(), time.time(), _pickled(error))


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # many exceptions can be written but not read back
    except Exception:
        return None
    return data


class _Role(logging.Filter):
    """Adds to each record which role is at work."""

    now = "-"

    def filter(self, record: logging.LogRecord) -> bool:
        record.role = _Role.now
        return True


def log_to_file(rank_info: RankInfo) -> None:
    """All that this process and its children write goes to the file of its rank from now on, in one format."""
    file = log_file(rank_info)
    _Role.now = f"{rank_info.pool}/{rank_info.rank}"
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    handler = logging.StreamHandler()
    handler.addFilter(_Role())
    handler.setFormatter(logging.Formatter(LINE))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def log_file(rank_info: RankInfo) -> Path | None:
    return (
        None
        if rank_info.log_folder is None
        else Path(rank_info.log_folder) / f"{rank_info.pool}_rank{rank_info.rank}.log"
    )


def set_environment(rank_info: RankInfo, environment: dict[str, str]) -> None:
    """The driver's variables, and where this rank is; the cores of the machine are shared by its ranks."""
    os.environ.update(environment)
    os.environ.update(RANK=str(rank_info.rank), WORLD_SIZE=str(rank_info.world))
    os.environ.update(LOCAL_RANK=str(rank_info.local_rank), LOCAL_WORLD_SIZE=str(rank_info.local_world))
    cores = len(os.sched_getaffinity(0))
    threads = int(
        environment.get("OMP_NUM_THREADS") or max(1, cores // (rank_info.local_world + rank_info.other_ranks))
    )
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # torch was imported before this and has read the variable of that time.
    torch.set_num_threads(threads)
