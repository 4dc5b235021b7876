"""A generator killed during a generation gives an error within seconds, and the run resumes from a checkpoint."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.command_line import camshaft, finished, start
from support.faulty_rollouts import HELD
from support.ppo_runs import ppo_args
from support.processes import still_running

from camshaft.tracking import deterministic
from camshaft.tracking.jsonl import read_metrics

pytestmark = [pytest.mark.timeout(280), pytest.mark.alone, pytest.mark.slow]

RUN: dict[str, Any] = {
    "data.train_max_samples": 24,
    "trainer.total_training_steps": 4,
    "trainer.total_epochs": 2,
    "trainer.save_freq": 2,
    "trainer.logger": "[jsonl]",
    "trainer.resume_mode": "auto",
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.n": 2,
}


def test_a_killed_generator_ends_the_run_which_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold, run, uninterrupted = tmp_path / "hold", tmp_path / "run", tmp_path / "whole"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("CAMSHAFT_TEST_HOLD", str(hold))
    overrides = {"actor_rollout_ref.rollout.name": "process", "+actor_rollout_ref.rollout.engine_kwargs.rollout": HELD}
    args = ppo_args(tmp_path, {**RUN, **overrides, "trainer.default_local_dir": run})
    hold.write_text("4")  # the fourth weight sync belongs to the last step
    process, pid_file = start("-m", "camshaft", "ppo", *args), hold.with_suffix(".pid")
    try:
        deadline = time.monotonic() + 150
        while not (pid_file.exists() and pid_file.read_text()):
            assert process.poll() is None, finished(process)
            assert time.monotonic() < deadline
            time.sleep(0.02)
        generator = int(pid_file.read_text())
        os.kill(generator, signal.SIGKILL)
    finally:
        if not pid_file.exists():
            process.kill()
        result = finished(process)
    assert result.status == 1
    assert f"the generator's process ({generator}) died in generate_sequences (SIGKILL" in result.err
    assert "Run the same command" in result.out
    assert "Traceback" not in result.err
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [1, 2, 3]

    hold.unlink()
    assert camshaft("ppo", *args).status == 0
    builtin = {"actor_rollout_ref.rollout.name": "torch", "trainer.default_local_dir": uninterrupted}
    assert camshaft("ppo", *ppo_args(tmp_path, {**RUN, **builtin})).status == 0
    actual, expected = (
        [deterministic(line) for line in read_metrics(folder / "metrics.jsonl")] for folder in (run, uninterrupted)
    )
    assert actual == expected, (
        "in a process of its own, killed and resumed: the run of the built-in generator, bit for bit"
    )
    assert still_running([generator], seconds=1) == []
