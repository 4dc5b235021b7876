"""Every rollout runs with every engine for two steps, and their log-probs of the same tokens agree."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ppo_runs import run_ppo

from camshaft.algorithms import ESTIMATORS
from camshaft.engine import ENGINES
from camshaft.rollout import ROLLOUTS

LIBRARIES = {"vllm", "server", "sglang"}
"""Rollouts that need another library; `tests/vllm_rollout` and `tests/sglang_rollout` train with them."""


def pairs() -> Iterator[Any]:
    """Return all pairs; those in one process with the `reference` engine or the built-in rollout are fast."""
    for rollout in sorted(ROLLOUTS.keys() - LIBRARIES):
        for engine in sorted(ENGINES.keys() - {"fsdp2"}):  # `fsdp2` is an alias of `fsdp`
            fast = (engine == "reference" and rollout != "process") or rollout == "torch"
            yield pytest.param(rollout, engine, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize(("rollout", "engine"), pairs())
def test_rollout_and_engine_agree_on_sampled_tokens(rollout: str, engine: str, tmp_path: Path) -> None:
    names = {
        "actor_rollout_ref.actor.strategy": engine,
        "critic.strategy": engine,
        "actor_rollout_ref.rollout.name": rollout,
        "actor_rollout_ref.rollout.temperature": 0.8,
    }
    for step in run_ppo(tmp_path, names, steps=2):
        assert step.metrics["rollout/log_prob_diff_max"] < 1e-4
        assert step.metrics["rollout/effective_sample_share"] > 0.999


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_advantage_estimator_trains(name: str, tmp_path: Path) -> None:
    overrides = {"algorithm.adv_estimator": name, "actor_rollout_ref.rollout.n": 4}
    steps = run_ppo(tmp_path, overrides, steps=2)
    assert steps[-1].metrics["actor/grad_norm"] > 0
    assert bool(steps[-1].critic) == ESTIMATORS[name].needs_critic
    moved = [n for n, weight in steps[1].actor.items() if not weight.equal(steps[0].actor[n])]
    assert moved
