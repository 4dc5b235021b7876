"""Correction for the rollout's distribution: columns, metrics, and runs in which both distributions differ."""

import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ppo_runs import Step, ppo_config, run_ppo
from torch import Tensor
from transformers import AutoModelForCausalLM

from camshaft.config import Topology
from camshaft.dataproto import DataProto, Ragged
from camshaft.roles import ActorWorker
from camshaft.trainer.advantages import compute_corrections
from camshaft.trainer.mini_batches import shuffle_seed

KEY = "algorithm.rollout_correction"
MICRO_BATCHES = {"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2}


def rollout_correction(folder: Path, **keys: Any) -> Any:
    return ppo_config(folder, correcting(**keys)).algorithm.rollout_correction


def correcting(**keys: Any) -> dict[str, Any]:
    return {f"{KEY}.{key}": value for key, value in keys.items()}


def batch_of() -> DataProto:
    """Build a row with ratios 4 and 1/2, whose second token came from a tool, and a row with ratio 3/4."""
    rows = [[4.0, 1000.0, 0.5], [0.75]]
    train = Ragged.from_rows([[-1.0, -1.0, -1.0], [-1.0]], torch.float32)
    ratios = Ragged.from_rows([[math.log(ratio) for ratio in row] for row in rows], torch.float32)
    return DataProto.from_dict(
        {
            "old_log_probs": train,
            "rollout_log_probs": train.like(train.values - ratios.values),
            "response_mask": Ragged.from_rows([[True, False, True], [True]]),
        }
    )


Run = Callable[[Mapping[str, Any]], Step]


@pytest.fixture(scope="module")
def run(home: Path) -> Run:
    """Return the step of a run; equal runs are made once."""
    cached = cache(lambda overrides: run_ppo(home, dict(overrides), steps=1)[0])
    return lambda overrides: cached(tuple(overrides.items()))


# -- on the driver --------------------------------------------------------------------------------


def test_no_metric_is_added_without_a_request(home: Path) -> None:
    columns, metrics = compute_corrections(batch_of(), rollout_correction(home))
    assert not columns.columns
    assert metrics == {}


def test_weights_and_their_metrics_by_hand(home: Path) -> None:
    columns, metrics = compute_corrections(
        batch_of(), rollout_correction(home, rollout_is="token", rollout_is_threshold=3.0)
    )
    assert [row.tolist() for row in columns.ragged("rollout_is_weights").rows()] == [
        pytest.approx([3, 0, 0.5]),
        pytest.approx([0.75]),
    ]
    assert metrics == pytest.approx(
        {
            "rollout_corr/rollout_is_mean": 4.25 / 3,
            "rollout_corr/rollout_is_max": 3,
            "rollout_corr/rollout_is_min": 0.5,
            "rollout_corr/rollout_is_std": math.sqrt((9 + 0.25 + 0.5625) / 3 - (4.25 / 3) ** 2),
            "rollout_corr/rollout_is_eff_sample_size": 4.25**2 / (3 * (9 + 0.25 + 0.5625)),
            "rollout_corr/rollout_is_ratio_fraction_high": 1 / 3,
        },
        rel=1e-6,
    )


def test_several_rules_must_all_hold(home: Path) -> None:
    # By token, 4 exceeds the limit; by row, the product 2 of the first does, which also removes 1/2.
    one = rollout_correction(home, rollout_rs="token_k1", rollout_rs_threshold=2.5)
    both = rollout_correction(home, rollout_rs="[token_k1,seq_sum_k1]", rollout_rs_threshold="[2.5,0.5_1.9]")
    kept, metrics = compute_corrections(batch_of(), one)
    assert kept["rollout_rs_mask"].values.int().tolist() == [0, 0, 1, 1]
    assert metrics == pytest.approx(
        {"rollout_corr/rollout_rs_masked_fraction": 1 / 3, "rollout_corr/rollout_rs_seq_masked_fraction": 1 / 2}
    )
    kept, metrics = compute_corrections(batch_of(), both)
    assert kept["rollout_rs_mask"].values.int().tolist() == [0, 0, 0, 1]
    assert metrics == pytest.approx(
        {
            "rollout_corr/rollout_rs_masked_fraction": 2 / 3,
            "rollout_corr/rollout_rs_seq_masked_fraction": 1 / 2,
            "rollout_corr/rollout_rs_token_k1_masked_fraction": 1 / 3,
            "rollout_corr/rollout_rs_token_k1_seq_masked_fraction": 1 / 2,
            "rollout_corr/rollout_rs_seq_sum_k1_masked_fraction": 2 / 3,
            "rollout_corr/rollout_rs_seq_sum_k1_seq_masked_fraction": 1 / 2,
        }
    )


def test_normalized_weights_and_their_metrics_by_hand(home: Path) -> None:
    columns, metrics = compute_corrections(
        batch_of(), rollout_correction(home, rollout_is="sequence", rollout_is_batch_normalize=True)
    )
    # Rows have the weights 4 * 1/2 = 2 and 3/4, so their mean is 11/8.
    factor = 11 / 8
    assert columns["rollout_is_weights"].values.tolist() == pytest.approx([2 / factor, 0, 2 / factor, 0.75 / factor])
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(factor)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((2 + 2 + 0.75) / 3 / factor)


# -- in the actor's loss --------------------------------------------------------------------------


def learnable() -> DataProto:
    generator = torch.Generator().manual_seed(0)
    prompts = Ragged.from_rows([torch.randint(3, 100, (n,), generator=generator) for n in (3, 5, 2, 4)])
    responses = Ragged.from_rows([torch.randint(3, 100, (n,), generator=generator) for n in (4, 6, 1, 3)])
    return DataProto.from_dict(
        {
            "prompts": prompts,
            "responses": responses,
            "response_mask": responses.map(lambda ids: torch.ones_like(ids, dtype=torch.bool)),
            "advantages": responses.like(torch.randn(len(responses.values), generator=generator)),
        }
    )


def first_update(home: Path, columns: dict[str, Tensor], **keys: Any) -> dict[str, float]:
    """Return the metrics of one update whose ratios are all 1."""
    config = ppo_config(home, {**correcting(**keys), **MICRO_BATCHES})
    actor = ActorWorker(config, Topology(1), 10)
    actor.init_model()
    batch = learnable()
    batch = batch.union(actor.compute_log_prob(batch).select("old_log_probs"))
    like = batch.ragged("responses")
    batch = batch.with_columns(**{name: like.like(values) for name, values in columns.items()})
    return actor.update_actor(batch).meta_info["metrics"]


def test_the_first_loss_is_the_weighted_mean_advantage(home: Path) -> None:
    advantages = learnable()["advantages"].values
    weights = torch.linspace(0.1, 1.5, len(advantages))
    metrics = first_update(home, {"rollout_is_weights": weights}, rollout_is="token")
    assert metrics["actor/pg_loss"] == pytest.approx(-float((weights * advantages).mean()), rel=1e-4)


def test_rejected_rows_do_not_count(home: Path) -> None:
    # Half of the first row and all of the third are rejected; the mean is over the remaining tokens.
    advantages = learnable()["advantages"].values
    kept = torch.ones(len(advantages), dtype=torch.bool)
    kept[2:4] = kept[10] = False
    metrics = first_update(home, {"rollout_rs_mask": kept}, rollout_rs="token_k1", rollout_rs_threshold=2.0)
    assert metrics["actor/pg_loss"] == pytest.approx(-float(advantages[kept].mean()), rel=1e-4)


def test_nothing_is_learned_if_everything_is_rejected(home: Path) -> None:
    kept = torch.zeros(14, dtype=torch.bool)
    metrics = first_update(home, {"rollout_rs_mask": kept}, rollout_rs="seq_max_k2", rollout_rs_threshold=0.1)
    assert metrics["actor/pg_loss"] == metrics["actor/grad_norm"] == 0.0


# -- in the update, with the log-probs of the rollout ---------------------------------------------


AGES = torch.arange(14, dtype=torch.int32) % 4


def bypass_update(home: Path, ratios: Tensor, **keys: Any) -> tuple[dict[str, float], Tensor]:
    """Return the metrics of one update in which the policy differs from the rollout by `ratios`, and its log-probs."""
    stale = {"async_training.max_staleness": 3 if keys.get("loss_type") == "interpolated" else 0}
    config = ppo_config(home, {**correcting(bypass_mode=True, **keys), **MICRO_BATCHES, **stale})
    actor = ActorWorker(config, Topology(1), 10)
    actor.init_model()
    batch = learnable()
    log_probs = actor.compute_log_prob(batch).ragged("old_log_probs")
    batch = batch.with_columns(
        old_log_probs=log_probs.like(log_probs.values - ratios.log()),
        policy_ages=log_probs.like(AGES),
        rollout_is_mean=torch.full((4,), 0.5),
    )
    return actor.update_actor(batch, old_log_probs="rollout").meta_info["metrics"], log_probs.values


def test_reinforce_weights_the_policy_gradient_by_the_current_policy(home: Path) -> None:
    ratios, advantages = torch.linspace(0.1, 3.0, 14), learnable()["advantages"].values
    keys = {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.5}
    metrics, log_probs = bypass_update(home, ratios, **keys)
    weights = ratios.clamp(max=1.5)
    assert metrics["actor/rollout_is_mean"] == pytest.approx(float(weights.mean()), rel=1e-4)
    expected = -(weights * advantages * log_probs).mean()
    assert metrics["actor/pg_loss"] == pytest.approx(float(expected), rel=1e-4)
    normalized, _ = bypass_update(home, ratios, **keys, rollout_is_batch_normalize=True)
    assert normalized["actor/pg_loss"] == pytest.approx(2 * float(expected), rel=1e-4)


def test_the_estimated_policy_splits_the_ratio_into_weight_and_ratio(home: Path) -> None:
    # With pi / pi_rollout = r, the estimate is r^alpha pi_rollout: the weight is r^alpha, the PPO ratio r / r^alpha.
    ratios, advantages = torch.linspace(0.1, 3.0, 14), learnable()["advantages"].values
    keys = {"loss_type": "interpolated", "rollout_is": "token", "rollout_is_threshold": 1.5}
    metrics, _ = bypass_update(home, ratios, **keys)
    alpha = torch.tensor([0, 1 / 2, 2 / 3, 3 / 4]).repeat(4)[:14]
    weights, rest = (ratios**alpha).clamp(max=1.5), ratios ** (1 - alpha)
    losses = weights * torch.maximum(-advantages * rest, -advantages * rest.clamp(0.8, 1.2))
    assert metrics["actor/rollout_is_mean"] == pytest.approx(float(weights.mean()), rel=1e-4)
    assert metrics["actor/pg_loss"] == pytest.approx(float(losses.mean()), rel=1e-4)
    ppo, _ = bypass_update(home, ratios)
    assert ppo["actor/pg_loss"] != pytest.approx(metrics["actor/pg_loss"], rel=1e-2)


def test_tokens_rejected_in_the_update_remain_in_the_counts(home: Path) -> None:
    ratios, advantages = torch.linspace(0.1, 3.0, 14), learnable()["advantages"].values
    keys = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5-2.0"}
    metrics, _ = bypass_update(home, ratios, **keys)
    kept = (ratios >= 0.5) & (ratios <= 2)
    losses = torch.maximum(-advantages * ratios, -advantages * ratios.clamp(0.8, 1.2))
    assert metrics["actor/pg_loss"] == pytest.approx(float(losses[kept].sum()) / 14, rel=1e-4)
    assert metrics["actor/rollout_rs_masked_fraction"] == pytest.approx(1 - float(kept.double().mean()), rel=1e-4)


def test_a_sequence_is_rejected_as_a_whole_in_the_update(home: Path) -> None:
    ratios, advantages = torch.ones(14), learnable()["advantages"].values
    ratios[5] = 9.0  # in the second row, of tokens 4 to 9
    keys = {"loss_type": "reinforce", "rollout_rs": "seq_max_k2", "rollout_rs_threshold": "1.0"}
    metrics, log_probs = bypass_update(home, ratios, **keys)
    losses = -(advantages * log_probs)
    assert metrics["actor/pg_loss"] == pytest.approx(float(losses[:4].sum() + losses[10:].sum()) / 14, rel=1e-4)


# -- runs with different distributions ------------------------------------------------------------

TOP_P = {"actor_rollout_ref.rollout.top_p": 0.6, "actor_rollout_ref.rollout.temperature": 0.8}


def nucleus_masses(home: Path, batch: DataProto) -> list[Tensor]:
    """Return the total probability of the kept tokens at each response token, by transformers in float64."""
    model: Any = AutoModelForCausalLM.from_pretrained(home / "actor", dtype=torch.float64)
    masses = []
    for prompt, response in zip(batch.ragged("prompts").rows(), batch.ragged("responses").rows(), strict=True):
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        shares = (logits / 0.8).softmax(-1).sort(descending=True).values
        before = shares.cumsum(-1) - shares
        masses.append((shares * (before < 0.6)).sum(-1))
    return masses


@pytest.mark.slow
def test_truncated_distribution_weights_equal_the_kept_mass(home: Path, run: Run) -> None:
    # pi_rollout = pi_train / mass for a kept token, so its weight is the mass; a row's weight is their product.
    for level in ("token", "sequence"):
        step = run({**TOP_P, **correcting(rollout_is=level)})
        masses = nucleus_masses(home, step.batch)
        if level == "sequence":
            masses = [mass.prod().expand(len(mass)) for mass in masses]
        weights = torch.cat(masses)
        assert step.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(float(weights.mean()), rel=1e-4)
        assert step.metrics["rollout_corr/rollout_is_max"] == pytest.approx(float(weights.max()), rel=1e-4)
        assert step.metrics["rollout_corr/rollout_is_min"] == pytest.approx(float(weights.min()), rel=1e-4)
        assert step.metrics["rollout/log_prob_diff_above_0.1"] == 1.0
    # If sampling has no limits, the same weights are one and have no effect.
    baseline = run({})
    step = run(correcting(rollout_is="sequence"))
    assert step.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-5)
    assert step.metrics["actor/pg_loss"] == pytest.approx(baseline.metrics["actor/pg_loss"], abs=1e-6)


def test_normalized_correction_weights_have_mean_one(run: Run) -> None:
    token = correcting(rollout_is="token")
    small = run({**TOP_P, **token})
    normalized = run({**TOP_P, **token, f"{KEY}.rollout_is_batch_normalize": True})
    assert small.metrics["rollout_corr/rollout_is_mean"] < 0.7
    assert normalized.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.0)
    assert normalized.metrics["actor/grad_norm"] > 1.3 * small.metrics["actor/grad_norm"]


@pytest.mark.slow
def test_rejection_keeps_responses_with_little_truncated_mass(home: Path, run: Run) -> None:
    """The mask follows from the masses, and the metrics cover all rows."""
    baseline = run(TOP_P)
    masses = torch.cat(nucleus_masses(home, baseline.batch)).sort().values
    widest = int((masses[1:] - masses[:-1]).argmax())
    low = float(masses[widest : widest + 2].mean())  # in the middle of the widest gap, so that rounding has no effect
    keys = correcting(rollout_rs="token_k1", rollout_rs_threshold=f"{low}-2.0")
    step = run({**TOP_P, **keys})
    rejected = (widest + 1) / len(masses)
    assert step.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(rejected)


def test_bypass_mode_uses_the_rollout_log_probs(home: Path) -> None:
    """Generate in bfloat16 and train in float32: the loss reports their difference, compared with transformers."""
    keys = {"actor_rollout_ref.rollout.dtype": "bfloat16", "actor_rollout_ref.actor.ppo_mini_batch_size": 8}
    (step,) = run_ppo(home, {**keys, **correcting(bypass_mode=True)}, steps=1)
    log_probs, entropies = transformers_outputs(home, step.batch)
    apart = step.batch["rollout_log_probs"].values - log_probs.values
    assert float(apart.abs().max()) > 1e-4
    assert step.metrics["actor/ppo_kl"] == pytest.approx(float(apart.mean()), rel=0.02, abs=1e-6)
    assert step.metrics["actor/entropy"] == pytest.approx(float(entropies.mean()), rel=1e-5)
    assert "timing_s/old_log_prob" not in step.metrics
    assert step.metrics["rollout/log_prob_diff_max"] == pytest.approx(float(apart.abs().max()), rel=1e-2)
    assert step.metrics["rollout/kl_k1"] == pytest.approx(float(apart.mean()), rel=0.02, abs=1e-6)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_bypass_mode_compares_log_probs_before_the_first_update(ranks: int, home: Path) -> None:
    """Updates change the log-probs of later mini-batches by much more than rollout and trainer differ."""
    keys: dict[str, Any] = {"actor_rollout_ref.rollout.dtype": "bfloat16", "actor_rollout_ref.actor.optim.lr": 0.1}
    keys |= {"actor_rollout_ref.actor.ppo_mini_batch_size": 2, "actor_rollout_ref.actor.ppo_epochs": 2}
    if ranks > 1:
        keys |= {
            "trainer.n_gpus_per_node": ranks,
            "actor_rollout_ref.actor.strategy": "fsdp",
            "critic.strategy": "fsdp",
        }
    (step,) = run_ppo(home, {**keys, **correcting(bypass_mode=True)}, steps=1)
    log_probs, _ = transformers_outputs(home, step.batch)
    apart = log_probs.like((step.batch["rollout_log_probs"].values - log_probs.values).abs())
    shuffled = torch.randperm(len(step.batch), generator=torch.Generator().manual_seed(shuffle_seed(1, 1)))
    first = apart.select(shuffled[: 2 * len(step.batch) // 8]).values
    assert step.metrics["rollout/log_prob_diff_mean"] == pytest.approx(float(first.mean()), rel=1e-2)
    assert abs(step.metrics["actor/ppo_kl"]) > 10 * float(first.mean())


def transformers_outputs(home: Path, batch: DataProto) -> tuple[Ragged, Tensor]:
    """Return the log-probs and the entropies of the responses in float32, computed by transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(home / "actor", dtype=torch.float32)
    log_probs, entropies = [], []
    for prompt, response in zip(batch.ragged("prompts").rows(), batch.ragged("responses").rows(), strict=True):
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        spread = torch.distributions.Categorical(logits=logits)
        log_probs.append(spread.log_prob(response))
        entropies.append(spread.entropy())
    return Ragged.from_rows(log_probs), torch.cat(entropies)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_bypass_mode_changes_little_where_the_two_agree(ranks: int, home: Path) -> None:
    keys = {"algorithm.use_kl_in_reward": True, "trainer.n_gpus_per_node": ranks}
    keys |= {} if ranks == 1 else {"actor_rollout_ref.actor.strategy": "fsdp", "critic.strategy": "fsdp"}
    (baseline,) = run_ppo(home, keys, steps=1)
    (step,) = run_ppo(home, {**keys, **correcting(bypass_mode=True)}, steps=1)
    missing = baseline.metrics.keys() - step.metrics.keys()
    assert "timing_s/old_log_prob" in missing
    assert all(name.startswith(("timing_s/old_log_prob", "rollout/")) for name in missing)
    assert step.metrics.keys() <= baseline.metrics.keys()
    for name, value in step.metrics.items():
        if not name.startswith(("timing_s", "perf")):
            # The entropy is of the policies that were trained, the other metrics of the previous one.
            within = 1e-2 if name == "actor/entropy" else 1e-3
            assert value == pytest.approx(baseline.metrics[name], rel=within, abs=1e-5), name
