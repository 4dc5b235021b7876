import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import NoReturn

import pytest
import torch
from support.processes import parent, still_running

from camshaft import subprocesses
from camshaft.errors import RewardError, ScoringAbandoned
from camshaft.rewards import output
from camshaft.rewards.manager import RewardManager
from camshaft.stop import STOP_SIGNALS, Stop
from camshaft.workers import worker

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
    deadline = time.monotonic() + 120  # a killed process is listed until the system has reaped it
    while alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert alive() == []


def test_a_worker_death_while_idle_loses_no_sample(manager, score, alive):
    rewards = manager("return 1.0", num_workers=1)  # a second one might still load the function
    score(rewards, ["a"] * 4)
    workers = alive()
    guards = [guard for guard in map(parent, workers) if guard != os.getpid()]
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    assert still_running(guards) == []  # a guard ends when all threads of its worker have ended
    assert score(rewards, ["a"] * 4).num_failed == 0


def test_workers_ignore_stop_signals_from_their_start_on(manager, score, monkeypatch):
    def start_and_stop(*arguments, **options):
        process = subprocesses.start_python(*arguments, **options)
        for number in STOP_SIGNALS:
            process.send_signal(number)
        return process

    monkeypatch.setattr(worker, "start_python", start_and_stop)
    assert score(manager("return 1.0"), ["a"] * 4).num_failed == 0


def drive(path: str, scored: Connection) -> NoReturn:
    """Score two responses in a process that goes on until it is killed."""
    torch.set_num_threads(1)  # a forked process has no OpenMP threads
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
    deadline = time.monotonic() + 120
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


@pytest.fixture
def reports(caplog, monkeypatch):
    """Report waits after 0.3 s, and return their messages."""
    monkeypatch.setattr(subprocesses, "REPORT_SECONDS", 0.3)
    monkeypatch.setattr(subprocesses.Wait, "longest", {})
    return lambda: [record.getMessage() for record in caplog.records if "no answer from" in record.getMessage()]


def test_slow_scoring_is_reported(manager, score, reports):
    rewards = manager("import time; time.sleep(float(solution_str)); return 1.0", timeout=1.5, num_workers=2)
    score(rewards, ["0", "0", "0.9", "3"])
    scoring_reports = [report for report in reports() if report.startswith("scoring: ")]
    assert scoring_reports[0].startswith("scoring: no answer from the reward function ")
    assert any(
        "my_reward.py 'compute_score' (2 of 4 responses scored; process " in report for report in scoring_reports
    )
    assert any('my_reward.py", line 2 in compute_score' in report for report in scoring_reports)


def test_slow_scoring_by_a_single_process_is_reported(manager, score, reports):
    score(manager("import time; time.sleep(0.2); return 1.0", num_workers=1), ["a"] * 8)
    assert any("of 8 responses scored" in report for report in reports())


def test_a_suspended_worker_is_named_and_replaced(manager, score, alive, reports):
    rewards = manager("return 1.0", timeout=1.0, num_workers=1)
    assert score(rewards, ["a"]).num_failed == 0
    (pid,) = alive()
    os.kill(pid, signal.SIGSTOP)
    result = score(rewards, ["a", "b"])
    assert (result.metrics["reward/timeouts"], result.scores.tolist()) == (1.0, [0.0, 1.0])
    scoring_reports = [report for report in reports() if report.startswith("scoring: ")]
    assert f"process {pid} (suspended; `kill -CONT {pid}` resumes it)" in scoring_reports[0]
    assert pid not in alive()


def test_output_goes_to_a_file_of_bounded_size(manager, score, tmp_path, capfd, caplog, monkeypatch):
    monkeypatch.setattr(output, "MAX_BYTES", 200_000)
    path = tmp_path / "rewards" / "output.log"
    body = "import os; print(solution_str * 50_000); os.system(f'echo child of {solution_str}'); return 1.0"
    rewards = manager(body, output=path)
    with caplog.at_level("INFO", "camshaft"):
        for _ in range(4):
            assert score(rewards, list("abcdef")).scores.tolist() == [1.0] * 6
    rewards.close()
    assert capfd.readouterr() == ("", "")
    text = path.read_text() + path.with_name("output.1.log").read_text()
    assert 200_000 < len(text) <= 400_000
    assert "child of " in text
    messages = [record.getMessage() for record in caplog.records if str(path) in record.getMessage()]
    assert messages == [f"the reward function prints; its output is in {path}"]


def test_output_without_a_file_is_bounded(manager, score, capfd, monkeypatch):
    monkeypatch.setattr(output, "MAX_STDERR_BYTES", 1000)
    score(manager("print(solution_str * 3000); return 1.0"), ["a", "b"])
    err = capfd.readouterr().err
    assert len(err) < 1100
    assert err.count("camshaft: further output of the reward function is discarded") == 1


def test_scoring_ends_after_a_stop_request(manager, score, alive):
    stop = Stop()
    rewards = manager("import time; time.sleep(60)", stop=stop, stop_timeout=0.5)
    stop.requested, stop.request_time = signal.SIGTERM, time.monotonic()
    with pytest.raises(ScoringAbandoned, match=r"SIGTERM: 0 of 3 responses scored within trainer.stop_timeout=0.5 s"):
        score(rewards, list("abc"))
    assert time.monotonic() - stop.request_time < 60
    assert alive() == []
