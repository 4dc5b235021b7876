"""PPO runs of a mixture of experts compare or replay the experts that the rollout chose."""

from pathlib import Path
from typing import Any

import pytest
from support.moe import MODELS
from support.ppo_runs import ppo_config, run_ppo
from support.tiny import tiny_folder

from camshaft.dataproto import Ragged
from camshaft.errors import ConfigError
from camshaft.rollout.builtin.routed_experts import RoutingRecorder

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
COMPARE: dict[str, Any] = {f"{ROLLOUT}.enable_return_routed_experts": True}
REPLAY: dict[str, Any] = {f"{ACTOR}.router_replay.mode": "R3"}
IN_UPDATE: dict[str, Any] = {f"{ACTOR}.ppo_mini_batch_size": 8}
"""One optimizer step per iteration, whose forward pass also computes the old log-probs."""
WHEN = [
    pytest.param({}, id="before the update", marks=pytest.mark.slow),
    pytest.param(IN_UPDATE, id="in the update"),
]


def metrics_of(folder: Path, overrides: dict[str, Any]) -> dict[str, float]:
    experts = str(tiny_folder(**MODELS["qwen3_moe"], hidden=32))
    paths = {"actor_rollout_ref.model.path": experts, "algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 2}
    (step,) = run_ppo(folder, paths | overrides, 1)
    return step.metrics


@pytest.fixture
def other_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the generator return other experts than those that it used."""
    result = RoutingRecorder.result

    def shifted(recorder: RoutingRecorder) -> Ragged:
        experts = result(recorder)
        changed = (experts.values + 1) % recorder.routers.num_experts
        return experts.like(changed.where(experts.values != recorder.routers.unknown, experts.values))

    monkeypatch.setattr(RoutingRecorder, "result", shifted)


@pytest.mark.parametrize("overrides", WHEN)
def test_trainer_and_rollout_choose_the_same_experts(overrides: dict[str, Any], tmp_path: Path) -> None:
    metrics = metrics_of(tmp_path, COMPARE | overrides)
    assert metrics["rollout/routing_mismatch"] == metrics["rollout/routing_mismatch_tokens"] == 0
    assert metrics["rollout/log_prob_diff_max"] < 1e-4


@pytest.mark.parametrize("overrides", WHEN)
def test_replay_uses_the_experts_of_the_rollout(overrides: dict[str, Any], tmp_path: Path, other_experts: None) -> None:
    """If the recorded experts are wrong, only replay changes the log-probs; both modes report the difference."""
    compared, replayed = metrics_of(tmp_path, COMPARE | overrides), metrics_of(tmp_path, REPLAY | overrides)
    assert compared["rollout/log_prob_diff_max"] < 1e-4
    assert replayed["rollout/log_prob_diff_max"] > 1e-3
    for metrics in (compared, replayed):
        assert metrics["rollout/routing_mismatch_tokens"] > 0.9
        assert 0.4 < metrics["rollout/routing_mismatch"] <= 1
    assert compared["actor/grad_norm"] != replayed["actor/grad_norm"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (REPLAY | {f"{ROLLOUT}.name": "hf"}, f"{ROLLOUT}.name=hf does not return expert choices. Set {ACTOR}.router"),
        (COMPARE | {f"{ROLLOUT}.name": "hf"}, f"enable_return_routed_experts=false, or {ROLLOUT}.name=torch."),
        (REPLAY | {f"{ROLLOUT}.name": "vllm"}, f"{ROLLOUT}.name=vllm does not return expert choices."),
        (
            REPLAY | {f"{ACTOR}.strategy": "torchtitan"},
            "strategy=torchtitan cannot read the expert choices",
        ),
        (REPLAY | {f"{ACTOR}.strategy": "torchtitan"}, f"router_replay.mode=disabled, or {ACTOR}.strategy=reference."),
        (
            COMPARE | {"algorithm.rollout_correction.bypass_mode": True},
            "has no effect with algorithm.rollout",
        ),
        ({f"{ACTOR}.router_replay.mode": "R2"}, "must be one of disabled, R3"),
    ],
)
def test_unsupported_combinations_are_rejected(overrides: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        ppo_config(tmp_path, overrides)
    assert expected in str(error.value)
