"""Dynamic sampling: the kept prompts, the position in the data, and the errors if no prompt is kept."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ppo_runs import ppo_config, run_ppo

from camshaft.config import PPOConfig
from camshaft.data import StatefulLoader
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import BatchError, RewardError
from camshaft.rewards.manager import RewardResult
from camshaft.tracking import deterministic
from camshaft.tracking.record import RunStatus
from camshaft.trainer.dynamic_sampling import _find_informative, filter_values, sample_informative_prompts
from camshaft.trainer.metrics import StepMetrics

DAPO: dict[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    "algorithm.filter_groups.enable": True,
    "actor_rollout_ref.rollout.n": 2,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 3,
    "data.train_batch_size": 3,
    "data.gen_batch_size": 4,
}


@pytest.fixture(scope="module")
def config_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., PPOConfig]:
    home = tmp_path_factory.mktemp("home")
    return lambda **changes: ppo_config(home, {**DAPO, **changes})


def result(scores: Sequence[float], parts: Sequence[dict[str, float]] | None = None) -> RewardResult:
    values = torch.tensor(list(scores))
    parts_of_rows = tuple(parts or [{}] * len(values))
    one = Ragged(values, torch.ones(len(values), dtype=torch.int64))
    metrics = {"reward/errors": 1.0, "reward/acc/mean": float(values.mean())}
    return RewardResult(values, metrics, (), parts_of_rows, (), token_level_scores=one)


class Policy:
    """Solve each prompt whose number is in `differing` once in two, and all others always."""

    def __init__(self, differing: set[int]):
        self.differing = differing
        self.calls: list[tuple[list[int], int]] = []

    def __call__(self, prompts: DataProto, metrics: StepMetrics, first: int) -> tuple[DataProto, RewardResult]:
        numbers = [int(row[0]) for row in prompts["prompts"].rows()]
        self.calls.append((numbers, first))
        scores = [score for number in numbers for score in ((1.0, 0.0) if number in self.differing else (1.0, 1.0))]
        scored = result(scores)
        metrics.add(scored.metrics)
        return prompts.repeat(2).with_columns(row=torch.arange(2 * len(numbers))), scored


def loader_of(count: int, batch: int = 4, epochs: int = 1) -> StatefulLoader:
    rows = DataProto.from_dict({"prompts": Ragged.from_rows([[i] for i in range(count)])})
    return StatefulLoader(rows, batch, total_epochs=epochs, shuffle=False, rows_per_step=3)


def draw(loader: StatefulLoader, policy: Policy, config: PPOConfig) -> tuple[list[int], dict[str, float]]:
    """Return the prompts of one step, row by row, and its metrics."""
    metrics = StepMetrics(RunStatus("unused"))
    batch = sample_informative_prompts(loader.next_batch(), policy, loader, config, metrics)
    return [int(row[0]) for row in batch["prompts"].rows()], metrics.values


def test_informative_prompts_keep_all_responses_until_the_batch_is_full(config_with) -> None:
    loader, policy = loader_of(20), Policy({1, 6, 7, 9})
    kept, metrics = draw(loader, policy, config_with())
    assert kept == [1, 1, 6, 6, 7, 7]
    # Four prompts of two responses each were drawn before the second batch: its seeds start at row 8.
    assert policy.calls == [([0, 1, 2, 3], 0), ([4, 5, 6, 7], 8)]
    assert metrics["train/num_gen_batches"] == 2
    assert metrics["filter_groups/same_share"] == 5 / 8
    assert metrics["filter_groups/given_back"] == 0
    # Of eight prompts 5 are solved twice, 3 once: (5 x 2 + 3) / 16; failures are summed, means are averaged.
    assert metrics["filter_groups/seq_reward/mean"] == pytest.approx(13 / 16)
    assert metrics["reward/acc/mean"] == pytest.approx(13 / 16)
    assert metrics["reward/errors"] == 2


def test_unused_prompts_of_a_batch_are_drawn_again(config_with) -> None:
    loader, policy = loader_of(20), Policy(set(range(20)))
    steps = [draw(loader, policy, config_with()) for _ in range(3)]
    assert [kept[::2] for kept, _ in steps] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [metrics["filter_groups/given_back"] for _, metrics in steps] == [1, 1, 1]
    assert loader.state_dict()["position"] == 9


def test_the_last_step_is_filled_from_the_next_epoch(config_with) -> None:
    loader = loader_of(8)
    kept, _ = draw(loader, Policy({1, 5}), config_with())
    assert kept[::2] == [1, 5, 1]
    assert loader.exhausted
    assert list(loader) == []


def test_too_many_batches_are_an_error_with_a_fix(config_with) -> None:
    changes = {"algorithm.filter_groups.max_num_gen_batches": 2}
    with pytest.raises(BatchError) as exc_info:
        draw(loader_of(20), Policy({1, 4}), config_with(**changes))
    text = str(exc_info.value)
    assert "2 of 3 prompts have responses that differ in seq_reward after 2 batches of 4 prompts" in text
    assert "max_num_gen_batches=2 is reached" in text
    draw(loader_of(20), Policy({1, 4, 5}), config_with(**changes))


def test_data_without_an_informative_prompt_are_an_error(config_with) -> None:
    with pytest.raises(BatchError, match=r"0 of 3 prompts .* after 5 batches .* All prompts of the data were tried"):
        draw(loader_of(20), Policy(set()), config_with())


def test_dynamic_sampling_compares_shaped_score_score_or_a_result() -> None:
    actual = result([1.0, 2.0], [{"acc": 1.0}, {}])
    shaped = replace(actual, token_level_scores=actual.token_level_scores.map(lambda values: values - 0.5))
    assert filter_values(shaped, "seq_reward").tolist() == [0.5, 1.5]
    assert filter_values(shaped, "score").tolist() == [1.0, 2.0]
    assert filter_values(shaped, "acc").tolist() == [1.0, 0.0]
    with pytest.raises(RewardError, match=r"metric=f1: .* no number 'f1', only acc"):
        filter_values(shaped, "f1")


def test_responses_that_were_dropped_make_no_difference() -> None:
    def differs(scores: list[float], dropped: tuple[int, ...], n: int) -> list[bool]:
        return _find_informative(torch.tensor(scores), replace(result(scores), dropped=dropped).keep_mask, n).tolist()

    scores = [1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 3.0, 4.0, 0.0]  # three responses to each of three prompts
    assert differs(scores, (), 3) == [True, True, True]
    # 1, -, 1 are equal; 1, 1, - are equal; 3, 4, - differ.
    assert differs(scores, (1, 5, 8), 3) == [False, False, True]
    # A single remaining response does not differ, and the last prompt has none.
    assert differs(scores, (0, 2, 4, 5, 6, 7, 8), 3) == [False, False, False]
    # Less than 0, the score of a failure.
    assert differs([-1.0, 0.0, -1.0, -2.0, 0.0, -2.0], (1, 4), 2) == [False, True, False]


def test_dropped_responses_do_not_make_a_prompt_informative(config_with) -> None:
    class Failing(Policy):
        """The second response of prompt 1, which would differ, has no score."""

        def __call__(self, prompts: DataProto, metrics: StepMetrics, first: int) -> tuple[DataProto, RewardResult]:
            batch, scored = super().__call__(prompts, metrics, first)
            numbers = [int(row[0]) for row in batch["prompts"].rows()]
            return batch, replace(scored, dropped=(2 * numbers.index(1) // 2 + 1,) if 1 in numbers else ())

    kept, metrics = draw(loader_of(20), Failing({1, 2, 5, 6}), config_with())
    assert kept[::2] == [2, 5, 6]
    assert metrics["filter_groups/same_share"] == 5 / 8
    # 15 responses have a score: one response of each of the prompts 2, 5 and 6 scores zero.
    assert metrics["filter_groups/seq_reward/mean"] == pytest.approx(12 / 15)


# -- complete runs ----------------------------------------------------------------------------------


RUN = {**DAPO, "data.train_max_samples": 24, "trainer.total_epochs": 2, "trainer.save_freq": 1}


@pytest.mark.slow
def test_dynamic_sampling_resumes_bitwise(tmp_path: Path) -> None:
    def run(name: str, steps: int, resume: str) -> list[dict[str, float]]:
        overrides = {"trainer.default_local_dir": tmp_path / name, "trainer.resume_mode": resume}
        return [deterministic(step.metrics) for step in run_ppo(tmp_path, {**RUN, **overrides}, steps=steps)]

    uninterrupted = run("whole", 4, "disable")
    assert max(metrics["filter_groups/given_back"] for metrics in uninterrupted) > 0
    assert max(metrics["train/num_gen_batches"] for metrics in uninterrupted) > 1
    assert [metrics["critic/advantages/max"] for metrics in uninterrupted] == pytest.approx([2**-0.5] * 4, rel=1e-4)
    parts = run("parts", 2, "disable") + run("parts", 4, "auto")
    assert parts == uninterrupted


def test_a_run_ends_with_its_data(tmp_path: Path) -> None:
    # At most 24 / 3 = 8 steps in the single epoch; prompts that do not differ reduce the number.
    logged = run_ppo(tmp_path, {**RUN, "trainer.total_epochs": 1, "trainer.save_freq": -1}, steps=100)
    assert 3 < len(logged) < 8
