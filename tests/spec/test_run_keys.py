"""Keys of the algorithm and the training loop change the results of a run with one step.

`tests/parity` compares further keys with a reference program.
"""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.ppo_runs import Step, ppo_config, run_ppo

from camshaft.config import PPOConfig
from camshaft.rewards.manager import RewardManager
from camshaft.trainer.build import PPOParts
from camshaft.trainer.idle import IdleCheck
from camshaft.trainer.ppo import PPOTrainer
from camshaft.trainer.validate import validate
from spec.fields import ACTOR, ROLLOUT

Steps = list[Step]
GROUPS = {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 2, "data.train_batch_size": 4}
KL_LOSS = {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.5}
LOSS = f"{ACTOR}.policy_loss.loss_mode"
CLIP_COV = {
    LOSS: "clip_cov",
    f"{ACTOR}.policy_loss.clip_cov_lb": -100.0,
    f"{ACTOR}.policy_loss.clip_cov_ub": 100.0,
    f"{ACTOR}.policy_loss.clip_cov_ratio": 0.3,
}
VALIDATED = {"trainer.val_before_train": True}


def actor(steps: Steps) -> Any:
    return {name: weight.tolist() for name, weight in steps[-1].actor.items()}


def critic(steps: Steps) -> Any:
    return {name: weight.tolist() for name, weight in steps[-1].critic.items()}


def metric(name: str) -> Callable[[Steps], Any]:
    return lambda steps: steps[-1].metrics.get(name)


def responses(steps: Steps) -> Any:
    return [row.tolist() for row in steps[0].batch["responses"].rows()]


FILTERED = {**GROUPS, "algorithm.filter_groups.enable": True}
CHANGES: dict[str, tuple[Any, Mapping[str, Any], Callable[[Steps], Any]]] = {
    # key: value, other keys, observation after one step
    f"{ACTOR}.shuffle": (False, {}, actor),
    f"{ACTOR}.clip_ratio": (0.001, {}, metric("actor/pg_clipfrac")),
    f"{ACTOR}.kl_loss_type": ("abs", KL_LOSS, metric("actor/kl_loss")),
    f"{ACTOR}.policy_loss.tau_pos": (5.0, {LOSS: "sapo"}, actor),
    f"{ACTOR}.policy_loss.tau_neg": (5.0, {LOSS: "sapo"}, actor),
    f"{ACTOR}.policy_loss.dro_beta": (1.0, {LOSS: "dro", f"{ACTOR}.policy_loss.dro_beta": 0.1}, actor),
    f"{ACTOR}.policy_loss.clip_cov_ratio": (0.9, CLIP_COV, actor),
    f"{ACTOR}.policy_loss.clip_cov_lb": (0.0, CLIP_COV, actor),
    f"{ACTOR}.policy_loss.clip_cov_ub": (0.0, CLIP_COV, actor),
    f"{ACTOR}.policy_loss.kl_cov_ratio": (0.5, {LOSS: "kl_cov", f"{ACTOR}.policy_loss.ppo_kl_coef": 9.0}, actor),
    f"{ACTOR}.policy_loss.ppo_kl_coef": (9.0, {LOSS: "kl_cov", f"{ACTOR}.policy_loss.kl_cov_ratio": 0.5}, actor),
    f"{ACTOR}.policy_loss.top_entropy_quantile": (0.2, {}, actor),
    "critic.ppo_mini_batch_size": (8, {}, critic),
    "critic.ppo_epochs": (2, {}, critic),
    "critic.shuffle": (False, {}, critic),
    "critic.loss_agg_mode": ("seq-mean-token-sum", {}, critic),
    "algorithm.filter_groups.enable": (True, GROUPS, metric("train/num_gen_batches")),
    "algorithm.filter_groups.metric": ("score", FILTERED, metric("filter_groups/score/mean")),
    "trainer.test_freq": (1, {}, metric("val/reward/mean")),
    "trainer.val_before_train": (True, {}, len),
    "trainer.val_only": (True, VALIDATED, len),
    "trainer.seed": (2, {"data.shuffle": False}, responses),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Mapping[str, Any]], Steps]:
    home = tmp_path_factory.mktemp("home")

    @cache
    def cached(overrides: tuple[tuple[str, Any], ...]) -> Steps:
        return run_ppo(home, {"data.max_response_length": 6, **dict(overrides)}, steps=1)

    return lambda overrides: cached(tuple(overrides.items()))


@pytest.mark.parametrize("key", CHANGES)
def test_key_changes_the_run(key: str, run: Callable[[Mapping[str, Any]], Steps]) -> None:
    value, others, observe = CHANGES[key]
    assert observe(run({**others, key: value})) != observe(run(others))


def test_val_batch_size_is_the_size_of_validation_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = RewardManager.score

    def score(rewards: RewardManager, batch: Any, *more: Any) -> Any:
        sizes.append(len(batch))
        return real(rewards, batch, *more)

    monkeypatch.setattr(RewardManager, "score", score)
    config: PPOConfig = ppo_config(tmp_path, {"data.val_batch_size": 6, "custom_reward_function.on_error": "zero"})
    with PPOParts(config) as parts:
        parts.actor.init_model()
        validate(parts, config, 0)
    assert sizes == [6, 6, 4]


@pytest.mark.parametrize(
    ("overrides", "saved"),
    [
        ({}, []),
        ({"trainer.best_metric": "val/x"}, [1, 3]),
        ({"trainer.best_metric": "val/x", "trainer.best_metric_mode": "min"}, [1, 2]),
    ],
)
def test_best_step_by_the_metric_is_saved(
    overrides: dict[str, Any], saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run three empty steps with the validation metrics 0.5, 0.25 and 0.75."""
    saved_steps: list[int] = []
    values = iter((0.5, 0.25, 0.75))
    monkeypatch.setattr(PPOTrainer, "collect", lambda trainer, prompts, metrics: None)
    monkeypatch.setattr(PPOTrainer, "step", lambda trainer, responses, metrics: {})
    monkeypatch.setattr(IdleCheck, "check", lambda check, step, batch, metrics: {})
    monkeypatch.setattr(PPOTrainer, "validate", lambda trainer, tracking: {"val/x": next(values)})
    monkeypatch.setattr(PPOTrainer, "save", lambda trainer, prune: saved_steps.append(trainer.global_step))
    run_ppo(tmp_path, {"trainer.test_freq": 1, "trainer.samples.enable": False, **overrides}, steps=3)
    assert saved_steps == saved
