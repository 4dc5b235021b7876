"""Reward functions that leave processes behind in many ways.

Each function is the body of a case: its processes note their ids in a file with the name of the case in the folder
`LEAVING_NOTES`. `start` waits for the note of a program, and `fork` for that of a forked process.
"""

import asyncio
import ctypes
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

FOLDER = "LEAVING_NOTES"
SESSION: dict[str, Any] = {"start_new_session": True}

LEAVING: dict[str, Callable[[str], Any]] = {}
"""Functions that return and leave processes."""
CRASHING: dict[str, Callable[[str], Any]] = {}
"""Functions that start a process in a session of its own and end their worker."""
HANGING: dict[str, Callable[[str], Any]] = {}
"""Functions that start a process in a session of its own and exceed the time limit."""

kept: list[object] = []
"""Objects that end processes when they are deleted."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Run a case. Cases that fail start a process first."""
    if solution_str in CRASHING or solution_str in HANGING:
        start(solution_str, **SESSION)
    (LEAVING | CRASHING | HANGING)[solution_str](solution_str)
    return 1.0


def note(case: str, pid: int | None = None) -> None:
    """Write down a process with its start time, which identifies it if its id is used again."""
    pid = pid or os.getpid()
    with notes_of(case).open("a") as file:
        file.write(f"{pid} {start_time(pid)}\n")


def notes_of(case: str, folder: Path | None = None) -> Path:
    return (folder or Path(os.environ[FOLDER])) / case


def start_time(pid: int) -> str:
    """Return the start time of a process, or "" if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def left(case: str, folder: Path) -> list[int]:
    """Return the running processes that a case has noted."""
    lines = notes_of(case, folder).read_text().split("\n")[:-1]
    assert lines, f"{case} has started no process"
    pairs = [line.split() for line in lines]
    return [int(pid) for pid, started in pairs if start_time(int(pid)) == started]


def start(case: str, *prefix: str, **options: Any) -> subprocess.Popen[Any]:
    """Start a program that sleeps, and note it."""
    process = subprocess.Popen([*prefix, "/bin/sleep", "1000"], **options)
    note(case, process.pid)
    return process


def fork(case: str, *actions: Callable[[], object]) -> None:
    """Fork a process that notes itself, acts and sleeps. Wait for its note."""
    reader, writer = os.pipe()
    if not os.fork():
        for action in actions:
            action()
        note(case)
        os.write(writer, b"1")
        sleep()
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)


def sleep() -> None:
    while True:
        time.sleep(1000)


def double_fork(case: str, *actions: Callable[[], object]) -> None:
    """Fork a process in a session of its own that forks another one and exits."""
    child = os.fork()
    if not child:
        os.setsid()
        fork(case, *actions)
        os._exit(0)
    os.waitpid(child, 0)


def ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def case(kind: dict[str, Callable[[str], Any]]) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    def add(function: Callable[[str], Any]) -> Callable[[str], Any]:
        kind[function.__name__] = function
        return function

    return add


LEAVING |= {
    "program": lambda name: start(name),
    "program_in_a_session": lambda name: start(name, **SESSION),
    "program_in_a_group": lambda name: start(name, process_group=0),
    "program_without_environment": lambda name: start(name, env={}, **SESSION),
    "program_without_pipes": lambda name: start(
        name, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **SESSION
    ),
    "program_that_ignores_hangups": lambda name: start(name, "nohup", stderr=subprocess.DEVNULL, **SESSION),
    "ten_programs": lambda name: [start(name, **SESSION) for _ in range(10)],
    "forked": lambda name: fork(name),
    "forked_in_a_session": lambda name: fork(name, os.setsid),
    "forked_twice": lambda name: double_fork(name),
    "forked_twice_with_two_sessions": lambda name: double_fork(name, os.setsid),
    "forked_that_forks_twice": lambda name: fork(name, os.setsid, lambda: double_fork(name)),
    "forked_that_ignores_signals": lambda name: fork(name, os.setsid, ignore_signals),
    "forked_without_pipes": lambda name: fork(name, os.setsid, lambda: [os.dup2(0, number) for number in (1, 2)]),
    "program_of_a_thread": lambda name: run_in_thread(lambda: start(name, **SESSION)),
    "program_of_a_thread_pool": lambda name: ThreadPoolExecutor(2).submit(start, name, **SESSION).result(),
    "program_of_an_event_loop": lambda name: asyncio.run(start_async(name)),
}


def run_in_thread(action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()
    threading.Thread(target=sleep, daemon=True).start()


async def start_async(name: str) -> None:
    process = await asyncio.create_subprocess_exec("/bin/sleep", "1000", **SESSION)
    note(name, process.pid)
    kept.append(process)


@case(LEAVING)
def program_of_a_shell(name: str) -> None:
    command = f"sleep 1000 & echo $! > {notes_of(name)}.pid"
    subprocess.run(["/bin/sh", "-c", command], check=True, **SESSION)
    note(name, int(Path(f"{notes_of(name)}.pid").read_text()))


@case(LEAVING)
def sixteen_by_forking_four_times(name: str) -> None:
    child = os.fork()
    if child:
        deadline = time.monotonic() + 120
        while not notes_of(name).exists() or notes_of(name).read_text().count("\n") < 16:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return
    for _ in range(4):
        os.fork()
        os.setsid() if os.getsid(0) != os.getpid() else None
    note(name)
    sleep()


@case(LEAVING)
def chain_of_forks(name: str) -> None:
    """Fork a process that is replaced every few milliseconds."""
    if os.fork():
        note(name)  # the case is seen by its mark, since its processes end
        return
    os.setsid()
    while not os.fork():
        time.sleep(0.005)
    os._exit(0)


@case(LEAVING)
def suspended(name: str) -> None:
    os.kill(start(name, **SESSION).pid, signal.SIGSTOP)


@case(LEAVING)
def process_of_multiprocessing(name: str) -> None:
    process = multiprocessing.get_context("fork").Process(target=sleep)
    process.start()
    note(name, process.pid)


@case(LEAVING)
def process_pool(name: str) -> None:
    pool = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork"))
    note(name, pool.submit(os.getpid).result())
    kept.append(pool)


@case(LEAVING)
def worker_that_is_a_subreaper(name: str) -> None:
    ctypes.CDLL(None).prctl(36, ctypes.c_ulong(1), 0, 0, 0)
    double_fork(name, os.setsid)
    ctypes.CDLL(None).prctl(36, ctypes.c_ulong(0), 0, 0, 0)


@case(LEAVING)
def program_with_output(name: str) -> None:
    start(name, **SESSION)
    for _ in range(100):
        sys.stdout.write("x" * 1_000_000)


@case(LEAVING)
def program_with_an_ended_one(name: str) -> None:
    """Wait for the exit status of a process, which nobody else may take."""
    assert subprocess.run(["/bin/sh", "-c", "exit 7"], check=False, **SESSION).returncode == 7
    start(name, **SESSION)


CRASHING |= {
    "exits": lambda name: os._exit(7),
    "segfaults": lambda name: ctypes.string_at(0),
    "aborts": lambda name: os.abort(),
    "kills_itself": lambda name: os.kill(os.getpid(), signal.SIGKILL),
    "kills_its_group": lambda name: os.killpg(0, signal.SIGKILL),
    "kills_its_parent": lambda name: (os.kill(os.getppid(), signal.SIGKILL), sleep()),
    "becomes_a_program": lambda name: os.execv("/bin/true", ["true"]),
    "closes_all_files": lambda name: os.closerange(0, 1000),
    "closes_all_files_of_a_fork": lambda name: (double_fork(name), os.closerange(0, 1000)),
    "exits_with_a_fork": lambda name: (fork(name, os.setsid), os._exit(7)),
}


HANGING |= {
    "sleeps": lambda name: sleep(),
    "holds_the_interpreter": lambda name: re.match("(a+)+$", "a" * 60 + "b"),
    "waits_for_its_program": lambda name: start(name, **SESSION).wait(),
    "suspends_itself": lambda name: os.kill(os.getpid(), signal.SIGSTOP),
    "suspends_its_parent": lambda name: (os.kill(os.getppid(), signal.SIGSTOP), sleep()),
    "waits_for_a_thread": lambda name: ThreadPoolExecutor(1).submit(sleep).result(),
    "waits_for_a_double_fork": lambda name: (double_fork(name, ignore_signals), sleep()),
}


@case(HANGING)
def suppresses_everything(name: str) -> None:
    ignore_signals()
    while True:
        try:
            sleep()
        except BaseException:
            continue
