"""kill -9 of the driver or of a rank: a resumed run with Megatron engines is bitwise that of an uninterrupted run."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import camshaft
from support.interrupting import NAME, run_until
from support.ppo_runs import ppo_args, saved_weights
from support.same_run import ACTOR

from camshaft import storage
from camshaft.tracking import deterministic
from camshaft.tracking.jsonl import read_metrics

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]

SETTINGS: dict[str, Any] = {
    f"{ACTOR}.strategy": "megatron",
    f"+{ACTOR}.engine_kwargs.tensor_model_parallel_size": 2,
    "critic.strategy": "megatron",
    "+critic.engine_kwargs.use_distributed_optimizer": True,
    "trainer.n_gpus_per_node": 2,
    f"{ACTOR}.optim.lr_scheduler_type": "cosine",
    f"{ACTOR}.shuffle": True,
    "+actor_rollout_ref.model.override_config.attention_dropout": 0.1,
    "trainer.total_training_steps": 4,
    "trainer.total_epochs": 1,
    "trainer.save_freq": 1,
    "trainer.logger": f"[jsonl,{NAME}]",
    "trainer.resume_mode": "auto",
}


def run_args(home: Path, run: Path) -> list[str]:
    return ["ppo", *ppo_args(home, {**SETTINGS, "trainer.default_local_dir": run})]


def lines(run: Path) -> list[str]:
    """Return the logged metrics as text with full precision, without timings."""
    return [json.dumps(deterministic(line)) for line in read_metrics(run / "metrics.jsonl")]


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    """Return a folder with an uninterrupted run in its folder `whole`."""
    assert camshaft(*run_args(home, home / "whole")).status == 0
    return home


def process_of_rank(run: Path, rank: int) -> int:
    """Return the process that writes the log file of a rank, and leads the session of its children."""
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        try:
            output = os.readlink(folder / "fd" / "1")
            if output.startswith(str(run)) and output.endswith(f"_rank{rank}.log") and os.getsid(pid) == pid:
                return pid
        except OSError:
            continue  # the process has exited, or belongs to another user
    raise AssertionError(f"no process of rank {rank} of {run}")


@pytest.mark.parametrize("victim", ["driver", pytest.param("rank 1", marks=pytest.mark.slow)])
def test_a_killed_run_resumes_bitwise(victim: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uninterrupted, killed = home / "whole", tmp_path / "killed"
    kill_rank = None if victim == "driver" else lambda how: os.kill(process_of_rank(killed, 1), how)
    result = run_until(3, killed, run_args(home, killed), monkeypatch, everybody=kill_rank)
    assert result.status == (-signal.SIGKILL if victim == "driver" else 1)
    assert victim in result.err or victim == "driver"
    assert [step for step, folder in storage.step_folders(killed) if storage.is_complete(folder / "actor")] == [1, 2]
    assert camshaft(*run_args(home, killed)).status == 0
    assert len(lines(killed)) == 4
    assert lines(killed) == lines(uninterrupted)
    for role in ("actor", "critic"):
        for part in ("model", "optimizer"):
            actual, expected = (saved_weights(run / "global_step_4" / role, part) for run in (killed, uninterrupted))
            assert actual.keys() == expected.keys()
            assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
