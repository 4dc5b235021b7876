"""Workers answer calls within time limits, say how they ended, and leave no process."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import marked, none_left_behind, parent, process_name, still_running

from camshaft.workers import processes
from camshaft.workers.messages import Ready
from camshaft.workers.worker import CANCEL_SECONDS, Answer, Failure, Worker, close_all, count_processes, wait_for

SECONDS = 20.0
"""Time limit for what takes milliseconds on an idle machine."""

Start = Callable[..., Worker[Any]]


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Mark all processes, and fail if one is left. They find the programs of the tests."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    with none_left_behind() as mark:
        yield mark


@pytest.fixture
def start() -> Iterator[Start]:
    workers: list[Worker[Any]] = []

    def start(setup: Any = None, timeout: float = SECONDS, output: list[bytes] | None = None) -> Worker[Any]:
        write = (lambda _: None) if output is None else output.append
        workers.append(Worker("support.echoing", setup, timeout, write))
        return workers[-1]

    yield start
    close_all(workers, os.getpid())


def events_of(worker: Worker[Any], count: int) -> list[Any]:
    """Wait for `count` events of a worker."""
    deadline, events = time.monotonic() + SECONDS, []
    while len(events) < count and time.monotonic() < deadline:
        events += [event for _, event in wait_for([worker], deadline)[1]]
    return events


def answers(worker: Worker[Any], count: int) -> dict[Any, Any]:
    """Wait for `count` answers of a ready worker, and return the value of each key."""
    return {event.key: event.reply.value for event in events_of(worker, count) if isinstance(event, Answer)}


def ready(worker: Worker[Any]) -> Worker[Any]:
    assert isinstance(events_of(worker, 1)[0], Ready)
    return worker


def test_a_worker_answers_its_setup_and_its_calls_in_order(start: Start) -> None:
    worker = start({"a": 1})
    worker.submit([("x", [1]), ("y", None), ("z", b"3")], timeout=SECONDS)
    first, *others = events_of(worker, 4)
    assert first == Ready(("ready", {"a": 1}))
    assert [(event.key, event.reply.value) for event in others] == [("x", [1]), ("y", None), ("z", b"3")]
    assert worker.calls == {}


@pytest.mark.alone
def test_the_time_limit_applies_to_each_call(start: Start) -> None:
    worker = ready(start())
    worker.submit([(number, ("sleep", 0.3)) for number in range(6)], timeout=1.5)  # 1.8 s together
    assert len(answers(worker, 6)) == 6
    worker.submit([("long", ("sleep", 1000)), ("next", 1), ("last", 2)], timeout=0.5)
    assert events_of(worker, 1) == [Failure("timeout")]
    worker.kill()
    assert worker.split_calls() == (["long"], ["next", "last"])


@pytest.mark.alone
def test_concurrent_calls_are_cancelled_one_by_one(start: Start) -> None:
    worker = ready(start())
    calls = [("a", ("sleep", 1000)), ("b", ("sleep", 0.0)), ("c", ("suppress",))]
    worker.submit(calls, timeout=1.0, concurrent=True)
    replies = {event.key: event.reply for event in events_of(worker, 3)}
    assert {key: reply.cancelled for key, reply in replies.items()} == {"a": True, "b": False, "c": True}
    assert replies["b"].value == ("sleep", 0.0)
    worker.submit([("blocking", 1)], timeout=SECONDS)
    assert answers(worker, 1) == {"blocking": 1}


def test_a_concurrent_call_keeps_its_limit_beside_shorter_ones(start: Start) -> None:
    worker = ready(start())
    worker.submit([("long", ("sleep", 1.5))], timeout=SECONDS, concurrent=True)
    worker.submit([("short", ("sleep", 0.0))], timeout=0.1 - CANCEL_SECONDS, concurrent=True)
    assert answers(worker, 2).keys() == {"long", "short"}


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (("exit", 0), "exited with code 0"),
        (("exit", 7), "exited with code 7"),
        (("exit", 137), "exited with code 137"),
        (("exit", 200), "exited with code 200"),
        (("signal", signal.SIGKILL), "was killed by signal 9 (Killed)"),
        (("signal", signal.SIGSEGV), "was killed by signal 11 (Segmentation fault)"),
        (("signal", signal.SIGXCPU), "was killed by signal 24 (CPU time limit exceeded)"),
        (("kill parent",), "was killed by signal 9 (Killed)"),
    ],
)
def test_a_crash_tells_how_the_process_ended(start: Start, payload: Any, text: str) -> None:
    worker = ready(start())
    worker.submit([("only", payload)], timeout=SECONDS)
    assert events_of(worker, 1) == [Failure("crash")]
    worker.kill()
    assert worker.describe_exit() == text


def test_a_setup_can_crash_or_time_out(start: Start) -> None:
    worker = start("exit")
    assert events_of(worker, 1) == [Failure("crash")]
    worker.kill()
    assert worker.describe_exit() == "exited with code 5"
    assert events_of(start("hang", timeout=0.5), 1) == [Failure("timeout")]


def test_code_of_a_worker_gets_the_statuses_of_its_processes(start: Start) -> None:
    worker = ready(start())
    worker.submit([(number, ("status",)) for number in range(20)], timeout=SECONDS)
    assert set(answers(worker, 20).values()) == {-signal.SIGKILL}


def test_processes_live_between_calls_and_end_with_the_worker(start: Start) -> None:
    worker = ready(start())
    worker.submit([("one", ("start",)), ("two", ("start",))], timeout=SECONDS)
    pids = list(answers(worker, 2).values())
    assert still_running(pids, seconds=0.2) == pids
    worker.close_input()
    assert still_running([*pids, worker.guard_pid]) == []
    worker.kill()
    assert worker.describe_exit() == "exited with code 0"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2])
def test_a_guard_ignores_signals(start: Start, mark: str, number: signal.Signals) -> None:
    worker = ready(start())
    assert [pid for pid in marked(mark) if process_name(pid) == "camshaft-guard"] == [worker.guard_pid]
    assert worker.pid is not None
    assert parent(worker.pid) == worker.guard_pid
    os.kill(worker.guard_pid, number)
    worker.submit([("a", 1)], timeout=SECONDS)
    assert answers(worker, 1) == {"a": 1}


def test_the_worker_of_a_killed_guard_ends(start: Start) -> None:
    worker = ready(start())
    worker.submit([("one", ("start",))], timeout=SECONDS)
    pids = list(answers(worker, 1).values())
    os.kill(worker.guard_pid, signal.SIGKILL)
    assert worker.pid is not None
    assert still_running([worker.pid]) == []
    assert worker.is_dead
    worker.kill()
    assert still_running(pids) == []


def test_processes_end_if_their_guard_is_killed_while_it_is_asked_to_end_them(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = ready(start())
    worker.submit([("one", ("start",))], timeout=SECONDS)
    pids = list(answers(worker, 1).values())
    os.kill(worker.guard_pid, signal.SIGSTOP)

    def kill(_number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.guard_pid, signal.SIGKILL)

    monkeypatch.setattr(worker._process, "send_signal", kill)  # it would resume the guard
    worker.kill()
    assert still_running(pids) == []


@pytest.mark.parametrize("lists_children", [True, False])
def test_processes_below_others_are_counted(
    start: Start, monkeypatch: pytest.MonkeyPatch, lists_children: bool
) -> None:
    monkeypatch.setattr(processes, "_LISTS_CHILDREN", lists_children)
    workers = [ready(start()), ready(start())]
    assert count_processes(workers) == 0
    for worker in workers:
        worker.submit([("one", ("start",)), ("two", ("start",))], timeout=SECONDS)
        pids = list(answers(worker, 2).values())
        assert set(pids) <= set(processes.children(worker.pid or 0))
    assert count_processes(workers) == 4
    os.kill(pids[0], signal.SIGKILL)
    assert still_running(pids[:1]) == []
    assert count_processes(workers) == 3
    assert count_processes([]) == 0


def test_a_suspended_guard_is_resumed_to_end_the_processes(start: Start) -> None:
    worker = ready(start())
    worker.submit([("one", ("start",))], timeout=SECONDS)
    pids = list(answers(worker, 1).values())
    os.kill(worker.guard_pid, signal.SIGSTOP)
    worker.kill()
    assert still_running(pids) == []
