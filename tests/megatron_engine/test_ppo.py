"""PPO and GRPO runs with Megatron engines have the metrics and weights of runs on one device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.moe import MODELS
from support.ppo_runs import run_ppo
from support.reward_models import scored
from support.same_run import ACTOR, SHUFFLED, compare
from support.tiny import tiny_folder

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(900)]

TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"


def megatron(actor: dict[str, Any], critic: dict[str, Any], **reward_model: Any) -> dict[str, Any]:
    """Return the overrides of a run with Megatron engines on two ranks, from the options of each role's engine."""
    return {
        f"{ACTOR}.strategy": "megatron",
        "critic.strategy": "megatron",
        "trainer.n_gpus_per_node": 2,
        **{f"+{ACTOR}.engine_kwargs.{name}": value for name, value in actor.items()},
        **{f"+critic.engine_kwargs.{name}": value for name, value in critic.items()},
        **{f"+reward_model.engine_kwargs.{name}": value for name, value in reward_model.items()},
    }


def test_ppo_with_four_roles_on_two_ranks_equals_one_device(tmp_path: Path) -> None:
    """The actor and the reference are tensor-parallel; the critic and the reward model have two pipeline stages."""
    ppo = SHUFFLED | scored(tmp_path / "rm")
    expected = run_ppo(tmp_path, ppo, steps=10)
    ranks = megatron({TENSOR: 2}, {PIPELINE: 2}, **{PIPELINE: 2})
    compare(run_ppo(tmp_path, ppo | ranks, steps=10), expected, rel=1e-6)


@pytest.mark.slow
def test_grpo_with_pipeline_parallel_actor_equals_one_device(tmp_path: Path) -> None:
    grpo = {**SHUFFLED, "algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4}
    grpo |= {"algorithm.use_kl_in_reward": False, f"{ACTOR}.use_kl_loss": True}
    expected = run_ppo(tmp_path, grpo, steps=10)
    compare(run_ppo(tmp_path, grpo | megatron({PIPELINE: 2}, {}), steps=10), expected, rel=1e-6)


@pytest.mark.slow
def test_bfloat16_actor_differs_from_a_float32_rollout_by_rounding(tmp_path: Path) -> None:
    bfloat16 = {f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": "bfloat16"}
    steps = run_ppo(tmp_path, megatron({"use_distributed_optimizer": True}, {PIPELINE: 2}) | bfloat16, steps=2)
    for step in steps:
        assert 0 < step.metrics["rollout/log_prob_diff_max"] < 0.1
    assert all(weight.dtype == torch.float32 for weight in steps[-1].actor.values())
    assert any(not torch.equal(weight, steps[0].actor[name]) for name, weight in steps[-1].actor.items())


@pytest.mark.slow
def test_replay_with_router_loss_in_a_pipeline_equals_one_device(tmp_path: Path) -> None:
    experts = str(tiny_folder(**MODELS["qwen3_moe"], hidden=32))
    grpo = {
        "actor_rollout_ref.model.path": experts,
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 2,
    }
    grpo |= {f"{ACTOR}.router_replay.mode": "R3", "actor_rollout_ref.model.router_aux_loss_coef": 0.1}
    expected, steps = (run_ppo(tmp_path, grpo | ranks, steps=2) for ranks in ({}, megatron({PIPELINE: 2}, {})))
    for step, one in zip(steps, expected, strict=True):
        for name in ("actor/grad_norm", "actor/moe/aux_loss", "actor/moe/router_entropy", "actor/entropy"):
            assert step.metrics[name] == pytest.approx(one.metrics[name], rel=1e-4), name
        assert step.metrics["rollout/routing_mismatch"] == 0
