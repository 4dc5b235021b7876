"""Each key of `custom_reward_function` changes how responses are scored, by the real manager and its processes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import RewardError
from camshaft.rewards.manager import RewardResult
from camshaft.trainer.scoring import build_rewards
from spec.test_told import run_with

SCORES = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0, seconds=0.0):
    time.sleep(seconds)
    if solution_str == "bad":
        raise ValueError("no")
    return {"score": 1.0 + bonus, "pid": float(os.getpid())}

def half(data_source, solution_str, ground_truth, extra_info):
    return 0.5
"""


def scored(folder: Path, said: tuple[str, ...] = ("a", "b", "c", "d"), **keys: Any) -> RewardResult:
    (folder / "scores.py").write_text(SCORES)
    changed = {f"custom_reward_function.{key}": value for key, value in keys.items()}
    config = run_with(folder, {"custom_reward_function.path": f"{folder}/scores.py", **changed})
    ids = Ragged.from_rows([[row] for row in range(len(said))], torch.int64)
    batch = DataProto.from_dict(
        {
            "responses": ids,
            "response_mask": ids.map(lambda values: torch.ones_like(values, dtype=torch.bool)),
            "data_source": ["openai/gsm8k"] * len(said),
            "ground_truth": ["1"] * len(said),
            "extra_info": [{} for _ in said],
        }
    )
    with build_rewards(config.custom_reward_function) as rewards:
        return rewards.score(batch, lambda rows: [said[row[0]] for row in rows])


def test_path_and_name_choose_the_function(tmp_path: Path) -> None:
    assert scored(tmp_path).scores.tolist() == [1.0] * 4
    assert scored(tmp_path, name="half").scores.tolist() == [0.5] * 4
    # Without a path it is one of those here: "#### 1" is what this data set calls an answer.
    assert scored(tmp_path, said=("#### 1", "a"), path=None).scores.tolist() == [1.0, 0.0]


def test_reward_kwargs_are_arguments_of_every_call(tmp_path: Path) -> None:
    assert scored(tmp_path, reward_kwargs={"bonus": 2.0}).scores.tolist() == [3.0] * 4


def test_a_call_may_take_as_long_as_timeout_says(tmp_path: Path) -> None:
    slow = {"reward_kwargs": {"seconds": 0.6}, "num_workers": 1, "said": ("a",)}
    assert scored(tmp_path, **slow).metrics["reward/timeouts"] == 0
    assert scored(tmp_path, **slow, timeout=0.1).metrics["reward/timeouts"] == 1


@pytest.mark.parametrize("workers", [1, 3])
def test_as_many_processes_score_as_num_workers_says(tmp_path: Path, workers: int) -> None:
    found = scored(tmp_path, said=tuple("abcdef"), num_workers=workers, reward_kwargs={"seconds": 0.2})
    assert len({parts["pid"] for parts in found.parts}) == workers


def test_on_error_says_what_a_failing_call_costs(tmp_path: Path) -> None:
    assert scored(tmp_path, said=("a", "bad")).scores.tolist() == [1.0, 0.0]
    with pytest.raises(RewardError, match="no"):
        scored(tmp_path, said=("a", "bad"), on_error="raise")
