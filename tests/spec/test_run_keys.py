"""Keys of the algorithm, on runs of one or two steps: with the key the run is another one.

What it should be instead is compared with a plain program in `tests/parity`, where that has a counterpart.
"""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.ppo_runs import Step, ppo_config, run_ppo

from camshaft.config import PPOConfig
from camshaft.rewards.manager import RewardManager
from camshaft.trainer.parts import PPOParts
from camshaft.trainer.validate import validate
from spec.told import ACTOR, ROLLOUT

Steps = list[Step]
GROUPS = {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 2, "data.train_batch_size": 4}
KL_LOSS = {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.5}
IN_REWARD = {"algorithm.use_kl_in_reward": True}
ADAPTIVE = {**IN_REWARD, "algorithm.kl_ctrl.type": "adaptive"}


def actor(steps: Steps) -> Any:
    return {name: weight.tolist() for name, weight in steps[-1].actor.items()}


def critic(steps: Steps) -> Any:
    return {name: weight.tolist() for name, weight in steps[-1].critic.items()}


def metric(name: str) -> Callable[[Steps], Any]:
    return lambda steps: steps[-1].metrics.get(name)


def responses(steps: Steps) -> Any:
    return [row.tolist() for row in steps[0].batch["responses"].rows()]


CHANGES: dict[str, tuple[Any, Mapping[str, Any], int, Callable[[Steps], Any]]] = {
    # key: typed, beside what, after how many steps, where to look
    "data.max_response_length": (4, {}, 1, metric("response_length/max")),
    f"{ACTOR}.ppo_mini_batch_size": (8, {}, 1, actor),
    f"{ACTOR}.ppo_epochs": (2, {}, 1, actor),
    f"{ACTOR}.shuffle": (False, {}, 1, actor),
    f"{ACTOR}.clip_ratio": (0.001, {}, 1, metric("actor/pg_clipfrac")),
    f"{ACTOR}.loss_agg_mode": ("seq-mean-token-sum", {}, 1, actor),
    f"{ACTOR}.use_kl_loss": (True, {}, 1, metric("actor/kl_loss")),
    f"{ACTOR}.kl_loss_coef": (2.0, KL_LOSS, 1, actor),
    f"{ACTOR}.kl_loss_type": ("abs", KL_LOSS, 1, metric("actor/kl_loss")),
    "critic.ppo_mini_batch_size": (8, {}, 1, critic),
    "critic.ppo_epochs": (2, {}, 1, critic),
    "critic.shuffle": (False, {}, 1, critic),
    "critic.loss_agg_mode": ("seq-mean-token-sum", {}, 1, critic),
    "algorithm.norm_adv_by_std_in_grpo": (False, GROUPS, 1, metric("critic/advantages/max")),
    "algorithm.kl_penalty": ("mse", IN_REWARD, 2, metric("actor/reward_kl_penalty")),
    "algorithm.kl_ctrl.type": ("adaptive", IN_REWARD | {"algorithm.kl_ctrl.horizon": 20}, 2,
                               metric("actor/reward_kl_penalty_coeff")),
    "algorithm.kl_ctrl.horizon": (20, ADAPTIVE, 2, metric("actor/reward_kl_penalty_coeff")),
    "algorithm.kl_ctrl.target_kl": (1e-9, {**ADAPTIVE, "algorithm.kl_ctrl.horizon": 20}, 3,
                                    metric("actor/reward_kl_penalty_coeff")),
    "trainer.test_freq": (1, {}, 2, lambda steps: ["val/reward/mean" in step.metrics for step in steps]),
    "trainer.val_before_train": (True, {}, 1, len),
    "trainer.seed": (2, {"data.shuffle": False}, 1, responses),
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Mapping[str, Any], int], Steps]:
    home = tmp_path_factory.mktemp("home")

    @cache
    def known(overrides: tuple[tuple[str, Any], ...], steps: int) -> Steps:
        return run_ppo(home, {"data.max_response_length": 6, **dict(overrides)}, steps)

    return lambda overrides, steps: known(tuple(overrides.items()), steps)


@pytest.mark.parametrize("key", CHANGES)
def test_the_key_changes_the_run(key: str, run: Callable[[Mapping[str, Any], int], Steps]) -> None:
    typed, beside, steps, look = CHANGES[key]
    assert look(run({**beside, key: typed}, steps)) != look(run(beside, steps))


def test_validation_takes_as_many_rows_at_a_time_as_the_key_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    real = RewardManager.score

    def score(rewards: RewardManager, batch: Any, decode: Any) -> Any:
        taken.append(len(batch))
        return real(rewards, batch, decode)

    monkeypatch.setattr(RewardManager, "score", score)
    config: PPOConfig = ppo_config(tmp_path, {"data.val_batch_size": 6, "custom_reward_function.on_error": "zero"})
    with PPOParts(config) as parts:
        parts.actor.init_model()
        validate(parts, config)
    assert taken == [6, 6, 4]


def test_what_validation_writes_out_is_as_much_as_the_key_says(tmp_path: Path) -> None:
    counts = []
    for typed in ({}, {"trainer.log_val_generations": 3}):
        config = ppo_config(tmp_path, typed)
        with PPOParts(config) as parts:
            parts.actor.init_model()
            counts.append(len(validate(parts, config)[1]))
    assert counts == [0, 3]
