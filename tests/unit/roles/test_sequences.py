"""Rows that are several sequences: the model computes each alone, and a loss weighs each row once."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ppo_runs import ppo_config
from torch import Tensor

from camshaft.algorithms import Counts, aggregate
from camshaft.algorithms.losses import AGGREGATIONS
from camshaft.config import PPOConfig, Topology
from camshaft.dataproto import DataProto, Ragged
from camshaft.roles import ActorWorker, CriticWorker
from camshaft.roles.base import as_sequences, loss_counts, mini_batches
from camshaft.roles.sequences import SEQUENCES, last_sequences, split_rows, whole_rows
from camshaft.trainer.advantages import compute_advantages, load_estimator

ACTOR = "actor_rollout_ref.actor"


def session_batch() -> DataProto:
    """Build three episodes. The second has three rows, the last of which continues the first."""
    responses = [[11, 12], [21, 22, 23, 31, 32, 24, 20, 21, 22, 25, 26], [13, 14, 15]]
    mask = [[1, 1], [1, 0, 1, 0, 0, 1, 0, 0, 0, 1, 1], [1, 1, 1]]
    return DataProto.from_dict(
        {
            "prompts": Ragged.from_rows([[1, 2], [20], [3]], torch.int64),
            "responses": Ragged.from_rows(responses, torch.int64),
            "response_mask": Ragged.from_rows(mask, torch.bool),
            SEQUENCES: Ragged.from_rows(
                [torch.tensor(pairs) for pairs in ([[0, 2]], [[0, 3], [2, 1], [1, 4]], [[0, 3]])]
            ),
        }
    )


EXPANDED = ([1, 2, 11, 12], [20, 21, 22, 23], [31, 32, 24], [20, 21, 22, 25, 26], [3, 13, 14, 15])
"""The sequences of `session_batch`, written out."""
EXPANDED_MASK = ([0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 1], [0, 0, 0, 1, 1], [0, 1, 1, 1])
PROMPT_LENGTHS = (2, 1, 2, 1, 1)
OWNERS = (0, 1, 1, 1, 2)
NUM_TOKENS = (2, 5, 3)
"""Masked-in tokens of each episode."""


def expanded(**columns: Ragged) -> DataProto:
    """Return `EXPANDED` as a batch of single sequences, with the values of sampled tokens of columns."""
    pairs = [(row[:n], row[n:]) for row, n in zip(EXPANDED, PROMPT_LENGTHS, strict=True)]
    mask = Ragged.from_rows([row[n:] for row, n in zip(EXPANDED_MASK, PROMPT_LENGTHS, strict=True)], torch.bool)
    batch = DataProto.from_dict(
        {
            "prompts": Ragged.from_rows([prompt for prompt, _ in pairs], torch.int64),
            "responses": Ragged.from_rows([response for _, response in pairs], torch.int64),
            "response_mask": mask,
        }
    )
    sampled = session_batch()["response_mask"].values
    for name, column in columns.items():
        values = torch.zeros(len(mask.values))
        values[mask.values] = column.values[sampled]
        batch = batch.with_columns(**{name: mask.like(values)})
    return batch


def with_numbers(batch: DataProto) -> DataProto:
    """Add the columns that losses read."""
    generator, like = torch.Generator().manual_seed(3), batch.ragged("responses")
    names = ("advantages", "old_log_probs", "values", "returns")
    numbers = {name: like.like(torch.randn(len(like.values), generator=generator)) for name in names}
    numbers["old_log_probs"] = numbers["old_log_probs"].map(lambda values: values - 6)
    return batch.with_columns(**numbers)


def test_the_model_gets_each_sequence_alone() -> None:
    sequences = as_sequences(session_batch())
    assert [row.tolist() for row in sequences.ragged("input_ids").rows()] == list(EXPANDED)
    assert [row.int().tolist() for row in sequences.ragged("loss_mask").rows()] == list(EXPANDED_MASK)
    torch.testing.assert_close(sequences["sequence_weight"], torch.tensor([1, 2 / 5, 1 / 5, 2 / 5, 1]))
    assert sequences.ragged("responses").lengths.tolist() == [2, 3, 3, 5, 3]


def test_predictions_return_to_the_rows() -> None:
    batch = session_batch()
    predictions = whole_rows({"log_probs": as_sequences(batch).ragged("input_ids")}, batch)
    responses = predictions["log_probs"].suffix(batch.ragged("responses").lengths)
    assert torch.equal(responses.values, batch["responses"].values)


def test_a_reward_model_reads_the_last_sequence() -> None:
    columns = last_sequences(session_batch())
    joined = Ragged.join(columns.ragged("prompts"), columns.ragged("responses"))
    assert [row.tolist() for row in joined.rows()] == [EXPANDED[0], EXPANDED[3], EXPANDED[4]]
    assert columns["response_mask"].values.int().tolist() == [1, 1, 0, 0, 0, 1, 1, 1, 1, 1]


def test_an_episode_with_two_rows_counts_once_in_its_group(home: Path) -> None:
    lengths = [[[0, 2], [1, 1]], [[0, 2]], [[0, 2]], [[0, 2]]]
    mask = Ragged.from_rows([[1, 1, 0, 1], [1, 1], [1, 1], [1, 1]], torch.bool)
    scores = mask.like(torch.tensor([0.0, 0, 0, 1, 0, 0, 0, 0, 0, 0]))
    columns = {"response_mask": mask, "token_level_rewards": scores, "uid": ["q"] * 4}
    batch = DataProto.from_dict({**columns, SEQUENCES: Ragged.from_rows([torch.tensor(row) for row in lengths])})
    keys = {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False}
    algorithm = ppo_config(home, keys).algorithm
    advantages = compute_advantages(batch, algorithm, load_estimator(algorithm))["advantages"].values[mask.values]
    assert advantages.tolist() == [0.75] * 3 + [-0.25] * 6


def test_the_score_reaches_the_answers_of_all_rows(home: Path) -> None:
    batch, keys = session_batch(), {"algorithm.adv_estimator": "gae", "algorithm.gamma": 0.5, "algorithm.lam": 1.0}
    mask = batch.ragged("response_mask")
    rewards = torch.zeros(len(mask.values))
    rewards[[1, 12, 15]] = 1.0  # the last sampled token of each episode
    columns = {"token_level_rewards": mask.like(rewards), "values": mask.like(torch.zeros_like(rewards))}
    algorithm = ppo_config(home, keys).algorithm
    returns = compute_advantages(batch.with_columns(**columns), algorithm, load_estimator(algorithm))["returns"]
    assert returns.values[mask.values].tolist() == [0.5, 1, 0.0625, 0.125, 0.25, 0.5, 1, 0.25, 0.5, 1]


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_an_episode_weighs_as_much_as_one_row(mode: str) -> None:
    batch = with_numbers(session_batch())
    mask = batch.ragged("response_mask")
    whole = Counts.of(mask, {"num_tokens": 10.0, "num_sequences": 3.0}, horizon=7)
    expected = aggregate(batch["advantages"].values, whole, mode)
    sequences = split_rows(batch)
    ctx: Any = {"num_tokens": 10.0, "num_sequences": float(sequences["sequence_weight"].sum())}
    shares = [
        aggregate(part["advantages"].values, loss_counts(part, ctx, horizon=7), mode)
        for part in (sequences.reorder([3, 0]), sequences.reorder([4, 1, 2]))
    ]
    torch.testing.assert_close(sum(shares), expected)
    unweighted = Counts.of(sequences.ragged("response_mask"), {"num_tokens": 10.0, "num_sequences": 5.0}, 7)
    changed = aggregate(sequences["advantages"].values, unweighted, mode)
    assert bool((changed - expected).abs() > 1e-3) == mode.startswith("seq")


def gradient(role: ActorWorker | CriticWorker, batch: DataProto, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the gradient of one mini-batch."""
    loss: Any = partial(role._loss, "actor") if isinstance(role, ActorWorker) else role._loss
    outputs = ("log_probs",) if isinstance(role, ActorWorker) else ("values",)
    rows = batch.select(*(n for n in ("prompts", "responses", "response_mask", SEQUENCES) if n in batch), *names)
    engine: Any = role.engine
    with engine.train_mode():
        engine.set_loss_fn(loss)
        engine.optimizer_zero_grad()
        for mini_batch in mini_batches(rows, len(rows), 1, None, presharded=True):
            engine.forward_backward_step(mini_batch, {"outputs": outputs})
        named = engine.module.named_parameters()
        return {name: weight.grad.clone() for name, weight in named if weight.grad is not None}


def config_of(home: Path, mode: str, **more: Any) -> PPOConfig:
    return ppo_config(home, {f"{ACTOR}.loss_agg_mode": mode, "critic.loss_agg_mode": mode, **more})


def built(role: Any, config: PPOConfig) -> Any:
    worker = role(config, Topology(1), 10)
    worker.init_model()
    worker.entropy_coeff = 0.0
    return worker


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_an_update_equals_that_of_the_rows_written_out(home: Path, mode: str) -> None:
    # The policy gradient is linear in the advantages while no ratio is clipped, so the weights of the mode, which are
    # those of its definition for whole episodes, can be multiplied to the advantages of single sequences.
    factors = {
        "token-mean": [1 / 10] * 3,
        "seq-mean-token-mean": [1 / (3 * count) for count in NUM_TOKENS],
        "seq-mean-token-sum": [1 / 3] * 3,
    }[mode]
    batch = with_numbers(session_batch())
    actor = built(ActorWorker, config_of(home, mode))
    batch = batch.with_columns(old_log_probs=actor.compute_log_prob(batch)["old_log_probs"])
    by_hand = expanded(advantages=batch.ragged("advantages"), old_log_probs=batch.ragged("old_log_probs"))
    plain = built(ActorWorker, config_of(home, "token-sum"))
    old = plain.compute_log_prob(by_hand)["old_log_probs"].values
    mask = by_hand["response_mask"].values
    torch.testing.assert_close(old[mask], by_hand["old_log_probs"].values[mask], atol=1e-5, rtol=0)
    scale = torch.tensor([factors[owner] for owner in OWNERS])[by_hand.ragged("responses").row_ids()]
    by_hand = by_hand.with_columns(advantages=by_hand.ragged("advantages").map(lambda values: values * scale))
    names = ("advantages", "old_log_probs")
    expected = gradient(plain, by_hand, names)
    actual = gradient(actor, batch, names)
    assert max(float(grad.abs().max()) for grad in expected.values()) > 1e-2
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, atol=1e-5, rtol=1e-4)


def test_a_critic_computes_the_values_of_the_rows_written_out(home: Path) -> None:
    batch = with_numbers(session_batch())
    critic = built(CriticWorker, config_of(home, "token-mean"))
    by_hand = expanded(**{name: batch.ragged(name) for name in ("values", "returns")})
    mask, sampled = by_hand["response_mask"].values, batch["response_mask"].values
    values, expected = critic.compute_values(batch)["values"].values, critic.compute_values(by_hand)["values"].values
    torch.testing.assert_close(values[sampled], expected[mask], atol=1e-5, rtol=0)
    for name, grad in gradient(critic, by_hand, ("values", "returns")).items():
        actual = gradient(critic, batch, ("values", "returns"))[name]
        torch.testing.assert_close(actual, grad, atol=1e-5, rtol=1e-4)


def test_an_update_returns_log_probs_of_the_rows(home: Path) -> None:
    batch = with_numbers(session_batch()).drop("old_log_probs")
    actor = built(ActorWorker, config_of(home, "token-mean", **{f"{ACTOR}.ppo_mini_batch_size": 8}))
    expected = actor.compute_log_prob(batch)
    actor.mini_batch_size = len(batch)
    result = actor.update_actor(batch, presharded=True, old_log_probs="update")
    for name in ("old_log_probs", "entropy"):
        if name in result:
            assert torch.equal(result.ragged(name).lengths, batch.ragged("responses").lengths)
            sampled = batch["response_mask"].values
            torch.testing.assert_close(result[name].values[sampled], expected[name].values[sampled])
    assert "old_log_probs" in result
