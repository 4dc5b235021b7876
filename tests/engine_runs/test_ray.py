"""PPO and GRPO with Megatron and torchtitan on two Ray ranks equal local runs and runs of the reference engine.

Run by `make test-megatron` and `make test-titan`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cluster import ray_here
from support.ppo_runs import Step, run_ppo
from support.same_run import ACTOR, compare

from camshaft.controller import local

pytestmark = pytest.mark.timeout(600)

local.PRELOAD.append("camshaft.engine.torchtitan.weights")  # skipped in environments without torchtitan

STEPS = 10
SETTINGS: dict[str, Any] = {
    "actor_rollout_ref.rollout.n": 2,
    # In float32, Adam's division by small gradients would amplify rounding.
    f"+{ACTOR}.optim.override_optimizer_config.eps": 1e-2,
    "+critic.optim.override_optimizer_config.eps": 1e-2,
}
PPO = {**SETTINGS, "algorithm.use_kl_in_reward": True}
GRPO = {**SETTINGS, "algorithm.adv_estimator": "grpo", f"{ACTOR}.use_kl_loss": True}
RANKS = {"trainer.n_gpus_per_node": 2}
MEGATRON = {
    f"{ACTOR}.strategy": "megatron",
    "critic.strategy": "megatron",
    f"+{ACTOR}.engine_kwargs.tensor_model_parallel_size": 2,
    "+critic.engine_kwargs.pipeline_model_parallel_size": 2,
}
TITAN = {f"{ACTOR}.strategy": "torchtitan", "critic.strategy": "torchtitan"}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ray_here(num_cpus=4):
        yield


def untimed(step: Step) -> dict[str, float]:
    return {name: value for name, value in step.metrics.items() if not name.startswith(("timing_s/", "perf/"))}


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(MEGATRON, id="megatron", marks=pytest.mark.megatron),
        pytest.param(TITAN, id="torchtitan", marks=pytest.mark.titan),
    ],
)
@pytest.mark.parametrize("algorithm", [PPO, GRPO], ids=["ppo", "grpo"])
def test_ten_steps_on_ray_equal_local_ranks_bitwise_and_the_reference_engine(
    algorithm: dict[str, Any], engine: dict[str, Any], tmp_path: Path
) -> None:
    reference = run_ppo(tmp_path, algorithm, steps=STEPS)
    local_run, ray_run = (
        run_ppo(tmp_path, {**algorithm, **RANKS, **engine, "trainer.controller": name}, steps=STEPS)
        for name in ("local", "ray")
    )
    compare(ray_run, reference, rel=1e-5)
    for actual, expected in zip(ray_run, local_run, strict=True):
        assert untimed(actual) == untimed(expected)
        for weights, expected_weights in ((actual.actor, expected.actor), (actual.critic, expected.critic)):
            assert weights.keys() == expected_weights.keys()
            assert all(torch.equal(weights[name], weight) for name, weight in expected_weights.items())
