"""`custom_reward_function.on_error=drop`: a sample without a score does not change the others.

The oracle is the same computation on a batch that never had the row.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import even_digits
from support.ppo_runs import ppo_config, run_ppo, weights_of
from torch import Tensor

from camshaft.algorithms import ESTIMATORS, AdaptiveKL
from camshaft.config import AlgorithmConfig, PPOConfig, Topology
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import RewardError
from camshaft.models.loader import load_tokenizer
from camshaft.rewards.manager import RewardFailure, RewardResult
from camshaft.roles import ActorWorker, CriticWorker
from camshaft.trainer.advantages import add_scores, compute_advantages, compute_token_rewards, load_estimator

LENGTHS = (3, 2, 4, 1, 2, 3, 2, 2)
UIDS = ["0/1"] * 4 + ["0/2"] * 4
DROPPED = (1, 4)
KEPT = [row for row in range(len(LENGTHS)) if row not in DROPPED]


def estimated(batch: DataProto, config: AlgorithmConfig) -> DataProto:
    """Run `compute_advantages` with the configured estimator."""
    return compute_advantages(batch, config, load_estimator(config), {"score": 1.0})


def algorithm(home: Path, **keys: Any) -> AlgorithmConfig:
    overrides = {f"algorithm.{key}": value for key, value in keys.items()}
    return ppo_config(home, {"actor_rollout_ref.rollout.n": 4, **overrides}).algorithm


def batch_of(generator: torch.Generator) -> DataProto:
    """Build two prompts with four responses each, evaluated but not scored."""
    like = Ragged.from_rows([[0.0] * length for length in LENGTHS])
    noise = {name: torch.randn(sum(LENGTHS), generator=generator) for name in ("old_log_probs", "ref_log_prob")}
    columns: dict[str, Any] = {name: like.like(values) for name, values in noise.items()}
    columns["old_log_probs"] = like.like(-torch.rand(sum(LENGTHS), generator=generator) - 0.1)
    columns["sum_pi_squared"] = like.like(torch.full((sum(LENGTHS),), 0.5))
    columns["values"] = like.like(torch.randn(sum(LENGTHS), generator=generator))
    columns["response_mask"] = like.map(lambda values: torch.ones_like(values, dtype=torch.bool))
    columns["responses"] = like.map(lambda values: torch.full_like(values, 5, dtype=torch.int64))
    columns["prompts"] = Ragged.from_rows([[7, 8]] * len(LENGTHS))
    return DataProto.from_dict({**columns, "uid": UIDS})


def result_of(batch: DataProto, dropped: tuple[int, ...]) -> RewardResult:
    scores = torch.arange(1.0, len(batch) + 1)
    scores[list(dropped)] = 0.0
    placed = batch.ragged("values").map(torch.zeros_like)
    placed.values[placed.lengths.cumsum(0) - 1] = scores
    failure = RewardFailure(0, "error", "sums", "ValueError: no", "", 0.1, "12")
    parts_and_answers = ({},) * len(batch), (None,) * len(batch)
    return RewardResult(scores, {}, (failure,), *parts_and_answers, token_level_scores=placed, dropped=dropped)


def scored() -> tuple[DataProto, DataProto]:
    """Return (batch with two dropped rows, batch without those rows)."""
    batch = batch_of(torch.Generator().manual_seed(0))
    batch = add_scores(batch, result_of(batch, DROPPED))
    return batch, batch.reorder(torch.tensor(KEPT))


def kept_rows(column: Ragged) -> Tensor:
    return column.select(torch.tensor(KEPT)).values


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"remax"}))
def test_advantages_equal_those_of_a_batch_without_the_row(home: Path, name: str) -> None:
    chosen = algorithm(home, adv_estimator=name, gdpo_reward_keys="score")
    full, less = (batch.with_columns(token_level_rewards=batch["token_level_scores"]) for batch in scored())
    actual, expected = estimated(full, chosen), estimated(less, chosen)
    for column in ("advantages", "returns"):
        torch.testing.assert_close(kept_rows(actual.ragged(column)), expected[column].values)
        dropped = actual.ragged(column).select(torch.tensor(DROPPED)).values
        assert not dropped.any()


def test_a_prompt_without_a_baseline_is_dropped(home: Path) -> None:
    unscored = batch_of(torch.Generator().manual_seed(0))
    baselines = torch.tensor([torch.nan] * 4 + [2.5] * 4)
    batch = add_scores(unscored.with_columns(reward_baselines=baselines), result_of(unscored, (5,)))
    assert [bool(mask.any()) for mask in batch.ragged("response_mask").rows()] == [False] * 4 + [
        True,
        False,
        True,
        True,
    ]
    batch = batch.with_columns(token_level_rewards=batch["token_level_scores"])
    result = estimated(batch, algorithm(home, adv_estimator="remax"))
    # Scores 5, 7 and 8, each on its row's last token, are the reward-to-go of every token.
    rows = [row.tolist() for row in result.ragged("advantages").rows()]
    assert rows == [[0.0] * 3, [0.0] * 2, [0.0] * 4, [0.0], [2.5] * 2, [0.0] * 3, [4.5] * 2, [5.5] * 2]
    with pytest.raises(RewardError, match="drops all 8 responses"):
        add_scores(unscored.with_columns(reward_baselines=baselines), result_of(unscored, (4, 5, 6, 7)))


def test_a_dropped_row_does_not_change_the_kl_coefficient(home: Path) -> None:
    chosen = algorithm(home, use_kl_in_reward=True)
    controllers = [AdaptiveKL(0.5, target=0.1, horizon=100) for _ in range(2)]
    metrics = [
        compute_token_rewards(batch, chosen, control)[1] for batch, control in zip(scored(), controllers, strict=True)
    ]
    assert metrics[0] == pytest.approx(metrics[1])
    assert controllers[0].coef == pytest.approx(controllers[1].coef)
    assert controllers[0].coef != 0.5


def update(home: Path, batch: DataProto, mode: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of actor and critic after one update on the batch.

    Adam turns a gradient of 1e-10, a rounding error of zero, into a step of lr; this eps prevents it.
    """
    rows = len(batch)
    config: PPOConfig = ppo_config(
        home,
        {
            "data.train_batch_size": rows,
            "actor_rollout_ref.actor.ppo_mini_batch_size": rows,
            "actor_rollout_ref.actor.loss_agg_mode": mode,
            "+actor_rollout_ref.actor.optim.override_optimizer_config.eps": 1e-5,
            "+critic.optim.override_optimizer_config.eps": 1e-5,
            "critic.ppo_mini_batch_size": rows,
            "critic.loss_agg_mode": mode,
        },
    )
    actor, critic = ActorWorker(config, Topology(1), 1), CriticWorker(config, Topology(1), 1)
    for role in (actor, critic):
        role.init_model()
    actor.update_actor(batch)
    critic.update_critic(batch)
    return weights_of(actor), weights_of(critic)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("mode", [pytest.param("token-mean", marks=pytest.mark.slow), "seq-mean-token-mean"])
def test_weights_equal_those_of_an_update_without_the_row(home: Path, mode: str) -> None:
    chosen = algorithm(home)
    full, less = (batch.with_columns(token_level_rewards=batch["token_level_scores"]) for batch in scored())
    actual = update(home, full.union(estimated(full, chosen)), mode)
    expected = update(home, less.union(estimated(less, chosen)), mode)
    for weights, reference in zip(actual, expected, strict=True):
        for name, weight in reference.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-6, msg=name)


def test_a_step_without_remaining_samples_is_an_error() -> None:
    batch = batch_of(torch.Generator())
    with pytest.raises(RewardError, match=r"drops all 8 responses.*; correct .*ValueError: no"):
        add_scores(batch, result_of(batch, tuple(range(8))))


REWARD = """
from support import even_digits

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["index"] % 3 == 0 and len(solution_str) % 2:
        raise ValueError("an odd one")
    return even_digits.compute_score(data_source, solution_str, ground_truth, extra_info)
"""


@pytest.mark.parametrize("estimator", [pytest.param("gae", marks=pytest.mark.slow), "grpo"])
def test_a_run_counts_dropped_rows_and_trains_on_the_others(
    tmp_path: Path, estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    (tmp_path / "reward.py").write_text(REWARD)
    overrides = {
        "custom_reward_function.path": tmp_path / "reward.py",
        "algorithm.adv_estimator": estimator,
        "actor_rollout_ref.rollout.n": 4,
    }
    steps = run_ppo(tmp_path, overrides | {"custom_reward_function.on_error": "drop"}, steps=2)
    zero = run_ppo(tmp_path, overrides | {"custom_reward_function.on_error": "zero"}, steps=1)
    listed = [json.loads(line) for line in (tmp_path / "run/rewards/failed.jsonl").read_text().splitlines()]
    for number, step in enumerate(steps, start=1):
        texts = texts_of(tmp_path, step.batch)
        failed = [i for i, text in enumerate(texts) if step.batch["extra_info"][i]["index"] % 3 == 0 and len(text) % 2]
        assert failed, "the test needs a row that fails"
        scores = [
            even_digits.compute_score("", text, step.batch["ground_truth"][i], None)
            for i, text in enumerate(texts)
            if i not in failed
        ]
        assert step.metrics["reward/errors"] == len(failed)
        assert step.metrics["critic/score/mean"] == pytest.approx(sum(scores) / len(scores))
        rows = [line for line in listed if line["when"] == f"step {number}"][: len(failed)]
        assert [line["row"] for line in rows] == failed
        assert {line["message"] for line in rows} == {"ValueError: an odd one"}
    first = "model.norm.weight"
    assert not torch.equal(steps[0].actor[first], zero[0].actor[first])


def texts_of(home: Path, batch: DataProto) -> list[str]:
    tokenizer: Any = load_tokenizer(str(home / "actor"), False)
    return tokenizer.batch_decode([row.tolist() for row in batch["responses"].rows()], skip_special_tokens=True)
