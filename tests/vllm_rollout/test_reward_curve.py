"""Training with vLLM and with the built-in generator reaches equal rewards, up to sampling noise.

Two seeds detect a gross error; `benchmarks/reward_curves.py` runs many seeds with statistics.
Run by `make test-vllm`.
"""

from pathlib import Path
from statistics import fmean

import pytest
from support.ppo_runs import run_ppo
from support.vllm_runs import FOR_VLLM, with_wide_heads

pytestmark = pytest.mark.vllm

STEPS = 10
SEEDS = (0, 1)

LEARNT = 0.6
"""Minimum reward of the last two steps; an untrained model has 0.05."""

BAND = 0.25
"""Maximum difference of mean rewards over the curve; with two seeds its standard error is 0.05."""


def curve(folder: Path, rollout: str, seed: int) -> list[float]:
    with_wide_heads(folder, seed)
    how = {
        **FOR_VLLM,
        "actor_rollout_ref.rollout.name": rollout,
        "data.train_batch_size": 16,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 16,
        "data.seed": seed,
        "trainer.seed": seed,
        "trainer.default_local_dir": folder / f"{rollout}-{seed}",
    }
    return [step.metrics["critic/score/mean"] for step in run_ppo(folder, how, STEPS)]


@pytest.mark.slow
def test_vllm_and_torch_reach_the_same_reward_curve(tmp_path: Path) -> None:
    curves = {name: [curve(tmp_path, name, seed) for seed in SEEDS] for name in ("torch", "vllm")}
    for name, rewards in curves.items():
        assert fmean(value for one in rewards for value in one[:2]) < 0.3, (name, rewards)
        assert fmean(value for one in rewards for value in one[-2:]) > LEARNT, (name, rewards)
    areas = {name: fmean(value for one in rewards for value in one) for name, rewards in curves.items()}
    assert abs(areas["vllm"] - areas["torch"]) < BAND, areas
