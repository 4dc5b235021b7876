"""Every rollout runs with every engine for two steps, and their log-probs of the same tokens agree."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.optional_engines import OPTIONAL_ENGINES
from support.ppo_runs import run_ppo

from camshaft.algorithms import ESTIMATORS
from camshaft.engine import ENGINES
from camshaft.rollout import ROLLOUTS

LIBRARIES = {"vllm", "server", "sglang"}
"""Rollouts that need another library; `tests/vllm_rollout` and `tests/sglang_rollout` train with them."""


def pairs() -> Iterator[Any]:
    """Return all pairs; in one process, those with the `reference` engine and the default one are fast."""
    for rollout in sorted(ROLLOUTS.keys() - LIBRARIES):
        for engine in sorted(ENGINES.keys() - {"fsdp2"} - OPTIONAL_ENGINES):  # `fsdp2` is an alias of `fsdp`
            fast = (engine == "reference" and rollout != "process") or (rollout, engine) == ("torch", "fsdp")
            yield pytest.param(rollout, engine, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize(("rollout", "engine"), list(pairs()))
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


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in ("gae", "rloo", "remax"))) for n in ESTIMATORS]
)
def test_every_advantage_estimator_trains(name: str, home: Path) -> None:
    overrides: dict[str, Any] = {"algorithm.adv_estimator": name, "data.train_batch_size": 4}
    overrides |= {"actor_rollout_ref.rollout.n": 2, "algorithm.gdpo_reward_keys": "score"}
    (step,) = run_ppo(home, overrides, steps=1)
    assert step.metrics["actor/grad_norm"] > 0
    assert bool(step.critic) == (name == "gae")
    initial = load_file(home / "actor" / "model.safetensors")
    assert [name for name, weight in step.actor.items() if not weight.equal(initial[name])]
