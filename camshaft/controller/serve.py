"""What runs in a worker process of `local.py`: answer requests, end.

The process leads a session of its own, so that Ctrl-C reaches the driver alone and ending the session takes the roles'
own child processes with it. It ends when the driver says so or when the driver is gone, also if it was killed.
SIGUSR1 makes it write the stacks of its threads into its file of the pool's folder, whatever it is doing; SIGTERM,
which asks the driver to save and end, does nothing to it.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import NoReturn

from camshaft.controller.host import Host, log_to_file, set_environment
from camshaft.controller.machine import read_stacks, stacks_on_signal
from camshaft.controller.wire import Frames, receive, send
from camshaft.controller.worker import RankInfo
from camshaft.stop import outlive_stop_signals

STOP: Frames = []
"""The message that ends a worker process."""


def stacks_of(pid: int, folder: Path, rank: int) -> str:
    """The stacks of a rank, without the thread that only watches the driver; "" if there are none."""
    blocks = read_stacks(pid, _stack_file(folder, rank)).split("\n\n")
    return "\n\n".join(block for block in blocks if _end_with_driver.__name__ not in block)


def serve(connection: socket.socket, rank_info: RankInfo, folder: Path, environment: dict[str, str]) -> None:
    """The life of one rank."""
    os.setsid()
    stacks_on_signal(_stack_file(folder, rank_info.rank))
    outlive_stop_signals(signal.SIGTERM)
    threading.Thread(target=_end_with_driver, args=(folder,), name="driver-watch", daemon=True).start()
    os.environ.clear()  # this process was forked from a server with the variables of its start
    set_environment(rank_info, environment)
    log_to_file(rank_info)
    host = Host(rank_info)
    try:
        while (request := receive(connection)) != STOP:
            send(connection, host.answer(request))
    except OSError:
        _end_session(folder)
    # Interpreters that end while gloo threads live abort now and then, so this one does not unwind.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


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
