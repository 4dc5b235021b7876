"""A run whose model has diverged ends, and its last good checkpoint remains."""

import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.command_line import sft_args
from support.ppo_runs import ppo_config, run_ppo

from camshaft import storage
from camshaft.checkpoint import CheckpointManager
from camshaft.config import load_sft
from camshaft.errors import DivergenceError, RewardError
from camshaft.roles.base import SkippedSteps
from camshaft.tracking import RunInfo, Tracking
from camshaft.trainer.divergence import DivergenceCheck
from camshaft.trainer.ppo import PPOTrainer
from camshaft.trainer.supervised import SFTTrainer

ACTOR, CRITIC = "actor_rollout_ref.actor.optim.lr", "critic.optim.lr"
SAVING: dict[str, Any] = {
    "trainer.save_freq": 1,
    "trainer.resume_mode": "auto",
    "trainer.max_actor_ckpt_to_keep": 1,
    "trainer.max_critic_ckpt_to_keep": 1,
}
HUGE_AT_FIRST = """
def compute_score(**_):
    with open("{calls}", "a+") as file:
        file.write("x")
        file.seek(0)
        return 1e25 if len(file.read()) <= 8 else 0.5
"""
"""A reward function whose first eight scores are huge."""


@pytest.mark.parametrize(("key", "role"), [(ACTOR, "actor"), pytest.param(CRITIC, "critic", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_diverged_model_does_not_replace_the_last_checkpoint(key: str, role: str, ranks: int, tmp_path: Path) -> None:
    sharded = {"actor_rollout_ref.actor.strategy": "fsdp", "critic.strategy": "fsdp", "trainer.n_gpus_per_node": 2}
    settings = SAVING | (sharded if ranks == 2 else {})
    run_ppo(tmp_path, settings, steps=2)
    with pytest.raises(
        DivergenceError, match=rf"outputs or weights of {role} are not finite or too large after step 3.*lower {key}"
    ):
        run_ppo(tmp_path, settings | {key: 1e30}, steps=4)
    saved = CheckpointManager(tmp_path / "run").latest()
    assert saved is not None
    assert saved.step == 2
    assert len(run_ppo(tmp_path, settings, steps=3)) == 1, "the run resumes from step 2"


def test_the_step_before_a_validation_of_a_diverged_actor_is_logged(tmp_path: Path) -> None:
    """The validation cannot generate with NaN weights."""
    logged: list[int] = []

    class Recorder(Tracking):
        def log(self, data: Mapping[str, float], step: int) -> None:
            logged.append(step)

    settings = {ACTOR: 1e30, "trainer.test_freq": 1, "trainer.total_training_steps": 2}
    with PPOTrainer.open(ppo_config(tmp_path, settings)) as trainer:
        trainer.prepare()
        with (
            Recorder([], RunInfo("p", "e", tmp_path, 2, None, {})) as tracking,
            pytest.raises(DivergenceError, match=rf"outputs or weights of actor are not finite.*step 1.*lower {ACTOR}"),
        ):
            trainer.fit(tracking)
    assert logged == [1]


def test_the_error_names_the_limit_that_ended_the_run() -> None:
    role: Any = SimpleNamespace(skipped_steps=lambda: [SkippedSteps(steps=3, updates=3)])
    check = DivergenceCheck({"actor": role}, max_skipped_steps=10)
    with pytest.raises(DivergenceError, match=r"3 updates had no step; trainer.max_skipped_steps=null disables"):
        check.check_updates(3, {"actor/skipped_steps": 1.0})
    check = DivergenceCheck({"actor": role}, max_skipped_steps=3)
    with pytest.raises(DivergenceError, match=r"trainer.max_skipped_steps sets the limit"):
        check.check_updates(3, {"actor/skipped_steps": 1.0})


def test_values_whose_squares_overflow_are_not_saved(tmp_path: Path) -> None:
    settings = SAVING | {CRITIC: 1e30, "actor_rollout_ref.actor.ppo_mini_batch_size": 8}
    with pytest.raises(DivergenceError, match="outputs or weights of critic are not finite or too large after step 1"):
        run_ppo(tmp_path, settings, steps=2)
    assert CheckpointManager(tmp_path / "run").latest() is None


def test_a_checkpoint_waits_for_an_applied_optimizer_step(tmp_path: Path) -> None:
    """In the first step, the squared error of the values overflows."""
    reward = tmp_path / "reward.py"
    reward.write_text(HUGE_AT_FIRST.format(calls=str(tmp_path / "calls")))
    settings = SAVING | {"custom_reward_function.path": reward, "custom_reward_function.max_abs_score": 1e30}
    keep_all = {"trainer.max_actor_ckpt_to_keep": "null", "trainer.max_critic_ckpt_to_keep": "null"}
    run_ppo(tmp_path, settings | keep_all, steps=3)
    assert [step for step, _ in storage.step_folders(tmp_path / "run")] == [2, 3]


def test_a_critic_that_only_skips_updates_ends_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    message = r"critic has skipped 7 optimizer steps in a row up to step 4, because the loss is not finite.*lower crit"
    with caplog.at_level(logging.WARNING, "camshaft"), pytest.raises(DivergenceError, match=message):
        run_ppo(tmp_path, {CRITIC: 1e30}, steps=9)
    assert "step 1: critic skipped 1 optimizer steps, because the loss is not finite" in caplog.text


def test_the_number_of_skipped_steps_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match="critic has skipped 3 optimizer steps in a row up to step 2"):
        run_ppo(tmp_path, {CRITIC: 1e30, "trainer.max_skipped_steps": 3}, steps=9)
    assert len(run_ppo(tmp_path, {CRITIC: 1e30, "trainer.max_skipped_steps": "null"}, steps=5)) == 5


def test_supervised_training_that_diverges_saves_nothing(tmp_path: Path) -> None:
    args = sft_args(tmp_path, {"optim.lr": 1e30, "trainer.save_freq": 1, "trainer.total_training_steps": 9})
    with SFTTrainer(load_sft(args)) as trainer, Tracking([], RunInfo("p", "e", tmp_path, 9, None, {})) as tracking:
        trainer.prepare()
        with pytest.raises(
            DivergenceError,
            match=r"outputs or weights of model are not finite or too large after step 1.*lower optim\.lr",
        ):
            trainer.fit(tracking)
    assert not storage.step_folders(trainer.checkpoints.root)


@pytest.mark.parametrize("on_error", [pytest.param("zero", marks=pytest.mark.slow), "drop"])
def test_a_step_without_a_scored_response_ends_the_run(on_error: str, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(**_):\n    raise ValueError('never')\n")
    broken = {"custom_reward_function.path": reward, "custom_reward_function.on_error": on_error}
    with pytest.raises(RewardError, match=r"failed for all 8 responses of a step.*ValueError: never"):
        run_ppo(tmp_path, broken, steps=2)
    (failed,) = tmp_path.rglob("rewards/failed.jsonl")
    assert len(failed.read_text().splitlines()) == 8


def test_an_absurd_score_counts_as_failed(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(**_):\n    return 1e38\n")
    settings = {"custom_reward_function.path": reward, "custom_reward_function.on_error": "zero"}
    with pytest.raises(RewardError, match=r"1e\+38 exceeds custom_reward_function.max_abs_score=1e\+06"):
        run_ppo(tmp_path, settings, steps=1)
