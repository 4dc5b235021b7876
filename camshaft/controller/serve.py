"""What runs in a worker process of `local.py`: build the role, answer calls, end.

The process leads a session of its own, so that Ctrl-C reaches the driver alone and ending the session
takes the role's own child processes with it. It ends when the driver says so or when the driver is gone,
also if it was killed. A signal makes it write the stacks of its threads into its file of the group's
folder, whatever it is doing.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any, NoReturn

import torch

from camshaft.controller.wire import pack, receive, send, unpack
from camshaft.controller.worker import Place, Worker, build_worker, init_process_group

STACK_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True)
class Failure:
    """An exception of a role, on its way to the driver."""

    summary: str
    traceback: str
    at: float
    """On the machine's monotonic clock, to tell which rank failed first."""
    pickled: bytes | None
    """The exception itself, if it can be sent."""


def read_stacks(folder: Path, rank: int) -> str:
    """What a rank has written of its stacks, without the thread that only watches the driver; "" if nothing."""
    file = _stack_file(folder, rank)
    blocks = file.read_text(encoding="utf-8").strip().split("\n\n") if file.exists() else []
    return "\n\n".join(block for block in blocks if _end_with_driver.__name__ not in block)


def serve(connection: socket.socket, place: Place, folder: Path, environment: dict[str, str]) -> None:
    """The life of one rank."""
    os.setsid()
    with _stack_file(folder, place.rank).open("w", encoding="utf-8") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
        threading.Thread(target=_end_with_driver, args=(folder,), name="driver-watch", daemon=True).start()
        _set_environment(place, environment)
        rank = _Rank(place)
        try:
            while _answer_one(rank, connection):
                pass
        except OSError:
            _end_session(folder)
        # Interpreters that end while gloo threads live abort now and then, so this one does not unwind.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class _Rank:
    """The role of this process, and what can be asked of it."""

    def __init__(self, place: Place):
        self._place = place
        self._role: Worker | None = None

    def build(self, role_class: type[Worker], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        init_process_group(self._place)
        self._role = build_worker(role_class, self._place, args, kwargs)

    def seat_for(self, method: str) -> Any:
        assert self._role is not None
        return self._role.seat_for(method)

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], keep: bool) -> Any:
        result = methodcaller(method, *args, **kwargs)(self._role)
        return result if keep else None


def _answer_one(rank: _Rank, connection: socket.socket) -> bool:
    """Take one request and answer it; False when the driver asks to end, `OSError` when it is gone."""
    frames = receive(connection)
    try:
        request, *rest = unpack(frames)
        if request == "stop":
            return False
        answer = pack((True, methodcaller(request, *rest)(rank)))
    except BaseException as error:
        answer = pack((False, _failure(error)))
    send(connection, answer)
    return True


def _failure(error: BaseException) -> Failure:
    own_files = {__file__, build_worker.__code__.co_filename}
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in own_files:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    summary = "".join(traceback.format_exception_only(error)).strip()
    return Failure(summary, text.rstrip(), time.monotonic(), _pickled(error))


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # many exceptions can be written but not read back
    except Exception:
        return None
    return data


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.txt"


def _end_with_driver(folder: Path) -> None:
    driver = multiprocessing.parent_process()
    assert driver is not None
    driver.join()
    _end_session(folder)


def _end_session(folder: Path) -> NoReturn:
    """Nobody is left to call this rank: end it and the processes of its role, and tidy up for the driver."""
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("SIGKILL came back")


def _set_environment(place: Place, environment: dict[str, str]) -> None:
    """The driver's variables of today (this process was forked from a server with those of its start)."""
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world))
    os.environ.update(LOCAL_RANK=str(place.rank), LOCAL_WORLD_SIZE=str(place.world))
    cores = len(os.sched_getaffinity(0))
    threads = int(environment.get("OMP_NUM_THREADS") or max(1, cores // place.world))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # torch was imported before the fork and has read the variable of that time.
    torch.set_num_threads(threads)
