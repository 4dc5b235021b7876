"""Whole runs on a GPU in bfloat16, with decode steps in CUDA graphs, learn; skipped without a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ppo_runs import run_ppo

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a CUDA device")]

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CASES: dict[str, dict[str, Any]] = {
    "gae": {"critic.use_torch_compile": False, "critic.ppo_micro_batch_size_per_gpu": 32},
    "grpo": {f"{ROLLOUT}.n": 4},
}
LARGER = {
    "data.train_batch_size": 64,
    f"{ACTOR}.ppo_mini_batch_size": 32,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 32,
    f"{ACTOR}.use_torch_compile": False,  # compilation would take longer than the run
}


def mean_score(steps: list[Any]) -> float:
    return sum(step.metrics["critic/score/mean"] for step in steps) / len(steps)


def learned(folder: Path, estimator: str, device: dict[str, Any]) -> float:
    """Return by how much the mean score of a run has risen."""
    steps = run_ppo(folder, {**LARGER, **CASES[estimator], "algorithm.adv_estimator": estimator, **device}, 30)
    return mean_score(steps[-5:]) - mean_score(steps[:3])


@pytest.mark.parametrize("estimator", CASES)
@pytest.mark.parametrize("strategy", ["fsdp", "reference"])
def test_a_run_in_bfloat16_learns(estimator: str, strategy: str, tmp_path: Path) -> None:
    device = {
        "trainer.device": "cuda",
        f"{ACTOR}.strategy": strategy,
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": "bfloat16",
        f"{ROLLOUT}.dtype": "bfloat16",
        f"{ROLLOUT}.enforce_eager": False,
    }
    assert learned(tmp_path, estimator, device) > 0.1
