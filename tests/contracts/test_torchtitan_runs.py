"""PPO and GRPO runs with torchtitan engines have the metrics and weights of runs on one device; `make test-titan`.

Runs also resume after kill -9, and checkpoints load in other layouts.
"""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import finished, start
from support.interrupting import NAME, run_until
from support.ppo_runs import ppo_args, run_ppo, saved_weights
from support.ranks import run_ranks
from support.reward_models import scored
from support.same_run import ACTOR, compare
from torch import Tensor

from camshaft import storage
from camshaft.contracts.engine.harness import EngineHarness
from camshaft.controller import local
from camshaft.engine import engine_class
from camshaft.tracking import deterministic
from camshaft.tracking.jsonl import read_metrics

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


def test_ppo_with_four_roles_on_two_ranks_equals_the_reference_engine(tmp_path: Path) -> None:
    ppo = PPO | scored(tmp_path / "rm")
    expected = run_ppo(tmp_path, ppo, steps=STEPS)
    stages = {"+reward_model.engine_kwargs.pipeline_parallel_degree": 2}
    compare(run_ppo(tmp_path, ppo | TITAN | {"trainer.n_gpus_per_node": 2} | stages, steps=STEPS), expected, rel=1e-5)


LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "tensor": {f"actor_rollout_ref.{role}.fsdp_config.tensor_parallel_size": 2 for role in ("actor", "ref")},
    "pipeline": {f"+{ACTOR}.engine_kwargs.pipeline_parallel_degree": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_grpo_on_two_ranks_equals_the_reference_engine(layout: str, tmp_path: Path) -> None:
    expected = run_ppo(tmp_path, GRPO, steps=STEPS)
    ranks = TITAN | {"trainer.n_gpus_per_node": 2} | LAYOUTS[layout]
    compare(run_ppo(tmp_path, GRPO | ranks, steps=STEPS), expected, rel=1e-5)


# -- checkpoints ----------------------------------------------------------------------------------

RESUMED: dict[str, Any] = {
    **TITAN,
    "trainer.n_gpus_per_node": 2,
    f"+{ACTOR}.engine_kwargs.pipeline_parallel_degree": 2,
    "+actor_rollout_ref.model.override_config.attention_dropout": 0.1,
    "trainer.total_training_steps": 4,
    "trainer.save_freq": 2,
    "trainer.logger": f"[jsonl,{NAME}]",
    "trainer.resume_mode": "auto",
}
"""An actor with two pipeline stages and a critic with two shards."""


def test_a_killed_run_on_two_ranks_resumes_bitwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def words(run: Path) -> list[str]:
        return ["ppo", *ppo_args(tmp_path, {**RESUMED, "trainer.default_local_dir": run})]

    killed, uninterrupted = tmp_path / "killed", tmp_path / "whole"
    assert run_until(3, killed, words(killed), monkeypatch).status == -signal.SIGKILL
    assert [step for step, _ in storage.step_folders(killed)] == [2]
    for run in (killed, uninterrupted):
        result = finished(start("-m", "camshaft", *words(run)), 300)
        assert result.status == 0, result.err
    actual, expected = (
        [deterministic(line) for line in read_metrics(r / "metrics.jsonl")] for r in (killed, uninterrupted)
    )
    assert [line["step"] for line in expected] == [1, 2, 3, 4]
    assert actual == expected
    for role in ("actor", "critic"):
        for part in ("model", "optimizer"):
            tensors, expected_tensors = (
                saved_weights(r / "global_step_4" / role, part) for r in (killed, uninterrupted)
            )
            assert len(tensors) > 20
            assert_equal(tensors, expected_tensors)


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)] == []


Results = tuple[dict[str, Tensor], float, float, dict[str, Tensor]]
"""Weights before a step, its loss and gradient norm, and weights after it."""


def train(strategy: str, folder: Path, options: dict[str, Any], is_resumed: bool) -> Results:
    """Run a step and save a checkpoint, or load this checkpoint and run the next step."""
    harness = EngineHarness(engine_class(strategy), folder, common_fields={"options": options})
    engine = harness.build(micro_batch_size=3)
    if is_resumed:
        engine.load_checkpoint(str(folder / "checkpoint"))
    weights = harness.weights(engine)
    step = harness.train(engine, harness.batch)
    if not is_resumed:
        harness.save(engine, folder / "checkpoint")
    return weights, step.loss, step.grad_norm, harness.weights(engine)


def test_a_checkpoint_of_four_ranks_loads_on_two_and_one(tmp_path: Path) -> None:
    pipeline = {"pipeline_parallel_degree": 2}
    *_, saved = run_ranks(train, 4, "torchtitan", tmp_path, pipeline, False)[0]
    _, loss, norm, weights = train("reference", tmp_path, {}, True)
    for world, options in ((2, pipeline), (2, {}), (1, {})):
        loaded, *step, trained = run_ranks(train, world, "torchtitan", tmp_path, options, True)[0]
        assert_equal(loaded, saved)
        assert step == pytest.approx((loss, norm), rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(trained[name], weight, rtol=1e-5, atol=1e-6, msg=name)
