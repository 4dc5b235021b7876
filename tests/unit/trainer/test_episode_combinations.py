"""Features of training on episodes, compared with what their definitions give for the sampled tokens alone."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.episodes import BY_ANSWER, BY_GAME, EPISODES, LENGTH, ROLLOUT, TURNS, game
from support.ppo_runs import ppo_config, weights_of
from torch import Tensor

from camshaft.dataproto import DataProto
from camshaft.tracking import RunInfo, Tracking
from camshaft.trainer.ppo import PPOTrainer
from camshaft.trainer.session import Extensions

ACTOR = "actor_rollout_ref.actor"
ROUNDING = 1e-5
RUN = RunInfo(project="test", experiment="test", folder=Path(), total_steps=2)


class Run:
    """The metrics, the batches and the last weights of a run."""

    def __init__(self, home: Path, settings: Mapping[str, Any], steps: int, reward: str, prompt: str):
        lengths = {"trainer.total_training_steps": steps, "trainer.total_epochs": steps}
        keys = {**EPISODES, f"{TURNS}.environment": game(home, reward, prompt), **lengths, **settings}
        self.metrics: list[dict[str, float]] = []
        self.batches: list[DataProto] = []
        with PPOTrainer.open(ppo_config(home, keys), Extensions(on_step=(self.record,))) as trainer:
            trainer.prepare()
            with Tracking([], RUN) as tracking:
                trainer.fit(tracking)
            self.actor = weights_of(trainer.actor)

    def record(self, step: int, batch: DataProto, metrics: dict[str, float]) -> None:
        self.metrics.append(metrics)
        self.batches.append(batch)


def trained(home: Path, steps: int = 1, reward: str = BY_ANSWER, prompt: str = "{seed % 10}", **keys: Any) -> Run:
    run = Run(home, {key.replace("__", "."): value for key, value in keys.items()}, steps, reward, prompt)
    for batch, metrics in zip(run.batches, run.metrics, strict=True):
        mask = batch.ragged("response_mask")
        assert metrics["agent/turns"] == 3
        assert not mask.values.all()
        assert mask.lengths.max() <= LENGTH
        if "old_log_probs" in batch:
            assert metrics["rollout/log_prob_diff_max"] < 1e-4
    return run


def sampled(batch: DataProto, name: str) -> Iterator[Tensor]:
    """Yield the values of a column at the sampled tokens of each row."""
    for values, mask in zip(batch.ragged(name).rows(), batch.ragged("response_mask").rows(), strict=True):
        yield values[mask].double()


def test_kl_penalties_count_sampled_tokens(home: Path) -> None:
    run = trained(
        home,
        steps=2,
        algorithm__use_kl_in_reward=True,
        algorithm__kl_penalty="kl",
        algorithm__kl_ctrl__kl_coef=0.1,
        actor_rollout_ref__actor__use_kl_loss=True,
        actor_rollout_ref__actor__kl_loss_type="low_var_kl",
        actor_rollout_ref__actor__loss_agg_mode="token-mean",
    )
    batch, metrics = run.batches[1], run.metrics[1]
    names = ("token_level_rewards", "token_level_scores", "old_log_probs", "ref_log_prob")
    kl: list[Tensor] = []
    for rewards, scores, old, ref in zip(*(sampled(batch, name) for name in names), strict=True):
        torch.testing.assert_close(rewards, scores - 0.1 * (old - ref), atol=ROUNDING, rtol=0)
        kl.append((ref - old).exp() - (ref - old) - 1)
    assert torch.cat(kl).mean() > 1e-6
    assert metrics["actor/kl_loss"] == pytest.approx(float(torch.cat(kl).mean()), rel=1e-3)
    outside = ~batch["response_mask"].values
    assert not batch["token_level_rewards"].values[outside].any()


def test_a_critic_skips_what_was_told(home: Path) -> None:
    gamma, lam = 0.9, 0.8
    (batch,) = trained(home, algorithm__adv_estimator="gae", algorithm__gamma=gamma, algorithm__lam=lam).batches
    rows: list[Tensor] = []
    for rewards, values in zip(sampled(batch, "token_level_rewards"), sampled(batch, "values"), strict=True):
        advantage, next_value, row = torch.tensor(0.0), torch.tensor(0.0), torch.zeros_like(values)
        for i in reversed(range(len(values))):
            advantage = rewards[i] + gamma * next_value - values[i] + gamma * lam * advantage
            row[i], next_value = advantage, values[i]
        rows.append(row)
    expected = torch.cat(rows)
    actual = torch.cat(list(sampled(batch, "advantages")))
    torch.testing.assert_close(actual, (expected - expected.mean()) / expected.std(), atol=1e-4, rtol=1e-4)
    returns, values = (torch.cat(list(sampled(batch, name))) for name in ("returns", "values"))
    torch.testing.assert_close(returns, expected + values, atol=1e-4, rtol=1e-4)


def test_dynamic_sampling_selects_groups_of_episodes(home: Path) -> None:
    keys: dict[str, Any] = {"algorithm__filter_groups__enable": True, "algorithm__filter_groups__metric": "seq_reward"}
    reward = "float(self.turn == 1 and ord(answer[0]) % 2 if answer else 0)"
    keys |= {"data__train_batch_size": 4, "data__gen_batch_size": 8, f"{ACTOR}.ppo_mini_batch_size": 4}
    run = trained(home, reward=reward, **keys)
    (batch,) = run.batches
    scores = batch.ragged("env_scores").sum()
    assert len(scores) == 4 * 2
    assert (scores.view(4, 2).amax(1) > scores.view(4, 2).amin(1)).all()
    assert run.metrics[0]["filter_groups/same_share"] > 0
    assert len(set(batch["uid"])) == 4


def test_a_greedy_episode_plays_the_same_game(home: Path) -> None:
    run = trained(home, reward=BY_GAME, algorithm__adv_estimator="remax")
    (batch,) = run.batches
    scores = batch.ragged("env_scores").sum()
    assert len(set(scores.tolist())) > 1
    assert torch.equal(batch["reward_baselines"], scores)
    assert all(values[0] == 0 for values in sampled(batch, "advantages"))  # return from the first turn - baseline


def test_the_overlong_penalty_counts_the_whole_episode(home: Path) -> None:
    section = "reward_model__overlong_buffer__"
    keys = {f"{section}enable": True, f"{section}len": 30, f"{section}penalty_factor": 2.0}
    (batch,) = trained(home, **keys).batches
    lengths = batch["responses"].lengths
    penalties = 2.0 * ((lengths - (LENGTH - 30)) / 30).clamp(0, 1)
    assert penalties.max() > 0
    expected = batch.ragged("env_scores").sum() - penalties
    torch.testing.assert_close(batch.ragged("token_level_scores").sum(), expected)
    assert not batch["token_level_scores"].values[~batch["response_mask"].values].any()


@pytest.mark.parametrize("prompt", ["{seed % 10}", "{row_seed % 10}"], ids=["one prompt", "two prompts"])
def test_prefix_sharing_changes_no_gradient(home: Path, prompt: str) -> None:
    plain, shared = (
        trained(home, prompt=prompt, actor_rollout_ref__model__use_prefix_grouper=share,
                actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=8) for share in (False, True)
    )  # fmt: skip
    assert plain.metrics[0]["actor/grad_norm"] == pytest.approx(shared.metrics[0]["actor/grad_norm"], rel=1e-4)
    for name, weight in plain.actor.items():
        torch.testing.assert_close(shared.actor[name], weight, atol=1e-3, rtol=0)  # of Adam with a rate of 1e-3
    lengths = plain.batches[0]["prompts"].lengths
    assert torch.equal(lengths, shared.batches[0]["prompts"].lengths)


def test_an_adapter_plays_and_learns(home: Path) -> None:
    run = trained(home, steps=2, actor_rollout_ref__model__lora_rank=4, actor_rollout_ref__model__lora_alpha=32)
    assert run.metrics[1]["actor/grad_norm"] > 0
    adapters = [weight for name, weight in run.actor.items() if "lora_B" in name]
    assert adapters
    assert all(weight.any() for weight in adapters)


PLACES: dict[str, dict[str, Any]] = {
    "process": {f"{ROLLOUT}.name": "process"},
    "two ranks": {f"{ACTOR}.strategy": "fsdp", "trainer.n_gpus_per_node": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_episodes_do_not_depend_on_where_they_are_played(home: Path, place: str) -> None:
    here, there = trained(home).batches[0], trained(home, **PLACES[place]).batches[0]
    assert list(there["transcript"]) == list(here["transcript"])
    for name in ("prompts", "responses", "response_mask", "env_scores"):
        assert torch.equal(there.ragged(name).values, here.ragged(name).values), name
