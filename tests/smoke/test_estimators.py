"""Advantage estimators train from the command line, with equal metrics in one process and on two ranks."""

from pathlib import Path
from typing import Any

import pytest
from support.command_line import camshaft
from support.ppo_runs import ppo_args
from support.same_run import MEASURED, RANKS, SHUFFLED

from camshaft.tracking.jsonl import read_metrics

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("fork_server")]

REWARD = """
def compute_score(solution_str):
    even = sum(character in "02468" for character in solution_str)
    return {"score": even / 8, "even": float(even > 1), "short": float(len(solution_str) < 6)}
"""
SETTINGS: dict[str, Any] = {
    **SHUFFLED,
    "algorithm.use_kl_in_reward": False,
    "actor_rollout_ref.rollout.n": 4,
    "trainer.total_training_steps": 3,
    "trainer.logger": "[jsonl]",
}
ESTIMATORS: dict[str, dict[str, Any]] = {
    "grpo_passk": {},
    "gdpo": {"algorithm.gdpo_reward_keys": "[even,short]", "algorithm.gdpo_reward_weights": "[1,0.5]"},
    "gpg": {},
    "maxrl": {},
    "optimal_token_baseline": {"algorithm.rollout_correction.rollout_is": "token"},
    "tir_optimal_token_baseline": {},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("gdpo", "optimal_token_baseline")))
        for name in ESTIMATORS
    ],
)
def test_metrics_do_not_depend_on_the_number_of_ranks(name: str, tmp_path: Path) -> None:
    reward = tmp_path / "parts.py"
    reward.write_text(REWARD)
    settings = {**SETTINGS, "algorithm.adv_estimator": name, "custom_reward_function.path": reward, **ESTIMATORS[name]}
    runs: list[list[dict[str, float]]] = []
    for layout in ({}, RANKS):
        folder = tmp_path / f"run{len(runs)}"
        run = camshaft("ppo", *ppo_args(tmp_path, {**settings, **layout, "trainer.default_local_dir": folder}))
        assert run.status == 0, run.err
        runs.append(list(read_metrics(folder / "metrics.jsonl")))
    assert len(runs[0]) == len(runs[1]) == 3
    for step, reference in zip(*runs, strict=True):
        assert step["actor/signal_share"] > 0
        for key, value in reference.items():
            if not key.startswith((*MEASURED, "rollout_corr/", "timing/")):  # rounding errors, times
                assert step[key] == pytest.approx(value, rel=1e-6, abs=1e-7), key
