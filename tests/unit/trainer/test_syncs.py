"""One weight sync serves all generations of a step. The rollout sleeps while another role computes on its devices."""

from pathlib import Path
from typing import Any

import pytest
from support.ppo_runs import ppo_args, ppo_config, run_ppo
from support.reward_models import NEWLINE, make_tiny_reward_model

from camshaft.controller import Dispatch, register
from camshaft.dataproto import DataProto
from camshaft.errors import RewardError
from camshaft.reshard import is_entered
from camshaft.roles import RewardModelWorker, rollout
from camshaft.rollout import BaseRollout
from camshaft.tracking import Tracking
from camshaft.tracking.base import RunInfo
from camshaft.trainer.ppo import PPOTrainer

REMAX: dict[str, Any] = {"algorithm.adv_estimator": "remax"}
SAMPLING: dict[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    "algorithm.filter_groups.enable": True,
    "actor_rollout_ref.rollout.n": 2,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 3,
    "data.train_batch_size": 3,
    "data.gen_batch_size": 4,
}
SAMPLED = "train/num_gen_batches"


@pytest.fixture
def rollouts(monkeypatch: pytest.MonkeyPatch) -> list[BaseRollout]:
    """Return the rollouts that a run builds in this process. Their `version` is the number of syncs."""
    built: list[BaseRollout] = []
    original = rollout.build_rollout
    monkeypatch.setattr(rollout, "build_rollout", lambda *args: (built.append(original(*args)), built[-1])[1])
    return built


@pytest.mark.parametrize("overrides", [{}, REMAX, SAMPLING], ids=["plain", "remax", "dynamic sampling"])
def test_a_step_syncs_once(overrides: dict[str, Any], tmp_path: Path, rollouts: list[BaseRollout]) -> None:
    steps = run_ppo(tmp_path, overrides, steps=3)
    assert [built.version for built in rollouts] == [3]
    assert not is_entered(rollouts[0])
    assert all(0 < step.metrics["timing_s/sync"] < step.metrics["timing_s/step"] for step in steps)
    assert overrides is not SAMPLING or max(step.metrics[SAMPLED] for step in steps) > 1


def test_a_validation_syncs_once(tmp_path: Path, rollouts: list[BaseRollout]) -> None:
    run_ppo(tmp_path, {"trainer.test_freq": 1, "data.val_batch_size": 4}, steps=1)
    assert [built.version for built in rollouts] == [2]
    assert not is_entered(rollouts[0])


def test_the_rollout_sleeps_while_a_reward_model_computes_on_its_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollouts: list[BaseRollout]
) -> None:
    ppo_args(tmp_path)  # writes the tokenizer
    make_tiny_reward_model(tmp_path / "rm", template=NEWLINE, turned=True)
    scored = {
        "reward_model.enable": True,
        "reward_model.model.path": tmp_path / "rm",
        "reward_model.micro_batch_size_per_gpu": 8,
        "reward_model.max_length": 60,
        "reward_model.weight": 0.0,  # with other weights, the scores of all responses differ
    }
    awake: list[bool] = []

    class Watching(RewardModelWorker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def compute_rm_score(self, data: DataProto) -> DataProto:
            awake.append(is_entered(rollouts[0]))
            return super().compute_rm_score(data)

    monkeypatch.setattr("camshaft.trainer.build.RewardModelWorker", Watching)
    steps = run_ppo(tmp_path, {**SAMPLING, **scored}, steps=3)
    batches = [int(step.metrics[SAMPLED]) for step in steps]
    assert max(batches) > 1
    assert awake == [False] * sum(batches)
    assert [built.version for built in rollouts] == [sum(batches)]


def test_an_error_leaves_a_sleeping_rollout(tmp_path: Path, rollouts: list[BaseRollout]) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    raise KeyError\n")
    config = ppo_config(tmp_path, {**REMAX, "custom_reward_function.path": reward})
    with PPOTrainer.open(config) as trainer, Tracking([], RunInfo("p", "e", tmp_path, 1)) as tracking:
        trainer.prepare()
        with pytest.raises(RewardError, match="KeyError"):
            trainer.fit(tracking)
        assert [(built.version, is_entered(built)) for built in rollouts] == [(1, False)]
        assert not trainer.parts.is_rollout_awake
