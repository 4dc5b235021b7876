import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import NoReturn

import pytest

from camshaft.errors import RewardError
from camshaft.rewards import pool
from camshaft.rewards.manager import RewardManager

from .conftest import batch_of, decode


def test_closing_ends_the_workers(manager, score, alive):
    rewards = manager("return 1.0")
    score(rewards, ["a"] * 4)
    assert alive()
    rewards.close()
    assert alive() == []
    with pytest.raises(RewardError, match="closed"):
        score(rewards, ["a"])


def test_dropping_the_manager_ends_the_workers(file, score, alive):
    rewards = RewardManager(name="exact_match")
    score(rewards, ["a"])
    del rewards
    assert alive() == []


def test_children_of_a_killed_call_are_killed(manager, score, alive):
    rewards = manager("import subprocess; subprocess.run(['sleep', '60'])", timeout=0.5, num_workers=1)
    assert score(rewards, ["a"]).metrics["reward/timeouts"] == 1.0
    deadline = time.monotonic() + 5  # a killed process is listed until the system has reaped it
    while alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert alive() == []


def test_a_worker_death_while_idle_loses_no_sample(manager, score, alive):
    rewards = manager("return 1.0")
    score(rewards, ["a"] * 4)
    for pid in alive():
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has exited but has not been reaped
    assert score(rewards, ["a"] * 4).num_failed == 0


def drive(path: str, scored: Connection) -> NoReturn:
    """Score two responses in a process that goes on until it is killed."""
    rewards = RewardManager(path, num_workers=2)
    rewards.score(batch_of(["a", "b"]), decode)
    scored.send(True)
    while True:
        time.sleep(60)


@pytest.mark.parametrize("body", ["return 1.0", "import time; time.sleep(60)"])
def test_workers_end_when_the_driver_is_killed(file, body, alive):
    path = file(f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    {body}")
    scored, sender = multiprocessing.Pipe(duplex=False)
    driver = multiprocessing.get_context("fork").Process(target=drive, args=(path, sender))
    driver.start()
    if "sleep" in body:
        while len(alive()) < 2:  # workers during calls
            time.sleep(0.05)
        time.sleep(0.5)
    else:
        assert scored.recv()
    driver.kill()
    driver.join()
    deadline = time.monotonic() + 10
    while alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive() == []


@pytest.mark.slow
def test_a_driver_that_exits_leaves_no_process(alive):
    driver = "from camshaft.rewards.manager import RewardManager; keep = RewardManager(name='exact_match')"
    assert subprocess.run([sys.executable, "-c", driver], check=False).returncode == 0
    assert alive() == []


def test_a_function_whose_first_calls_all_time_out_is_rejected(manager, score):
    rewards = manager("import time; time.sleep(60)", timeout=0.2, num_workers=2)
    message = r"first 8 calls of the reward function 'compute_score' returned nothing within 0\.2 s each"
    with pytest.raises(RewardError, match=message):
        score(rewards, ["a"] * 32)


def test_slow_scoring_is_reported(manager, score, caplog, monkeypatch):
    monkeypatch.setattr(pool, "REPORT_SECONDS", 0.2)
    rewards = manager("import time; time.sleep(float(solution_str)); return 1.0", timeout=1.0, num_workers=2)
    with caplog.at_level("INFO", "camshaft"):
        score(rewards, ["0", "0", "0.9", "3"])
    reports = [record.getMessage() for record in caplog.records if "waiting for the reward" in record.getMessage()]
    assert "2 of 4 responses scored" in reports[0]
