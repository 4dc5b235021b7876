"""A rollout on devices of its own: the run equals that of the hybrid engine to the bit."""

import contextlib
import math
import os
import signal
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cluster import ray_here
from support.ppo_runs import Step, ppo_config, run_ppo
from support.same_run import ACTOR, RANKS, names

from camshaft.controller import WorkerGroup
from camshaft.controller.process_pool import ProcessPool
from camshaft.errors import CamshaftError, WorkerError
from camshaft.tracking import Tracking
from camshaft.tracking.base import RunInfo
from camshaft.trainer.ppo import PPOTrainer

ROLLOUT = "actor_rollout_ref.rollout"
OWN: dict[str, Any] = {"actor_rollout_ref.hybrid_engine": False}
PPO: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": True,
    f"{ACTOR}.ppo_epochs": 2,
    "trainer.test_freq": 2,
}
GRPO: dict[str, Any] = {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 2, f"{ACTOR}.ppo_mini_batch_size": 8}
ALGORITHMS = {"ppo": PPO, "grpo": GRPO}
ROLLOUTS = {"torch": {f"{ROLLOUT}.name": "torch"}, "process": {f"{ROLLOUT}.name": "process"}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "reference": {},
    "fsdp": {**RANKS, "+trainer.resource_pools.rollout.n_gpus_per_node": 2},
}
CONTROLLERS: dict[str, dict[str, Any]] = {"local": {}, "ray": {"trainer.controller": "ray"}}
MEASURED = ("timing_s/", "perf/")
VERSION = "rollout/weights_version"
SENT = {"rollout/sync_bytes", "perf/sync_peak_memory_bytes", "timing_s/sync_check"}
"""Metrics of a step that sends weights to the rollout."""


def both(folder: Path, overrides: dict[str, Any], steps: int) -> tuple[list[Step], list[Step]]:
    """Return the steps of the hybrid run, and of the run with a rollout on devices of its own."""
    elsewhere = ("resource_pools", "controller")
    hybrid = {key: value for key, value in overrides.items() if not any(part in key for part in elsewhere)}
    return run_ppo(folder, hybrid, steps), run_ppo(folder, {**overrides, **OWN}, steps)


def assert_equal(hybrid: list[Step], own: list[Step]) -> None:
    for number, (expected, step) in enumerate(zip(hybrid, own, strict=True), start=1):
        assert names(step.metrics) | SENT == names(expected.metrics) | {VERSION}
        for name, value in expected.metrics.items():
            if name in SENT and name not in step.metrics:
                continue
            is_equal = step.metrics[name] == value or (math.isnan(value) and math.isnan(step.metrics[name]))
            assert is_equal or name.startswith(MEASURED), f"step {number}: {name}"
        assert step.metrics.get(VERSION, number - 1) == number - 1
        for weights, reference in ((step.actor, expected.actor), (step.critic, expected.critic)):
            assert weights.keys() == reference.keys()
            assert all(torch.equal(weights[name], reference[name]) for name in reference), f"step {number}"


def cases() -> Iterator[Any]:
    """Return four short runs, a cover of all pairs of properties (slow), and the other runs (`make test-cluster`)."""
    properties = (ALGORITHMS, ROLLOUTS, LAYOUTS, CONTROLLERS)
    for case in product(*properties):
        numbers = [list(of_one).index(name) for of_one, name in zip(properties, case, strict=True)]
        marks, in_cover = [pytest.mark.alone] * ("ray" in case), sum(numbers) % 2 == 0
        if in_cover and "local" in case:
            yield pytest.param(*case, 4, id=" ".join(case))
        marks.append(pytest.mark.slow if in_cover else pytest.mark.cluster)
        yield pytest.param(*case, 10, id=" ".join((*case, "long")), marks=marks)


@pytest.mark.parametrize(("algorithm", "rollout", "layout", "controller", "steps"), list(cases()))
def test_the_run_equals_that_of_the_hybrid_engine(
    algorithm: str, rollout: str, layout: str, controller: str, steps: int, tmp_path: Path
) -> None:
    overrides = {**ALGORITHMS[algorithm], **ROLLOUTS[rollout], **LAYOUTS[layout], **CONTROLLERS[controller]}
    with ray_here(num_cpus=4) if controller == "ray" else contextlib.nullcontext():
        hybrid, own = both(tmp_path, overrides, steps)
    assert_equal(hybrid, own)
    assert all(VERSION in step.metrics for step in own)
    test_freq = overrides.get("trainer.test_freq", len(own))  # a validation has sent the weights of the next step
    has_sent = [number == 0 or number % test_freq > 0 for number in range(len(own))]
    assert [step.metrics.keys() >= SENT for step in own] == has_sent
    assert own[-1].metrics["actor/grad_norm"] > 0


FEATURES: dict[str, dict[str, Any]] = {
    "remax": {"algorithm.adv_estimator": "remax"},
    "dynamic sampling": {
        **GRPO,
        "algorithm.filter_groups.enable": True,
        f"{ACTOR}.ppo_mini_batch_size": 3,
        "data.train_batch_size": 3,
        "data.gen_batch_size": 4,
    },
    "merged adapter": {**GRPO, "actor_rollout_ref.model.lora_rank": 4, f"{ACTOR}.use_kl_loss": True},
    "validation first": {**PPO, "trainer.val_before_train": True, "trainer.test_freq": 1, "data.val_batch_size": 4},
    "mixed precision": {**GRPO, f"{ROLLOUT}.dtype": "bfloat16"},
}


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_features_of_a_run_do_not_depend_on_the_place_of_the_rollout(feature: str, tmp_path: Path) -> None:
    hybrid, own = both(tmp_path, FEATURES[feature], steps=3)
    if feature == "validation first":
        assert hybrid.pop(0).metrics == own.pop(0).metrics
    assert_equal(hybrid, own)


@pytest.mark.slow
def test_the_size_of_the_pool_changes_no_token(tmp_path: Path) -> None:
    steps = [
        run_ppo(tmp_path, {**GRPO, **OWN, "+trainer.resource_pools.rollout.n_gpus_per_node": ranks}, steps=2)
        for ranks in (1, 3)
    ]
    for one, three in zip(*steps, strict=True):
        assert torch.equal(one.batch["responses"].values, three.batch["responses"].values)


def test_only_other_machines_get_the_weights_from_the_driver(tmp_path: Path) -> None:
    (expected,) = run_ppo(tmp_path, GRPO, steps=1)
    elsewhere = {
        "actor_rollout_ref.worker_cls": "support.own_roles:GeneratesElsewhere",
        "+trainer.resource_pools.rollout.n_gpus_per_node": 2,
    }
    (step,) = run_ppo(tmp_path, {**GRPO, **OWN, **elsewhere}, steps=1)
    assert torch.equal(step.batch["responses"].values, expected.batch["responses"].values)


def test_an_actor_without_a_rollout_says_so(tmp_path: Path) -> None:
    with (
        pytest.raises(CamshaftError, match="this worker does not generate, because with actor_rollout_ref"),
        PPOTrainer.open(ppo_config(tmp_path, {**GRPO, **OWN})) as trainer,
    ):
        trainer.parts.actor.sync_weights()


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_killed_rollout_starts_again_as_often_as_allowed(restarts: int, tmp_path: Path) -> None:
    settings = {**GRPO, **OWN, f"{ROLLOUT}.max_restarts": restarts, "trainer.total_training_steps": 2}
    config = ppo_config(tmp_path, settings)
    with PPOTrainer.open(config) as trainer, Tracking([], RunInfo("p", "e", tmp_path, 2)) as tracking:
        trainer.prepare()
        group: Any = trainer.parts.rollout
        assert isinstance(group, WorkerGroup)
        pool = group.spawned.pool
        assert isinstance(pool, ProcessPool)
        pid = pool.processes[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        if restarts:
            assert trainer.fit(tracking)[VERSION] == 1
            return
        with pytest.raises(
            WorkerError, match=rf"rank 0 of 1 of rollout \(process {pid}\) died in sync_dtypes \(SIGKILL"
        ):
            trainer.fit(tracking)
