"""Compare runs in different layouts by the numbers that must not depend on the layout.

alone, ranks = run_ppo(tmp_path, SHUFFLED), run_ppo(tmp_path, {**SHUFFLED, **RANKS})
compare(ranks, alone, rel=1e-6)
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from support.ppo_runs import Step

ACTOR = "actor_rollout_ref.actor"
RANKS: dict[str, Any] = {
    f"{ACTOR}.strategy": "fsdp",
    "critic.strategy": "${actor_rollout_ref.actor.strategy}",
    "trainer.n_gpus_per_node": 2,
}
SHUFFLED: dict[str, Any] = {
    "algorithm.use_kl_in_reward": True,
    "actor_rollout_ref.rollout.n": 2,
    f"{ACTOR}.ppo_epochs": 2,
    f"{ACTOR}.entropy_coeff": 0.01,
    # Errors exceed rounding, and Adam's division by small gradients does not amplify rounding.
    f"{ACTOR}.fsdp_config.model_dtype": "float64",
    f"{ACTOR}.fsdp_config.mixed_precision.reduce_dtype": "null",
    "actor_rollout_ref.rollout.dtype": "float64",
    "critic.model.fsdp_config.model_dtype": "float64",
    "critic.model.fsdp_config.mixed_precision.reduce_dtype": "null",
}
"""Two mini-batches per epoch, in a different order in each epoch."""

MEASURED = ("timing_s/", "perf/", "rollout/")
"""Metrics that depend on the machine, or (mismatch with the rollout) consist of rounding errors."""

OF_RANKS = ("perf/rank_seconds/", "perf/slowest_rank/")
"""Metrics of pools of several ranks."""


def names(metrics: Mapping[str, float]) -> set[str]:
    """Return the names of the metrics that runs in all layouts log."""
    return {name for name in metrics if not name.startswith(OF_RANKS)}


def compare(actual: list[Step], expected: list[Step], rel: float) -> None:
    """Compare tokens, metrics and weights step by step."""
    for number, (step, reference) in enumerate(zip(actual, expected, strict=True), start=1):
        assert step.batch["responses"].values.tolist() == reference.batch["responses"].values.tolist(), f"step {number}"
        assert names(step.metrics) == names(reference.metrics)
        for name, value in reference.metrics.items():
            if not name.startswith(MEASURED):
                assert step.metrics[name] == pytest.approx(value, rel=rel, abs=rel / 10), f"step {number}: {name}"
        assert step.metrics["rollout/response_tokens"] == reference.metrics["rollout/response_tokens"]
        assert step.metrics["rollout/log_prob_diff_max"] < 1e-4
        close(step.actor, reference.actor, 10 * rel)
        close(step.critic, reference.critic, 10 * rel)


def close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], rel: float) -> None:
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight, rtol=rel, atol=rel / 10, msg=name)
