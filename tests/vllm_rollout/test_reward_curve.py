"""Training learns with vLLM as it does with the built-in generator, to within the noise of sampling.

Two seeds say whether something is badly wrong; `benchmarks/reward_curves.py` runs many and does the statistics.
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
"""Reward of the last two steps. A model that has learnt nothing has 0.05."""

BAND = 0.25
"""Between the mean rewards over the whole curve, of two seeds: their difference has a standard error of 0.05."""


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


def test_vllm_and_torch_reach_the_same_reward_curve(tmp_path: Path) -> None:
    curves = {name: [curve(tmp_path, name, seed) for seed in SEEDS] for name in ("torch", "vllm")}
    for name, found in curves.items():
        assert fmean(value for one in found for value in one[:2]) < 0.3, (name, found)
        assert fmean(value for one in found for value in one[-2:]) > LEARNT, (name, found)
    areas = {name: fmean(value for one in found for value in one) for name, found in curves.items()}
    assert abs(areas["vllm"] - areas["torch"]) < BAND, areas
