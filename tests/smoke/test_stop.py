"""Runs stopped by a scheduler save the current step, set the exit status and resume with the same command."""

import os
import pty
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command_line import Forked, camshaft, finished, rm_args, sft_args, start
from support.interrupting import NAME, run_until
from support.ppo_runs import ppo_args
from support.processes import MARK, marked, still_running
from support.same_run import RANKS

from camshaft import storage
from camshaft.tracking import deterministic
from camshaft.tracking.jsonl import read_metrics

pytestmark = pytest.mark.timeout(200)

SHORT: dict[str, Any] = {
    "trainer.total_training_steps": 4,
    "trainer.total_epochs": 2,
    "trainer.save_freq": -1,
    "trainer.logger": f"[jsonl,{NAME}]",
    "trainer.resume_mode": "auto",
}


def lines(run: Path) -> list[dict[str, float]]:
    return [deterministic(line) for line in read_metrics(run / "metrics.jsonl")]


def steps(run: Path) -> list[int]:
    return [step for step, _ in storage.step_folders(run)]


def run_args(home: Path, run: Path, **more: Any) -> list[str]:
    return ["ppo", *ppo_args(home, {**SHORT, "trainer.default_local_dir": run, **more})]


def test_sigterm_saves_the_current_step_and_the_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, uninterrupted = tmp_path / "run", tmp_path / "whole"
    result = run_until(2, run, run_args(tmp_path, run), monkeypatch, signal.SIGTERM, fork=True)
    assert result.status == 143
    assert "camshaft: SIGTERM: finishing the current step and saving;" in result.err
    assert "Traceback" not in result.err
    output = " ".join(result.out.split())
    assert "SIGTERM: stopped after step 2 of 4 (exit status 143)" in output
    assert f"Run the same command with trainer.default_local_dir={run} to resume." in output
    assert steps(run) == [2]
    resumed = camshaft(*run_args(tmp_path, run))
    assert resumed.status == 0
    assert "step 3 of 4 is next" in " ".join(resumed.out.split())
    assert camshaft(*run_args(tmp_path, uninterrupted)).status == 0
    assert lines(run) == lines(uninterrupted)
    assert len(lines(run)) == 4
    assert steps(uninterrupted) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "args_of"), [("sft", sft_args), pytest.param("rm", rm_args, marks=pytest.mark.slow)]
)
def test_sigusr1_ends_a_supervised_run_without_export(
    trainer: str, args_of: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    command = [trainer, *args_of(tmp_path, {**SHORT, "trainer.default_local_dir": run})]
    result = run_until(3, run, command, monkeypatch, signal.SIGUSR1)
    assert (result.status, steps(run)) == (138, [3])
    assert not (run / "huggingface").exists()
    assert "wrote" not in result.out
    shutil.rmtree(run)
    result = run_until(4, run, command, monkeypatch, signal.SIGUSR1)
    assert result.status == 0
    assert (run / "huggingface").is_dir()


@pytest.mark.slow
def test_every_process_of_a_run_may_be_sent_the_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm signals every process at the end of a job's time: driver, fork server, ranks and reward workers."""
    run, mark = tmp_path / "run", f"stop-{os.getpid()}"
    monkeypatch.setenv(MARK, mark)
    sent: list[int] = []

    def everybody(how: signal.Signals) -> None:
        sent.extend(marked(mark))
        for pid in sent:
            os.kill(pid, how)

    result = run_until(1, run, run_args(tmp_path, run, **RANKS), monkeypatch, signal.SIGTERM, everybody)
    assert result.status == 143, result.err
    assert len(sent) >= 5
    assert steps(run) == [1]
    assert all(storage.is_complete(run / "global_step_1" / part) for part in ("actor", "critic", "trainer"))
    assert still_running(sent) == []


HANGS = """
import time
from pathlib import Path
import sys
sys.path.append({tests!r})
from support.even_digits import compute_score as even_digits
def compute_score(**sample):
    while Path({file!r}).exists():
        time.sleep(0.01)
    return even_digits(**sample)
"""


@pytest.mark.slow
def test_a_step_whose_scoring_hangs_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    run, uninterrupted, hang, reward = (tmp_path / name for name in ("run", "whole", "hang", "my_reward.py"))
    reward.write_text(HANGS.format(file=str(hang), tests=str(Path(__file__).parents[1])))
    more = {"custom_reward_function.path": reward, "trainer.stop_timeout": 1}
    run.mkdir()
    (run / "hold").write_text("2")
    process = Forked(*run_args(tmp_path, run, **more))
    while not (run / "metrics.jsonl").exists() or '"step": 2,' not in (run / "metrics.jsonl").read_text():
        assert process.poll() is None, finished(process)
        time.sleep(0.02)
    hang.touch()
    (run / "hold").unlink()
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    result = finished(process)
    assert time.monotonic() - begin < 100, "the scoring hangs for ever"
    assert result.status == 143
    output = " ".join(result.out.split())
    assert "abandoned step 3: SIGTERM: 0 of 8 responses scored within trainer.stop_timeout=1 s" in output
    assert "SIGTERM: stopped after step 2 of 4" in output
    assert steps(run) == [2]
    hang.unlink()
    assert camshaft(*run_args(tmp_path, run, **more)).status == 0
    assert camshaft(*run_args(tmp_path, uninterrupted, **more)).status == 0
    assert lines(run) == lines(uninterrupted)
    assert len(lines(run)) == 4


def test_a_signal_before_the_first_step_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    process = start("-m", "camshaft", *run_args(tmp_path, tmp_path / "run"))
    process.send_signal(signal.SIGTERM)
    assert finished(process).status == -signal.SIGTERM
    assert steps(tmp_path / "run") == []


@pytest.mark.slow
def test_a_closed_terminal_saves_the_current_step(tmp_path: Path) -> None:
    many = {"trainer.total_training_steps": 500, "trainer.total_epochs": 500, "trainer.logger": "[console,jsonl]"}
    arguments = run_args(tmp_path, tmp_path / "run", **many, **{"trainer.save_freq": 2})
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, "-m", "camshaft", *arguments])
    output = b""
    while b"global_step_2" not in output:
        output += os.read(terminal, 1 << 16)
    os.close(terminal)  # the kernel sends SIGHUP
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    assert steps(tmp_path / "run")[-1] == lines(tmp_path / "run")[-1]["step"]
