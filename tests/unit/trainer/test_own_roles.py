"""Custom role classes, named in the config."""

from pathlib import Path

import pytest
from support.ppo_runs import ppo_config, run_ppo

from camshaft.errors import ConfigError
from camshaft.roles import ActorRolloutRefWorker, CriticWorker, RewardModelWorker
from camshaft.trainer.build import role_classes

POLICY, CRITIC = "actor_rollout_ref.worker_cls", "critic.worker_cls"
ONE_STEP = {"algorithm.adv_estimator": "gae", "actor_rollout_ref.actor.ppo_mini_batch_size": 8}


def test_a_step_runs_with_custom_roles(tmp_path: Path) -> None:
    classes = {POLICY: "support.own_roles:DoubledPolicy", CRITIC: "support.own_roles:CountingCritic"}
    first, second = run_ppo(tmp_path, {**ONE_STEP, **classes}, steps=2)
    (built_in,) = run_ppo(tmp_path, ONE_STEP, steps=1)
    assert first.metrics["actor/pg_loss"] == built_in.metrics["actor/pg_loss"]
    assert first.metrics["actor/doubled_loss"] == 2 * first.metrics["actor/pg_loss"]
    assert first.metrics["actor/grad_norm"] == pytest.approx(2 * built_in.metrics["actor/grad_norm"], rel=1e-5)
    assert [step.metrics["critic/updates"] for step in (first, second)] == [1.0, 2.0]


def test_the_built_in_classes_are_the_default(tmp_path: Path) -> None:
    assert role_classes(ppo_config(tmp_path)) == (ActorRolloutRefWorker, CriticWorker, RewardModelWorker)


@pytest.mark.parametrize("key", [POLICY, CRITIC])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("support.own_roles:NoRole", "does not register init_model"),
        ("support.own_roles:Nobody", "has no attribute 'Nobody'"),
        ("support.own_roles:Tensor", "is not a subclass of Worker"),
    ],
)
def test_a_class_without_the_methods_of_its_role_is_an_error(key: str, name: str, message: str, tmp_path: Path) -> None:
    config = ppo_config(tmp_path, {**ONE_STEP, key: name})
    with pytest.raises(ConfigError, match=message):
        role_classes(config)


@pytest.mark.parametrize("key", [POLICY, CRITIC])
def test_a_name_that_is_no_class_is_a_config_error(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{key} = Mine"):
        ppo_config(tmp_path, {**ONE_STEP, key: "Mine"})
