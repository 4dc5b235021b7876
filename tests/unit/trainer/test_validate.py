import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ppo_runs import ppo_config

from camshaft.config import PPOConfig
from camshaft.data.tables import write_parquet
from camshaft.trainer.build import PPOParts
from camshaft.trainer.validate import Sample, ScoredResponse, at_n_metrics, save_samples, validate

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "bad":
        raise ValueError
    return float(ground_truth)
"""


def row(source: str, truth: str) -> dict[str, Any]:
    return {"data_source": source, "prompt": [{"role": "user", "content": "1+1="}], "ground_truth": truth}


ROWS = [row("a", "1"), row("b", "4"), row("a", "3"), row("a", "bad"), row("b", "6")]


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[tuple[PPOParts, PPOConfig]]:
    """Return the setting: five questions, two responses to each, three rows at a time."""
    (tmp_path / "reward.py").write_text(REWARD)
    config = ppo_config(
        tmp_path,
        {
            "data.val_files": write_parquet(tmp_path / "val.parquet", ROWS),
            "data.val_batch_size": 3,
            "custom_reward_function.path": tmp_path / "reward.py",
            "custom_reward_function.on_error": "zero",
            "actor_rollout_ref.rollout.val_kwargs.n": 2,
            "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
            "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
        },
    )
    with PPOParts(config) as parts:
        parts.actor.init_model()
        yield parts, config


def test_batches_are_counted_in_prompts(setting: tuple[PPOParts, PPOConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    parts, config = setting
    sizes, generate = [], parts.start_generation
    monkeypatch.setattr(
        parts, "start_generation", lambda batch, **kw: sizes.append(len(batch)) or generate(batch, **kw)
    )
    validate(parts, config, 0)
    assert sizes == [6, 4]  # two responses to each of three and two prompts


def test_every_response_counts_once_per_data_source_and_overall(setting: tuple[PPOParts, PPOConfig]) -> None:
    metrics, samples = validate(*setting, 0)
    assert metrics["val-core/a/reward/mean"] == pytest.approx((1 + 3 + 0) / 3)
    assert metrics["val-core/b/reward/mean"] == pytest.approx(5)
    assert metrics["val/reward/mean"] == pytest.approx((1 + 4 + 3 + 0 + 6) / 5)
    assert metrics["val-aux/reward/errors"] == 2
    assert {name: metrics[f"val-aux/reward/{name}"] for name in ("invalid", "timeouts", "crashes")} == {
        "invalid": 0, "timeouts": 0, "crashes": 0,
    }  # fmt: skip
    assert 1 <= metrics["val-aux/response_length/mean"] <= 8
    # Two responses to each question, which differ.
    expected = [("1", 1), ("4", 4), ("3", 3), ("bad", 0), ("6", 6)]
    assert [(sample.ground_truth, sample.score) for sample in samples] == [one for one in expected for _ in range(2)]
    assert all("1+1=" in sample.prompt for sample in samples)
    assert len({sample.response for sample in samples}) == 10


def test_responses_to_one_question_are_held_together(setting: tuple[PPOParts, PPOConfig]) -> None:
    # Batches of three rows cross the pairs; each question still has one score.
    metrics, _ = validate(*setting, 0)
    for name in ("mean@2", "best@2/mean"):
        assert metrics[f"val-core/a/reward/{name}"] == pytest.approx((1 + 3 + 0) / 3)
        assert metrics[f"val-core/b/reward/{name}"] == pytest.approx(5)
    assert metrics["val-aux/a/reward/worst@2/mean"] == pytest.approx((1 + 3 + 0) / 3)
    assert metrics["val-aux/a/reward/std@2"] == 0
    assert not any("maj" in name for name in metrics)  # this reward returns no answers


def scored(uid: str, score: float, answer: str | None, **parts: float) -> ScoredResponse:
    return ScoredResponse("math", uid, score, answer, parts)


def test_metrics_of_four_responses_to_two_questions_by_hand() -> None:
    rows = [
        *(
            scored("0", score, answer, acc=score, length=2.0)
            for score, answer in zip([1, 1, 0, 0], "aabc", strict=True)
        ),
        *(
            scored("1", score, answer, acc=score, length=2.0)
            for score, answer in zip([0, 0, 0, 1], "xxxy", strict=True)
        ),
    ]
    result = at_n_metrics(rows)
    assert {name: value for name, value in result.items() if name.startswith("val-core")} == {
        "val-core/math/reward/mean@4": 0.375,  # (2/4 + 1/4) / 2
        "val-core/math/reward/best@4/mean": 1.0,
        "val-core/math/reward/maj@4/mean": 0.5,  # a is right, x is wrong
        "val-core/math/acc/mean@4": 0.375,
        "val-core/math/acc/best@4/mean": 1.0,
        "val-core/math/acc/maj@4/mean": 0.5,
    }
    # Pairs of the first: 5 of 6 contain a correct one; of the second: 3 of 6.
    assert result["val-aux/math/reward/best@2/mean"] == pytest.approx((5 / 6 + 3 / 6) / 2)
    assert result["val-aux/math/reward/worst@2/mean"] == pytest.approx((1 / 6 + 0) / 2)
    # Of the first, 1 pair is aa and 4 are ties of a and another; of the second, 3 are ties of x and y.
    assert result["val-aux/math/reward/maj@2/mean"] == pytest.approx(((1 + 4 / 2) / 6 + (3 / 2) / 6) / 2)
    assert result["val-aux/math/length/mean@4"] == 2.0
    assert len(result) == 3 * (2 + 2 * 3)


def test_an_unscored_response_counts_as_zero_without_an_answer() -> None:
    rows = [scored("0", 1.0, "a", acc=1.0), scored("0", 0.0, None), scored("0", 0.0, None)]
    result = at_n_metrics(rows)
    assert result["val-core/math/acc/mean@3"] == pytest.approx(1 / 3)
    assert result["val-core/math/reward/maj@3/mean"] == 0


def test_a_number_that_only_some_results_have_is_not_compared() -> None:
    rows = [scored("0", 1.0, "a", acc=1.0), scored("0", 0.0, "b", other=1.0)]
    assert {name.split("/")[2] for name in at_n_metrics(rows)} == {"reward"}


def test_two_validations_of_one_policy_say_the_same(setting: tuple[PPOParts, PPOConfig]) -> None:
    assert validate(*setting, 0) == validate(*setting, 0)


def test_samples_are_lines_that_can_be_read_again(tmp_path: Path) -> None:
    samples = [Sample("1+1=", "zwei\n\u00e9", {"is": 2}, 0.5), Sample("2+2=", "4", None, 1.0)]
    path = tmp_path / "new" / "step_3.jsonl"
    save_samples(samples, path)
    result = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert result[0] == {"prompt": "1+1=", "response": "zwei\n\u00e9", "ground_truth": {"is": 2}, "score": 0.5}
    assert [line["score"] for line in result] == [0.5, 1.0]
