import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ppo_runs import ppo_config

from camshaft.config import PPOConfig
from camshaft.data.parquet import write_parquet
from camshaft.trainer.parts import PPOParts
from camshaft.trainer.validate import Sample, save_samples, validate

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
    """Five questions, two responses to each, three rows at a time."""
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
            "trainer.log_val_generations": 4,
        },
    )
    with PPOParts(config) as parts:
        parts.actor.init_model()
        yield parts, config


def test_every_response_counts_once_for_its_data_set_and_for_all(setting: tuple[PPOParts, PPOConfig]) -> None:
    metrics, samples = validate(*setting)
    assert metrics["val-core/a/reward/mean"] == pytest.approx((1 + 3 + 0) / 3)
    assert metrics["val-core/b/reward/mean"] == pytest.approx(5)
    assert metrics["val/reward/mean"] == pytest.approx((1 + 4 + 3 + 0 + 6) / 5)
    assert metrics["val-aux/reward/errors"] == 2
    assert {name: metrics[f"val-aux/reward/{name}"] for name in ("invalid", "timeouts", "crashes")} == {
        "invalid": 0, "timeouts": 0, "crashes": 0,
    }  # fmt: skip
    assert 1 <= metrics["val-aux/response_length/mean"] <= 8
    # The first four of ten responses: two to each of the first two questions, which differ.
    assert [(sample.ground_truth, sample.score) for sample in samples] == [("1", 1), ("1", 1), ("4", 4), ("4", 4)]
    assert all("1+1=" in sample.prompt for sample in samples)
    assert len({sample.response for sample in samples}) == 4


def test_two_validations_of_one_policy_say_the_same(setting: tuple[PPOParts, PPOConfig]) -> None:
    assert validate(*setting) == validate(*setting)


def test_samples_are_lines_that_can_be_read_again(tmp_path: Path) -> None:
    samples = [Sample("1+1=", "zwei\n\u00e9", {"is": 2}, 0.5), Sample("2+2=", "4", None, 1.0)]
    path = tmp_path / "new" / "step_3.jsonl"
    save_samples(samples, path)
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert found[0] == {"prompt": "1+1=", "response": "zwei\n\u00e9", "ground_truth": {"is": 2}, "score": 0.5}
    assert [line["score"] for line in found] == [0.5, 1.0]
