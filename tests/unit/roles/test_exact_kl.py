"""The exact KL of a run, compared with two transformers models on each row separately."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ppo_runs import Step, ppo_config, run_ppo
from support.processes import start_fork_server
from support.same_run import ACTOR, RANKS, SHUFFLED, compare
from transformers import AutoModelForCausalLM

from camshaft.controller.local import PRELOAD
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import BatchError
from camshaft.roles import ActorWorker

TEMPERATURE = 0.8
FULL: dict[str, Any] = {
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_penalty": "full",
    "actor_rollout_ref.rollout.temperature": TEMPERATURE,
    "actor_rollout_ref.ref.log_prob_micro_batch_size": 4,
    f"{ACTOR}.optim.lr": 1e-2,
}


LOSS: dict[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.n": 2,
    "actor_rollout_ref.rollout.temperature": TEMPERATURE,
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.kl_loss_type": "full",
    f"{ACTOR}.kl_loss_coef": 1.0,
}
ONE_UPDATE: dict[str, Any] = {
    f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
    f"{ACTOR}.ppo_mini_batch_size": 8,
    f"{ACTOR}.optim.lr": 1e-2,
}
"""A step with one update: `kl_loss` is computed with the weights of the previous step."""
ADAPTER: dict[str, Any] = {
    "actor_rollout_ref.model.lora_rank": 4,
    "actor_rollout_ref.model.lora_alpha": 8,
    "actor_rollout_ref.model.target_modules": "all-linear",
}


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    start_fork_server(*PRELOAD, "camshaft.roles", "transformers.models.qwen2.modeling_qwen2")


@pytest.fixture(scope="module")
def one_rank(home: Path) -> list[Step]:
    return run_ppo(home, FULL, steps=2)


def oracle_kl(home: Path, before: dict[str, torch.Tensor], step: Step) -> float:
    """Return the mean over rows of the mean over a row's tokens of sum_v p log(p / q), in float64."""
    q: Any = AutoModelForCausalLM.from_pretrained(home / "actor", dtype=torch.float64)
    p: Any = AutoModelForCausalLM.from_pretrained(home / "actor", dtype=torch.float64)
    p.load_state_dict(merged(before, p.state_dict()), strict=False)
    means = []
    for prompt, response in zip(step.batch["prompts"].rows(), step.batch["responses"].rows(), strict=True):
        ids, span = torch.cat([prompt, response])[None], slice(len(prompt) - 1, len(prompt) + len(response) - 1)
        with torch.no_grad():
            log_p, log_q = (torch.log_softmax(m(ids).logits[0, span] / TEMPERATURE, -1) for m in (p, q))
        means.append((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    return float(torch.stack(means).mean())


def merged(weights: dict[str, torch.Tensor], base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights with `ADAPTER` merged as W + alpha / rank B A."""
    result = {name: weight for name, weight in weights.items() if ".lora_" not in name}
    for name, a in weights.items():
        layer, is_a, rest = name.partition(".lora_A.")
        if is_a:
            b = weights[f"{layer}.lora_B.{rest}"]
            result[f"{layer}.weight"] = base[f"{layer}.weight"] + 8 / 4 * b.double() @ a.double()
    return result


def test_the_penalty_is_the_divergence_over_the_full_vocabulary(home: Path, one_rank: list[Step]) -> None:
    first, second = (step.metrics["actor/reward_kl_penalty"] for step in one_rank)
    assert first == pytest.approx(0, abs=1e-6)
    expected = oracle_kl(home, one_rank[0].actor, one_rank[1])
    assert expected > 0.01
    assert second == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [pytest.param({}, id="rows"), pytest.param({f"{ACTOR}.ulysses_sequence_parallel_size": 2}, id="tokens")],
)
def test_ranks_find_the_same(more: dict[str, Any], home: Path, one_rank: list[Step]) -> None:
    steps = run_ppo(home, {**FULL, **RANKS, **more}, steps=2)
    for step, reference in zip(steps, one_rank, strict=True):
        name = "actor/reward_kl_penalty"
        assert step.metrics[name] == pytest.approx(reference.metrics[name], rel=1e-3, abs=1e-6)


def test_the_model_under_an_adapter_is_a_reference_as_well(tmp_path: Path) -> None:
    first, second = run_ppo(tmp_path, {**FULL, **ADAPTER, f"{ACTOR}.strategy": "reference"}, steps=2)
    assert first.metrics["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)
    expected = oracle_kl(tmp_path, first.actor, second)
    assert expected > 0.01
    assert second.metrics["actor/reward_kl_penalty"] == pytest.approx(expected, rel=1e-4)


# -- in the loss; tests/parity compares the gradients with a reference program -----------------------


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="weights"),
        pytest.param(ADAPTER, id="adapter"),
        pytest.param(
            ADAPTER | RANKS | {"actor_rollout_ref.model.enable_gradient_checkpointing": True},
            id="adapter on ranks",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_kl_loss_uses_the_weights_before_the_update(more: dict[str, Any], tmp_path: Path) -> None:
    first, second = run_ppo(tmp_path, {**LOSS, **ONE_UPDATE, **more}, steps=2)
    assert first.metrics["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    expected = oracle_kl(tmp_path, first.actor, second)
    assert expected > 1e-3
    assert second.metrics["actor/kl_loss"] == pytest.approx(expected, rel=1e-4)


LEARNED = {**SHUFFLED, **LOSS, "algorithm.use_kl_in_reward": False}


@pytest.fixture(scope="module")
def learned_alone(home: Path) -> list[Step]:
    return run_ppo(home, LEARNED, steps=2)


TENSOR = {f"actor_rollout_ref.{part}.fsdp_config.tensor_parallel_size": 2 for part in ("actor", "ref")}
BUDGET = {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 40}


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(BUDGET, id="rows", marks=pytest.mark.slow),
        pytest.param({f"{ACTOR}.ulysses_sequence_parallel_size": 2}, id="tokens", marks=pytest.mark.slow),
        pytest.param(TENSOR, id="vocabulary", marks=pytest.mark.slow),
    ],
)
def test_ranks_learn_the_same_from_it(more: dict[str, Any], home: Path, learned_alone: list[Step]) -> None:
    compare(run_ppo(home, {**LEARNED, **RANKS, **more}, steps=2), learned_alone, rel=1e-6)
    assert learned_alone[-1].metrics["actor/kl_loss"] > 1e-5


def test_an_actor_without_its_reference_is_an_error(home: Path) -> None:
    config = ppo_config(home, LOSS)
    actor = ActorWorker(config, config.topology(), 1)
    actor.init_model()
    ids = Ragged.from_rows([[5, 6, 7], [8, 9]])
    ones = ids.map(torch.ones_like)
    columns = {"prompts": ids, "responses": ids, "response_mask": ones.map(torch.Tensor.bool)}
    numbers = dict.fromkeys(("old_log_probs", "advantages"), ones.map(torch.Tensor.float))
    with pytest.raises(BatchError, match=r"lacks 'log_q' \(written by roles/exact_kl\)"):
        actor.update_actor(DataProto.from_dict({**columns, **numbers}).repeat(4))
