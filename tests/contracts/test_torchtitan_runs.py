"""PPO and GRPO runs with torchtitan engines have the metrics and weights of runs on one device; `make test-titan`."""

from pathlib import Path
from typing import Any

import pytest
from support.ppo_runs import run_ppo
from support.same_run import ACTOR, compare

from camshaft.controller import local

pytestmark = [pytest.mark.titan, pytest.mark.timeout(900)]

local.PRELOAD.append("camshaft.engine.torchtitan.weights")

STEPS = 10
TITAN: dict[str, Any] = {f"{ACTOR}.strategy": "torchtitan", "critic.strategy": "torchtitan"}
RUN: dict[str, Any] = {
    "actor_rollout_ref.rollout.n": 2,
    f"{ACTOR}.ppo_epochs": 2,
    f"{ACTOR}.entropy_coeff": 0.01,
    # In float32, Adam's division by small gradients would amplify rounding.
    f"+{ACTOR}.optim.override_optimizer_config.eps": 1e-2,
    "+critic.optim.override_optimizer_config.eps": 1e-2,
}
PPO = {**RUN, "algorithm.use_kl_in_reward": True}
GRPO = {**RUN, "algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4, f"{ACTOR}.use_kl_loss": True}


def test_ppo_in_one_process_equals_the_reference_engine(tmp_path: Path) -> None:
    expected = run_ppo(tmp_path, PPO, steps=STEPS)
    compare(run_ppo(tmp_path, PPO | TITAN, steps=STEPS), expected, rel=1e-5)


@pytest.mark.parametrize("tensor", [1, 2])
def test_grpo_on_two_ranks_equals_the_reference_engine(tensor: int, tmp_path: Path) -> None:
    layout = {f"{ACTOR}.fsdp_config.tensor_parallel_size": tensor, "trainer.n_gpus_per_node": 2}
    layout["actor_rollout_ref.ref.fsdp_config.tensor_parallel_size"] = tensor
    expected = run_ppo(tmp_path, GRPO, steps=STEPS)
    compare(run_ppo(tmp_path, GRPO | TITAN | layout, steps=STEPS), expected, rel=1e-5)
