"""Roles without a controller, compared with transformers."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ppo_runs import ppo_config, weights_of
from support.processes import start_fork_server
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from camshaft.config import PPOConfig, Topology
from camshaft.controller import shutdown, spawn
from camshaft.controller.local import PRELOAD
from camshaft.controller.worker import RankInfo, build_worker
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import BatchError, ConfigError, EngineError, RolloutError
from camshaft.roles import ActorRolloutRefWorker, ActorWorker, CriticWorker, RefWorker, RolloutWorker
from camshaft.roles.actor import _checked_loss
from camshaft.roles.base import as_sequences, select_responses
from camshaft.seat import Seat
from camshaft.trainer.mini_batches import shard_rows

TEMPERATURE = 0.7
STEPS = 10


def config_of(home: Path, **overrides: Any) -> PPOConfig:
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    return ppo_config(home, {"actor_rollout_ref.rollout.temperature": TEMPERATURE, **keys})


def rows(*lengths: int, seed: int = 0) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    return Ragged.from_rows([torch.randint(3, 100, (length,), generator=generator) for length in lengths], torch.int64)


def batch_of() -> DataProto:
    """Build four rows; a tool wrote the third token of the second response."""
    prompts, responses = rows(3, 5, 2, 4), rows(4, 6, 1, 3, seed=1)
    mask = responses.map(lambda ids: torch.ones_like(ids, dtype=torch.bool))
    mask.values[4 + 2] = False
    return DataProto.from_dict({"prompts": prompts, "responses": responses, "response_mask": mask})


def learnable(**more: Ragged) -> DataProto:
    batch = batch_of()
    like = batch.ragged("responses").map(Tensor.float)
    generator = torch.Generator().manual_seed(2)
    noise = [like.like(torch.randn(len(like.values), generator=generator)) for _ in range(3)]
    columns = {"advantages": noise[0], "values": noise[1], "returns": noise[2], **more}
    return batch.with_columns(**columns)


@cache
def hf_model(folder: Path, kind: Any) -> Any:
    return kind.from_pretrained(folder)


def hf_log_probs(folder: Path, batch: DataProto) -> tuple[list[Tensor], list[Tensor]]:
    """Return (log-probs, entropies) of the response tokens, row by row; 0 for tokens of a tool."""
    log_probs, entropies = [], []
    columns = (batch.ragged(name).rows() for name in ("prompts", "responses", "response_mask"))
    for prompt, response, mask in zip(*columns, strict=True):
        with torch.no_grad():
            logits = hf_model(folder, AutoModelForCausalLM)(torch.cat([prompt, response])[None]).logits[0]
        spread = (logits[len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
        log_probs.append(spread.gather(-1, response[:, None])[:, 0] * mask)
        entropies.append(-(spread.exp() * spread).sum(-1) * mask)
    return log_probs, entropies


# -- common to all roles --------------------------------------------------------------------------


def test_a_batch_collects_the_answers_of_two_ranks(home: Path) -> None:
    start_fork_server(*PRELOAD, "camshaft.roles", "transformers.models.llama.modeling_llama")
    kl = {"actor_rollout_ref__actor__use_kl_loss": True}
    config = config_of(home, actor_rollout_ref__actor__strategy="fsdp", trainer__n_gpus_per_node=2, **kl)
    worker = spawn(ActorRolloutRefWorker, config, Topology(2), STEPS, world_size=2)
    try:
        worker.init_model()
        batch = prompts()
        batch = batch.union(worker.generate_sequences(batch))
        batch = batch.union(worker.compute_ref_log_prob(batch))
    finally:
        shutdown(worker)
    # The actor has not been updated, so it is the reference.
    torch.testing.assert_close(batch["ref_log_prob"].values, batch["old_log_probs"].values, rtol=1e-5, atol=1e-6)


def test_a_sequence_is_prompt_plus_response_with_response_mask() -> None:
    batch = DataProto.from_dict(
        {
            "prompts": Ragged.from_rows([[1, 2], [3]]),
            "responses": Ragged.from_rows([[4], [5, 6, 7]]),
            "response_mask": Ragged.from_rows([[True], [True, False, True]]),
        }
    )
    sequences = as_sequences(batch)
    assert [row.tolist() for row in sequences.ragged("input_ids").rows()] == [[1, 2, 4], [3, 5, 6, 7]]
    assert sequences.ragged("loss_mask").values.int().tolist() == [0, 0, 1, 0, 1, 0, 1]
    predictions = {"values": sequences.ragged("input_ids").map(lambda ids: 10 * ids)}
    assert [row.tolist() for row in select_responses(predictions, "values", sequences).rows()] == [[40], [50, 60, 70]]


# -- actor ----------------------------------------------------------------------------------------


def test_log_probs_and_entropy_match_transformers_at_the_temperature(home: Path) -> None:
    actor = ActorWorker(config_of(home), Topology(1), STEPS)
    actor.init_model()
    result, batch = actor.compute_log_prob(batch_of()), batch_of()
    log_probs, entropies = hf_log_probs(home / "actor", batch)
    assert result["old_log_probs"].lengths.tolist() == batch["responses"].lengths.tolist()
    torch.testing.assert_close(result["old_log_probs"].values, torch.cat(log_probs), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result["entropy"].values, torch.cat(entropies), rtol=1e-4, atol=1e-5)


BASIC = {"pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "grad_norm", "lr", "skipped_steps"}


@pytest.mark.parametrize(
    ("overrides", "more"),
    [
        ({}, set()),
        ({"actor_rollout_ref__actor__use_kl_loss": True}, {"kl_loss"}),
        ({"actor_rollout_ref__actor__entropy_coeff": 0.01}, set()),
    ],
    ids=["clipped", "with KL", "with entropy"],
)
def test_an_actor_update_returns_metrics_and_changes_weights(
    overrides: dict[str, Any], more: set[str], home: Path
) -> None:
    actor = ActorWorker(config_of(home, **overrides), Topology(1), STEPS)
    actor.init_model()
    before = {name: weight.clone() for name, weight in actor.engine.named_weights()}
    batch = batch_of()
    old = actor.compute_log_prob(batch).ragged("old_log_probs")
    metrics = actor.update_actor(learnable(old_log_probs=old, ref_log_prob=old)).meta_info["metrics"]
    assert metrics.keys() == {f"actor/{name}" for name in BASIC | more}
    assert all(isinstance(value, float) for value in metrics.values())
    assert any(not torch.equal(before[name], weight) for name, weight in actor.engine.named_weights())
    assert metrics["actor/lr"] == 1e-3


def test_the_first_loss_is_worked_out_by_hand(home: Path) -> None:
    # Before the first update every ratio is 1, so the loss is minus the mean advantage of the policy's tokens.
    actor = ActorWorker(config_of(home), Topology(1), STEPS)
    actor.init_model()
    batch = learnable(old_log_probs=actor.compute_log_prob(batch_of()).ragged("old_log_probs"))
    metrics = actor.update_actor(batch).meta_info["metrics"]
    chosen = batch["advantages"].values[batch["response_mask"].values]
    assert metrics["actor/pg_loss"] == pytest.approx(-float(chosen.mean()), rel=1e-4, abs=1e-6)
    assert metrics["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)


def test_presharded_rows_are_trained_in_their_order(home: Path) -> None:
    config = config_of(home, actor_rollout_ref__actor__ppo_epochs=2, actor_rollout_ref__actor__ppo_mini_batch_size=2)

    def trained(presharded: bool) -> dict[str, float]:
        actor = ActorWorker(config, Topology(1), STEPS)
        actor.init_model()
        batch = learnable(old_log_probs=actor.compute_log_prob(batch_of()).ragged("old_log_probs"))
        if presharded:
            batch = batch.reorder(shard_rows(len(batch), mini_batch=2, epochs=2, seed=7, dp_size=1))
        return actor.update_actor(batch, seed=7, presharded=presharded).meta_info["metrics"]

    assert trained(presharded=True) == trained(presharded=False)


@pytest.mark.parametrize(("loss", "mode"), [("vanilla", "token-mean"), ("gspo", "seq-mean-token-mean")])
def test_a_single_step_update_computes_old_log_probs(home: Path, loss: str, mode: str) -> None:
    actor_keys = {"policy_loss__loss_mode": loss, "loss_agg_mode": mode}
    keys: dict[str, Any] = {f"actor_rollout_ref__actor__{key}": value for key, value in actor_keys.items()}
    # Adam turns a gradient of 1e-10, a rounding error of zero, into a step of lr; this eps prevents it.
    keys["+actor_rollout_ref__actor__optim__override_optimizer_config__eps"] = 1e-5
    config = config_of(home, data__train_batch_size=4, **keys)
    before, at_once = (ActorWorker(config, Topology(1), STEPS) for _ in range(2))
    before.init_model()
    at_once.init_model()
    log_probs = before.compute_log_prob(batch_of())
    expected = before.update_actor(learnable(old_log_probs=log_probs.ragged("old_log_probs"))).meta_info["metrics"]
    update = at_once.update_actor(learnable(), old_log_probs="update")
    assert update.meta_info["metrics"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert update.columns.keys() == log_probs.columns.keys()
    for name in log_probs.columns:
        torch.testing.assert_close(update[name].values, log_probs[name].values, rtol=1e-4, atol=1e-5)
    for (name, weight), (_, other) in zip(before.engine.named_weights(), at_once.engine.named_weights(), strict=True):
        torch.testing.assert_close(weight, other, rtol=0, atol=1e-5, msg=name)


def test_updates_with_several_steps_need_old_log_probs(home: Path) -> None:
    actor = ActorWorker(config_of(home, data__train_batch_size=4), Topology(1), STEPS)
    actor.init_model()
    with pytest.raises(BatchError, match=r"12 rows exceeds one mini-batch of 4 rows, .*; call compute_log_prob"):
        actor.update_actor(DataProto.concat([learnable()] * 3), old_log_probs="update")


MINI_BATCH = "actor_rollout_ref__actor__ppo_mini_batch_size"


@pytest.mark.parametrize(
    "more",
    [
        {MINI_BATCH: 4},
        {MINI_BATCH: 8, "actor_rollout_ref__actor__ppo_epochs": 2},
        {MINI_BATCH: 8, "algorithm__use_kl_in_reward": True},
        {MINI_BATCH: 8, "algorithm__rollout_correction__rollout_is": "token"},
    ],
    ids=["steps", "epochs", "KL in the reward", "correction"],
)
def test_an_update_without_its_columns_names_their_source(home: Path, more: dict[str, Any]) -> None:
    actor = ActorWorker(config_of(home, **more), Topology(1), STEPS)
    actor.init_model()
    with pytest.raises(BatchError, match=r"'old_log_probs' \(written by roles/actor.compute_log_prob or roles/actor"):
        actor.update_actor(learnable())


# -- critic ---------------------------------------------------------------------------------------


def test_values_match_transformers(home: Path) -> None:
    critic = CriticWorker(config_of(home), Topology(1), STEPS)
    critic.init_model()
    result, batch = critic.compute_values(batch_of()).ragged("values"), batch_of()
    columns = (batch.ragged(name).rows() for name in ("prompts", "responses", "response_mask"))
    for values, prompt, response, mask in zip(result.rows(), *columns, strict=True):
        with torch.no_grad():
            model = hf_model(home / "critic", AutoModelForTokenClassification)
            logits = model(torch.cat([prompt, response])[None]).logits[0, :, 0]
        # The value of a token is that of the state in which it was chosen.
        torch.testing.assert_close(values, logits[len(prompt) - 1 : -1] * mask, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("result", [torch.tensor(1.0), (torch.ones(3), {}), (torch.tensor(1.0), None), None])
def test_a_policy_loss_that_breaks_its_contract_is_named(result: Any) -> None:
    loss = torch.tensor(1.0)
    assert _checked_loss("my:loss", (loss, {})) == (loss, {})
    with pytest.raises(ConfigError, match=r"loss_mode=my:loss returned .*; return the loss, a scalar tensor"):
        _checked_loss("my:loss", result)


def test_a_critic_update_returns_metrics_and_reduces_the_loss(home: Path) -> None:
    critic = CriticWorker(config_of(home, critic__ppo_epochs=3), Topology(1), STEPS)
    critic.init_model()
    batch = learnable(values=critic.compute_values(batch_of()).ragged("values"))
    chosen = batch["response_mask"].values

    def distance() -> float:
        now = critic.compute_values(batch_of()).ragged("values").values
        return float((now - batch["returns"].values)[chosen].square().mean())

    before = distance()
    metrics = critic.update_critic(batch).meta_info["metrics"]
    names = {"vf_loss", "vf_clipfrac", "vpred_mean", "grad_norm", "lr", "skipped_steps"}
    assert metrics.keys() == {f"critic/{name}" for name in names}
    assert distance() < before


# -- reference, rollout, and all three combined ---------------------------------------------------


def test_the_reference_keeps_the_initial_weights_of_the_actor(home: Path) -> None:
    worker = ActorRolloutRefWorker(config_of(home, algorithm__use_kl_in_reward=True), Topology(1), STEPS)
    worker.init_model()
    old = worker.compute_log_prob(batch_of()).ragged("old_log_probs")
    before = worker.compute_ref_log_prob(batch_of()).ragged("ref_log_prob")
    assert torch.equal(before.values, old.values)
    worker.update_actor(learnable(old_log_probs=old))
    assert torch.equal(worker.compute_ref_log_prob(batch_of()).ragged("ref_log_prob").values, before.values)
    assert not torch.equal(worker.compute_log_prob(batch_of()).ragged("old_log_probs").values, old.values)


def test_a_separate_reference_gives_the_same_log_probs(home: Path) -> None:
    ref = RefWorker(config_of(home, algorithm__use_kl_in_reward=True), Topology(1))
    ref.init_model()
    actual = ref.compute_ref_log_prob(batch_of()).ragged("ref_log_prob")
    expected = torch.cat(hf_log_probs(home / "actor", batch_of())[0])
    torch.testing.assert_close(actual.values, expected, rtol=1e-4, atol=1e-5)


def test_with_lora_the_reference_is_the_actors_base_model(home: Path) -> None:
    lora = {"actor_rollout_ref__model__lora_rank": 4, "algorithm__use_kl_in_reward": True}
    worker = ActorRolloutRefWorker(config_of(home, **lora), Topology(1), STEPS)
    worker.init_model()
    assert worker.ref is not None
    assert worker.ref.engine is worker.actor.engine
    old = worker.compute_log_prob(batch_of()).ragged("old_log_probs")
    for _ in range(3):  # half of the trained weights start at zero; the other half gets no gradient until they change
        worker.update_actor(learnable(old_log_probs=old))
    expected = torch.cat(hf_log_probs(home / "actor", batch_of())[0])
    actual = worker.compute_ref_log_prob(batch_of()).ragged("ref_log_prob")
    torch.testing.assert_close(actual.values, expected, rtol=1e-4, atol=1e-5)
    moved = worker.compute_log_prob(batch_of()).ragged("old_log_probs").values
    assert float((moved - expected).abs().max()) > 1e-3


def test_an_unused_reference_is_not_built(home: Path) -> None:
    worker = ActorRolloutRefWorker(config_of(home), Topology(1), STEPS)
    worker.init_model()
    assert worker.ref is None
    with pytest.raises(EngineError, match="use_kl_in_reward=True"):
        worker.compute_ref_log_prob(batch_of())


@pytest.fixture(scope="module")
def worker(home: Path) -> ActorRolloutRefWorker:
    worker = ActorRolloutRefWorker(config_of(home), Topology(1), STEPS)
    worker.init_model()
    return worker


def prompts() -> DataProto:
    return DataProto.from_dict({"prompts": rows(3, 5, 2, 4), "sampling_seed": torch.arange(4)})


def test_generation_recomputes_old_log_probs_unless_disabled(worker: ActorRolloutRefWorker) -> None:
    generation = worker.generate_sequences(prompts())
    again = worker.compute_log_prob(prompts().union(DataProto(generation.columns)))
    assert torch.equal(generation["old_log_probs"].values, again["old_log_probs"].values)
    torch.testing.assert_close(
        generation["old_log_probs"].values, generation["rollout_log_probs"].values, rtol=0, atol=1e-5
    )
    assert "rollout/response_tokens" in generation.meta_info["metrics"]
    assert "old_log_probs" not in worker.generate_sequences(prompts(), recompute_log_prob=False)


def test_responses_depend_only_on_the_seed_of_their_row(worker: ActorRolloutRefWorker) -> None:
    first = worker.generate_sequences(prompts())["responses"].rows()
    turned = worker.generate_sequences(prompts().reorder([3, 0]))["responses"].rows()
    assert [row.tolist() for row in turned] == [first[3].tolist(), first[0].tolist()]
    other = worker.generate_sequences(prompts().with_columns(sampling_seed=torch.arange(4) + 100))["responses"].rows()
    assert [row.tolist() for row in other] != [row.tolist() for row in first]


def test_responses_end_at_the_limit_or_at_eos(worker: ActorRolloutRefWorker) -> None:
    generation = worker.generate_sequences(prompts())
    ends = [int(row[-1]) for row in generation["responses"].rows()]
    end = hf_model(Path(worker.actor.config.actor_rollout_ref.model.path), AutoModelForCausalLM).config.eos_token_id
    assert [token == end for token in ends] == generation["finished"].tolist()
    assert all(length == 8 for length in generation["responses"].lengths[~generation["finished"]].tolist())
    assert bool(generation["response_mask"].values.all())


def test_validation_is_greedy_for_any_seed(worker: ActorRolloutRefWorker) -> None:
    batch = prompts()
    first = worker.generate_sequences(batch, validate=True)["responses"].values
    seeded = batch.with_columns(sampling_seed=torch.arange(4) + 100)
    other = worker.generate_sequences(seeded, validate=True)["responses"].values
    assert torch.equal(first, other)
    ids = (
        as_sequences(prompts().union(DataProto(worker.generate_sequences(batch, validate=True).columns)))
        .ragged("input_ids")
        .rows()
    )
    with torch.no_grad():
        logits = hf_model(Path(worker.actor.config.actor_rollout_ref.model.path), AutoModelForCausalLM)(
            ids[0][None]
        ).logits
    assert logits[0, 2:-1].argmax(-1).tolist() == ids[0][3:].tolist()


def test_one_sync_serves_all_calls_until_sleep_rollout(worker: ActorRolloutRefWorker) -> None:
    alone, rollout = worker.generate_sequences(prompts()), worker.rollout.rollout
    version = rollout.version
    metrics = worker.sync_weights()
    assert metrics["rollout/sync_bytes"] == alone.meta_info["metrics"]["rollout/sync_bytes"] > 0
    for _ in range(2):
        out = worker.generate_sequences(prompts())
        assert torch.equal(out["responses"].values, alone["responses"].values)
        assert torch.equal(out["old_log_probs"].values, alone["old_log_probs"].values)
        assert not metrics.keys() & out.meta_info["metrics"].keys()
    assert rollout.version == version + 1
    worker.sleep_rollout()
    worker.sleep_rollout()
    with pytest.raises(RolloutError, match="asleep"):
        rollout.weight_digests()


def test_the_actor_trains_only_while_the_rollout_sleeps(home: Path) -> None:
    worker = ActorRolloutRefWorker(config_of(home), Topology(1), STEPS)
    worker.init_model()
    batch = learnable(old_log_probs=worker.compute_log_prob(batch_of()).ragged("old_log_probs"))
    before = worker.generate_sequences(prompts())["rollout_log_probs"].values
    worker.sync_weights()
    with pytest.raises(EngineError, match=r"call sleep_rollout\(\) of the role, before training"):
        worker.update_actor(batch)
    worker.sleep_rollout()
    worker.update_actor(batch)
    assert not torch.equal(worker.generate_sequences(prompts())["rollout_log_probs"].values, before)


def test_a_failed_generation_puts_the_rollout_to_sleep(worker: ActorRolloutRefWorker) -> None:
    empty = DataProto.from_dict({"prompts": Ragged.from_rows([[]], torch.int64)})
    worker.sync_weights()
    with pytest.raises(RolloutError, match="empty prompt"):
        worker.generate_sequences(empty)
    with pytest.raises(RolloutError, match="asleep"):
        worker.rollout.rollout.weight_digests()
    assert "timing_s/sync" in worker.generate_sequences(prompts()).meta_info["metrics"]


def test_a_rollout_without_an_engine_generates_with_its_own_weights(worker: ActorRolloutRefWorker) -> None:
    config = worker.actor.config
    alone = build_worker(RolloutWorker, RankInfo(rank=1, world=3), [config], {})
    assert alone.seat == Seat(rank=1, world=3, dp_rank=1, dp_size=3)
    alone.init_model()
    with pytest.raises(RolloutError, match="this rollout has no engine"):
        alone.sync_weights()
    alone.rollout.load_weights(worker.actor.engine.named_weights(), 7)
    outs = [alone.generate_sequences(prompts()) for _ in range(2)]
    expected = worker.generate_sequences(prompts())
    for out in outs:
        assert torch.equal(out["responses"].values, expected["responses"].values)
        assert torch.equal(out["rollout_log_probs"].values, expected["rollout_log_probs"].values)
    assert alone.rollout.version == 7


def test_a_checkpoint_of_a_role_reproduces_its_next_update(home: Path, tmp_path: Path) -> None:
    def fresh() -> ActorRolloutRefWorker:
        worker = ActorRolloutRefWorker(config_of(home), Topology(1), STEPS)
        worker.init_model()
        return worker

    first, second = fresh(), fresh()
    batch = learnable(old_log_probs=first.compute_log_prob(batch_of()).ragged("old_log_probs"))
    first.update_actor(batch)
    first.save_checkpoint(str(tmp_path / "actor"))
    second.load_checkpoint(str(tmp_path / "actor"))
    metrics = [worker.update_actor(batch).meta_info["metrics"] for worker in (first, second)]
    assert metrics[0] == metrics[1]
    log_probs = [worker.compute_log_prob(batch_of())["old_log_probs"].values for worker in (first, second)]
    assert torch.equal(*log_probs)


# -- tokens that the policy has not sampled ---------------------------------------------------------

POISONED = {"actor": ("old_log_probs", "advantages", "rollout_is_weights"), "critic": ("values", "returns")}
POISON_LAYOUTS: dict[str, dict[str, Any]] = {
    "reference": {},
    "fsdp": {"actor_rollout_ref__actor__strategy": "fsdp", "critic__strategy": "fsdp", "trainer__n_gpus_per_node": 2},
}


def poisoned(batch: DataProto, names: tuple[str, ...], value: float) -> DataProto:
    """Return the batch with `value` in these columns at the tokens that were not sampled."""
    mask = batch["response_mask"].values
    return batch.with_columns(**{name: batch.ragged(name).map(lambda v: v.where(mask, value)) for name in names})


def updated(role: str, config: PPOConfig, world_size: int, batch: DataProto) -> dict[str, Tensor]:
    """Return the weights of a new actor or critic after an update."""
    kind: Any = ActorRolloutRefWorker if role == "actor" else CriticWorker
    worker = spawn(kind, config, Topology(world_size), STEPS, world_size=world_size)
    try:
        worker.init_model()
        update = worker.update_actor if role == "actor" else worker.update_critic
        update(batch)
        return weights_of(worker)
    finally:
        shutdown(worker)


@pytest.mark.parametrize("layout", POISON_LAYOUTS)
@pytest.mark.parametrize("role", POISONED)
def test_values_at_tokens_that_were_not_sampled_change_no_weight(home: Path, role: str, layout: str) -> None:
    start_fork_server(*PRELOAD, "camshaft.roles", "transformers.models.llama.modeling_llama")
    config, size = config_of(home, **POISON_LAYOUTS[layout]), 1 if layout == "reference" else 2
    weights = {"rollout_is_weights": batch_of().ragged("responses").map(lambda ids: 1 + ids % 3 / 10)}
    old = {"old_log_probs": batch_of().ragged("responses").map(lambda ids: -1 - ids % 5 / 10)}
    batch = learnable(**old, **weights)
    clean = updated(role, config, size, poisoned(batch, POISONED[role], 0.0))
    for value in (float("nan"), 1e6):
        weights_after = updated(role, config, size, poisoned(batch, POISONED[role], value))
        assert weights_after.keys() == clean.keys()
        for name, weight in clean.items():
            assert torch.equal(weights_after[name], weight), name
    every = batch["response_mask"].map(torch.ones_like)
    counted = updated(role, config, size, poisoned(batch, POISONED[role], 0.0).with_columns(response_mask=every))
    assert any(not torch.equal(counted[name], weight) for name, weight in clean.items())
