"""No process that a reward function starts outlives its run, a failed call, or a worker or driver that is killed."""

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest
import torch
from support import leaving
from support.leaving import CRASHING, HANGING, LEAVING, left
from support.processes import command_line, marked, none_left_behind, process_name

from camshaft.rewards import manager as managers
from camshaft.rewards.manager import RewardManager

from .conftest import batch_of, decode

TIMEOUT = 5.0
SECONDS = 10.0
"""Limit for the end of processes, which takes milliseconds on an idle machine."""


@pytest.fixture(autouse=True)
def mark() -> Iterator[str]:
    """Mark all processes that the test starts, and fail if one is left. Runs of this module have marks of their own."""
    with none_left_behind() as mark:
        yield mark


def started(case: str, folder: Path) -> bool:
    return leaving.notes_of(case, folder).exists()


def remaining(case: str, folder: Path) -> list[int]:
    """Return the processes of a case that are left after `SECONDS`."""
    return wait_until_none(lambda: left(case, folder))


def wait_until_none(find: Callable[[], list[int]]) -> list[int]:
    deadline = time.monotonic() + SECONDS
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


@pytest.fixture(scope="module")
def module_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the file of the functions and a folder for their notes, which the environment names."""
    folder = tmp_path_factory.mktemp("leaving")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(leaving.FOLDER, str(folder))
        yield folder


class Run(NamedTuple):
    kinds: dict[str, str]
    """Outcome of each case."""
    folder: Path
    left_by_failures: dict[str, list[int]]
    """Processes of failed calls that ran after all calls."""
    left_at_end: dict[str, list[int]]
    marked: list[str]
    """Processes of the run that ran after its end."""


def score_all(cases: list[str], folder: Path, **options: float) -> Run:
    with none_left_behind() as mark:
        with RewardManager(leaving.__file__, "compute_score", output=folder / "output.log", **options) as rewards:  # type: ignore[arg-type]
            result = rewards.score(batch_of(cases), decode)
            failed = {failure.row: failure.kind for failure in result.failures if failure.kind != "slow"}
            kinds = {case: failed.get(row, "ok") for row, case in enumerate(cases)}
            failures = [case for case in cases if kinds[case] != "ok"]
            left_by_failures = {case: remaining(case, folder) for case in failures}
        left_at_end = {case: remaining(case, folder) for case in cases}
        marks = wait_until_none(lambda: marked(mark))
        commands = [command_line(pid) for pid in marks]
        for pid in {*marks, *itertools.chain(*left_at_end.values())}:
            os.kill(pid, signal.SIGKILL)  # the tests report them
    return Run(kinds, folder, left_by_failures, left_at_end, commands)


@pytest.fixture(scope="module")
def leaving_run(module_environment: Path) -> Run:
    """Score the functions that return."""
    return score_all([*LEAVING], module_environment, timeout=100.0, num_workers=3)


@pytest.fixture(scope="module")
def crashing_run(module_environment: Path) -> Run:
    """Score the functions that end their worker."""
    return score_all([*CRASHING], module_environment, timeout=100.0, num_workers=3)


@pytest.fixture(scope="module")
def hanging_run(module_environment: Path) -> Run:
    """Score the functions that hang, all at the same time."""
    cases = ["program_in_a_session", *HANGING]  # a function without any result would be rejected
    folder = module_environment / "hanging"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(leaving.FOLDER, str(folder))
        return score_all(cases, folder, timeout=TIMEOUT, num_workers=len(cases))


@pytest.mark.parametrize("case", LEAVING)
def test_no_process_outlives_the_run(leaving_run: Run, case: str) -> None:
    assert leaving_run.kinds[case] == "ok"
    assert leaving_run.left_at_end[case] == []


@pytest.mark.parametrize("case", CRASHING)
def test_no_process_outlives_its_worker(crashing_run: Run, case: str) -> None:
    assert crashing_run.kinds[case] == "crash"
    assert crashing_run.left_by_failures[case] == []


@pytest.mark.parametrize("case", HANGING)
def test_no_process_outlives_a_timeout(hanging_run: Run, case: str) -> None:
    assert hanging_run.kinds[case] == "timeout"
    assert hanging_run.left_by_failures[case] == []


def test_no_other_process_outlives_the_runs(leaving_run: Run, crashing_run: Run, hanging_run: Run) -> None:
    assert leaving_run.marked == crashing_run.marked == hanging_run.marked == []


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for the notes of the functions."""
    monkeypatch.setenv(leaving.FOLDER, str(tmp_path))
    return tmp_path


def drive(case: str, scored: Connection) -> NoReturn:
    """Score responses in a process that goes on until it is killed."""
    torch.set_num_threads(1)  # a forked process has no OpenMP threads
    rewards = RewardManager(leaving.__file__, "compute_score", num_workers=1, timeout=1000.0)
    rewards.score(batch_of(["forked_that_forks_twice", "program_without_environment", case]), decode)
    scored.send(True)
    while True:
        time.sleep(60)


@pytest.mark.parametrize("case", ["program_in_a_session", "holds_the_interpreter", "suppresses_everything"])
def test_no_process_outlives_a_killed_driver(notes: Path, case: str, mark: str) -> None:
    scored, sender = multiprocessing.Pipe(duplex=False)
    driver = multiprocessing.get_context("fork").Process(target=drive, args=(case, sender))
    driver.start()
    if case in HANGING:
        while not started(case, notes):  # the call runs
            time.sleep(0.02)
    else:
        assert scored.recv()
    driver.kill()
    driver.join()
    for one in ("forked_that_forks_twice", "program_without_environment", case):
        assert remaining(one, notes) == []
    assert wait_until_none(lambda: marked(mark)) == []


def guard(mark: str) -> int:
    """Return the guard of the only worker."""
    (guard,) = [pid for pid in marked(mark) if process_name(pid) == "camshaft-guard"]
    return guard


@pytest.fixture
def rewards(notes: Path) -> Iterator[RewardManager]:
    with RewardManager(leaving.__file__, "compute_score", num_workers=1, timeout=100.0) as rewards:
        yield rewards


def test_no_process_outlives_an_idle_worker_that_is_killed(rewards: RewardManager, notes: Path, mark: str) -> None:
    cases = ["forked_twice", "program_without_environment"]
    assert rewards.score(batch_of(cases), decode).num_failed == 0
    processes = [pid for pid in marked(mark) if "rewards.worker" in command_line(pid)]
    (worker,) = set(processes) - set(left("forked_twice", notes)) - {guard(mark)}
    os.kill(worker, signal.SIGKILL)
    assert [remaining(case, notes) for case in cases] == [[], []]


def test_processes_are_kept_between_calls_and_counted(notes: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(managers, "MANY_PROCESSES", 8)
    with RewardManager(leaving.__file__, "compute_score", num_workers=1, timeout=100.0) as rewards:
        counts = [
            rewards.score(batch_of([case]), decode).metrics["perf/reward_processes"]
            for case in ("program_in_a_session", "forked_twice", "ten_programs", "program_in_a_group")
        ]
        assert counts == [1, 2, 12, 13]
        assert len(left("ten_programs", notes)) == 10
    warnings = [record.getMessage() for record in caplog.records if "reward_processes grows" in record.getMessage()]
    assert [warning.partition(".")[0] for warning in warnings] == [
        "12 processes that the reward function has started are running"
    ]
    assert left("ten_programs", notes) == []


def test_orphans_that_end_are_reaped(file, score, mark: str) -> None:
    path = file(
        """
        import os, subprocess
        def compute_score(response):
            subprocess.run(["sh", "-c", "sleep 0.2 & exit 0"], check=True)
            return 1.0
        """
    )
    with RewardManager(path, num_workers=1) as rewards:
        assert score(rewards, ["a"] * 5).num_failed == 0
        children = Path(f"/proc/{guard(mark)}/task/{guard(mark)}/children")
        assert wait_until_none(lambda: [int(pid) for pid in children.read_text().split()][1:]) == []
