"""PPO runs agree with `plain_ppo.py` at every step: the same tokens, metrics and weights.

Each case is a `Settings` of the reference program; `KEYS` maps its fields to config keys. Config keys that exist only
in the real run (micro-batches, token budgets, cache slots) must not change the result.
"""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.even_digits import compute_score
from support.ppo_runs import Step, run_ppo
from torch import Tensor

from examples import plain_ppo
from examples.plain_ppo import Settings

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

KEYS = {
    "dtype": (f"{ACTOR}.fsdp_config.model_dtype", f"{ROLLOUT}.dtype", "critic.model.fsdp_config.model_dtype"),
    "seed": ("trainer.seed",),
    "batch_size": ("data.train_batch_size",),
    "mini_batch_size": (f"{ACTOR}.ppo_mini_batch_size",),
    "epochs": (f"{ACTOR}.ppo_epochs",),
    "n": (f"{ROLLOUT}.n",),
    "response_length": ("data.max_response_length",),
    "temperature": (f"{ROLLOUT}.temperature",),
    "top_k": (f"{ROLLOUT}.top_k",),
    "top_p": (f"{ROLLOUT}.top_p",),
    "estimator": ("algorithm.adv_estimator",),
    "gamma": ("algorithm.gamma",),
    "lam": ("algorithm.lam",),
    "kl_in_reward": ("algorithm.use_kl_in_reward",),
    "kl_penalty": ("algorithm.kl_penalty",),
    "kl_control": ("algorithm.kl_ctrl.type",),
    "kl_coef": ("algorithm.kl_ctrl.kl_coef",),
    "kl_target": ("algorithm.kl_ctrl.target_kl",),
    "kl_horizon": ("algorithm.kl_ctrl.horizon",),
    "kl_loss": (f"{ACTOR}.use_kl_loss",),
    "kl_loss_type": (f"{ACTOR}.kl_loss_type",),
    "kl_loss_coef": (f"{ACTOR}.kl_loss_coef",),
    "clip_low": (f"{ACTOR}.clip_ratio_low",),
    "clip_high": (f"{ACTOR}.clip_ratio_high",),
    "clip_dual": (f"{ACTOR}.clip_ratio_c",),
    "clip_value": ("critic.cliprange_value",),
    "entropy_coeff": (f"{ACTOR}.entropy_coeff",),
    "aggregation": (f"{ACTOR}.loss_agg_mode",),
    "loss": (f"{ACTOR}.policy_loss.loss_mode",),
    "norm_by_std": ("algorithm.norm_adv_by_std_in_grpo",),
    "actor_lr": (f"{ACTOR}.optim.lr",),
    "actor_lr_warmup": (f"{ACTOR}.optim.lr_warmup_steps",),
    "critic_lr": ("critic.optim.lr",),
    "critic_lr_warmup": ("critic.optim.lr_warmup_steps",),
    "critic_warmup": ("trainer.critic_warmup",),
    "weight_decay": (f"{ACTOR}.optim.weight_decay", "critic.optim.weight_decay"),
    "grad_clip": (f"{ACTOR}.grad_clip", "critic.grad_clip"),
}
"""Config key of each setting of the reference program."""

UNEVEN = {
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 3,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 5,
    f"{ROLLOUT}.max_num_seqs": 3,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 2,
    "critic.ppo_micro_batch_size_per_gpu": 1,
    "critic.forward_micro_batch_size_per_gpu": 3,
}
"""Micro-batches that do not divide a mini-batch of four, and fewer cache slots than rows."""

PPO = Settings(
    actor="actor",
    critic="critic",
    data="data/train.parquet",
    temperature=0.8,
    gamma=0.95,
    lam=0.9,
    kl_in_reward=True,
    kl_coef=0.1,
    clip_low=0.05,
    clip_high=0.1,
    clip_dual=1.1,
    clip_value=0.05,
    entropy_coeff=0.01,
    actor_lr=1e-3,
    actor_lr_warmup=3,
    critic_lr=1e-3,
    critic_lr_warmup=2,
)
"""Clip ranges that are narrow enough to take effect."""


def compare(folder: Path, settings: Settings, extra: dict[str, Any], tolerance: float = 1e-5) -> list[Step]:
    """Run both programs, compare everything that they report, and return the steps of the real run."""
    named = {key: vars(settings)[name] for name, keys in KEYS.items() for key in keys}
    steps = run_ppo(folder, {**named, **extra}, settings.steps)
    critic = None if settings.critic is None else f"{folder}/{settings.critic}"
    local_settings = replace(
        settings, actor=f"{folder}/{settings.actor}", critic=critic, data=f"{folder}/{settings.data}"
    )
    for number, (real, reference) in enumerate(
        zip(steps, plain_ppo.train(local_settings, compute_score), strict=True), start=1
    ):
        assert ids(real, "prompts") == reference.prompts, f"step {number}"
        assert ids(real, "responses") == reference.responses, f"step {number}"
        pairs: dict[str, tuple[Any, Any]] = {
            name: (real.metrics[name], value) for name, value in reference.metrics.items()
        }
        pairs["rollout_log_probs"] = (
            real.batch["rollout_log_probs"].values,
            list(chain.from_iterable(reference.rollout_log_probs)),
        )
        pairs |= paired("actor", real.actor, reference.actor) | paired("critic", real.critic, reference.critic)
        wrong = {name: difference for name, pair in pairs.items() if (difference := distance(*pair)) > tolerance}
        wrong = {
            name: difference for name, difference in wrong.items() if not in_rounding(name, *pairs[name], tolerance)
        }
        assert not wrong, f"step {number}: {wrong}"
    return steps


def ids(step: Step, column: str) -> list[list[int]]:
    return [row.tolist() for row in step.batch[column].rows()]


def paired(role: str, real: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    assert real.keys() == reference.keys()
    return {f"{role}: {name}": (real[name], reference[name]) for name in real}


def distance(real: Any, reference: Any) -> float:
    """Return the largest difference, relative above 1 and absolute below; NaN counts as infinite."""
    real, reference = torch.as_tensor(real).double(), torch.as_tensor(reference).double()
    return float(((real - reference).abs() / reference.abs().clamp(min=1)).nan_to_num(torch.inf).max())


def in_rounding(name: str, real: Any, reference: Any, tolerance: float) -> bool:
    """Return True if at most two weights in a thousand differ, by less than a thirtieth of a step of 1e-3.

    Adam divides a gradient by its magnitude, so rounding moves an element whose gradient is almost zero.
    """
    if ": " not in name or real.dtype != torch.float32:
        return False
    off = (real - reference).abs().flatten()
    return float(off.max()) < 3e-5 and int((off > tolerance).sum()) <= max(1, len(off) // 500)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [pytest.param("float32", 1e-5, marks=pytest.mark.slow), ("float64", 1e-6)]
)
def test_ten_steps_of_ppo_match_the_reference_program(tmp_path: Path, dtype: str, tolerance: float) -> None:
    steps = compare(tmp_path, replace(PPO, dtype=dtype), UNEVEN, tolerance)
    for name in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "critic/vf_clipfrac"):
        assert max(step.metrics[name] for step in steps) > 0, f"{name}: the case says nothing about this clip"
    assert {len(row) for step in steps for row in ids(step, "prompts")} > {9}
    assert len({len(row) for step in steps for row in ids(step, "responses")}) > 2


GROUPS = replace(
    PPO,
    critic=None,
    estimator="grpo",
    steps=2,
    batch_size=4,
    mini_batch_size=2,
    n=4,
    kl_in_reward=False,
    actor_lr_warmup=0,
)


def test_grpo_with_a_kl_loss_matches_the_reference_program(tmp_path: Path) -> None:
    grpo = replace(
        GROUPS,
        steps=3,
        kl_loss=True,
        kl_loss_coef=0.1,
        aggregation="seq-mean-token-mean",
        response_length=24,
        top_k=40,
        top_p=0.9,
    )
    steps = compare(tmp_path, grpo, UNEVEN)
    assert steps[-1].metrics["actor/kl_loss"] > 0
    # For responses of one length, the mean over tokens equals the mean over responses of their means.
    assert len({len(row) for row in ids(steps[0], "responses")}) > 2
    assert "timing_s/ref" in steps[-1].metrics


def test_grpo_with_exact_kl_loss_matches_the_reference_program(tmp_path: Path) -> None:
    exact = replace(GROUPS, kl_loss=True, kl_loss_type="full", kl_loss_coef=2.0, aggregation="seq-mean-token-mean")
    steps = compare(tmp_path, exact, UNEVEN)
    assert steps[-1].metrics["actor/kl_loss"] > 1e-3
    # This loss needs no reference log-probs of the sampled tokens, so they are not computed.
    assert "timing_s/ref" not in steps[-1].metrics


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_by_std": False, "aggregation": "seq-mean-token-sum-norm"},
        {"loss": "gspo", "aggregation": "seq-mean-token-mean", "clip_low": 0.003, "clip_high": 0.004},
        {"loss": "cispo", "clip_low": 10.0},
    ],
    ids=["dr_grpo", "gspo", "cispo"],
)
def test_grpo_variants_match_the_reference_program(tmp_path: Path, changes: dict[str, Any]) -> None:
    steps = compare(tmp_path, replace(GROUPS, **changes), UNEVEN)
    assert steps[-1].metrics["actor/pg_clipfrac"] > 0, "no ratio was clipped"


def test_adaptive_kl_controller_matches_the_reference_program(tmp_path: Path) -> None:
    adaptive = replace(
        PPO,
        steps=3,
        kl_penalty="low_var_kl",
        kl_control="adaptive",
        kl_target=0.01,
        kl_horizon=20,
        aggregation="seq-mean-token-sum",
        actor_lr_warmup=0,
    )
    steps = compare(tmp_path, adaptive, UNEVEN)
    weights = [step.metrics["actor/reward_kl_penalty_coeff"] for step in steps]
    # At first the policy equals the reference (KL = 0): the error is clipped to -0.2; 8 rows of a horizon of 20 count.
    assert weights[:2] == pytest.approx([0.1, 0.1 * (1 - 0.2 * 8 / 20)])
    assert weights[2] != weights[1]


@pytest.mark.slow
def test_micro_batches_by_tokens_match_the_reference_program(tmp_path: Path) -> None:
    budget = {
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": 40,
        "critic.ppo_max_token_len_per_gpu": 50,
    }
    compare(tmp_path, replace(PPO, steps=3, actor_lr_warmup=0, kl_penalty="mse"), budget)


@pytest.mark.slow
def test_actor_is_untouched_while_the_critic_warms_up(tmp_path: Path) -> None:
    steps = compare(tmp_path, replace(PPO, steps=5, critic_warmup=2, actor_lr_warmup=2, kl_penalty="abs"), UNEVEN)
    initial = load_file(tmp_path / "actor/model.safetensors")
    for name, weight in initial.items():
        assert torch.equal(steps[1].actor[name], weight), name
    assert any(not torch.equal(steps[2].actor[name], weight) for name, weight in initial.items())
    assert ["actor/pg_loss" in step.metrics for step in steps] == [False, False, True, True, True]
