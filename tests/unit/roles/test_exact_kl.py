"""The exact KL of a run, held against two models of transformers that see each row alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ppo_runs import Step, run_ppo
from support.processes import start_fork_server
from support.same_run import ACTOR, RANKS
from transformers import AutoModelForCausalLM

from camshaft.controller.local import PRELOAD

TEMPERATURE = 0.8
FULL: dict[str, Any] = {
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_penalty": "full",
    "actor_rollout_ref.rollout.temperature": TEMPERATURE,
    "actor_rollout_ref.ref.log_prob_micro_batch_size": 4,
    f"{ACTOR}.optim.lr": 1e-2,
}


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    start_fork_server(*PRELOAD, "camshaft.roles", "transformers.models.qwen2.modeling_qwen2")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def alone(home: Path) -> list[Step]:
    return run_ppo(home, FULL, steps=2)


def plain_kl(home: Path, before: dict[str, torch.Tensor], step: Step) -> float:
    """Mean over rows of the mean over a row's tokens of sum_v p log(p / q), in float64."""
    q: Any = AutoModelForCausalLM.from_pretrained(home / "actor", dtype=torch.float64)
    p: Any = AutoModelForCausalLM.from_pretrained(home / "actor", dtype=torch.float64)
    p.load_state_dict(before, strict=False)
    means = []
    for prompt, response in zip(step.batch["prompts"].rows(), step.batch["responses"].rows(), strict=True):
        ids, span = torch.cat([prompt, response])[None], slice(len(prompt) - 1, len(prompt) + len(response) - 1)
        with torch.no_grad():
            log_p, log_q = (torch.log_softmax(m(ids).logits[0, span] / TEMPERATURE, -1) for m in (p, q))
        means.append((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    return float(torch.stack(means).mean())


def test_the_penalty_is_the_divergence_over_the_whole_vocabulary(home: Path, alone: list[Step]) -> None:
    first, second = (step.metrics["actor/reward_kl_penalty"] for step in alone)
    assert first == pytest.approx(0, abs=1e-6)
    wanted = plain_kl(home, alone[0].actor, alone[1])
    assert wanted > 0.01
    assert second == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("more", [{}, {f"{ACTOR}.ulysses_sequence_parallel_size": 2}], ids=["rows", "tokens"])
def test_ranks_find_the_same(more: dict[str, Any], home: Path, alone: list[Step]) -> None:
    found = run_ppo(home, {**FULL, **RANKS, **more}, steps=2)
    for ours, theirs in zip(found, alone, strict=True):
        name = "actor/reward_kl_penalty"
        assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-3, abs=1e-6)


def test_the_model_under_an_adapter_is_a_reference_as_well(tmp_path: Path) -> None:
    model = "actor_rollout_ref.model"
    adapter = {f"{model}.lora_rank": 4, f"{model}.lora_alpha": 6, f"{model}.target_modules": "all-linear"}
    first, second = run_ppo(tmp_path, {**FULL, **adapter, f"{ACTOR}.strategy": "reference"}, steps=2)
    assert first.metrics["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)
    wanted = plain_kl(tmp_path, merged(tmp_path, first.actor, scale=6 / 4), second)
    assert wanted > 0.01
    assert second.metrics["actor/reward_kl_penalty"] == pytest.approx(wanted, rel=1e-4)


def merged(home: Path, adapter: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """W + scale * B A, in float64, for each layer that has an adapter."""
    weights: Any = AutoModelForCausalLM.from_pretrained(home / "actor", dtype=torch.float64).state_dict()
    pairs = {name.removesuffix(".lora_A.default.weight") for name in adapter if ".lora_A." in name}
    assert len(pairs) == 2 * 7  # all linear layers of two blocks
    for name in pairs:
        a, b = (adapter[f"{name}.lora_{letter}.default.weight"].double() for letter in "AB")
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + scale * b @ a
    return weights
