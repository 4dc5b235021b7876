"""Each key of `custom_reward_function` changes how responses are scored, by the real manager and its processes.

So does each of `reward_model.overlong_buffer`, whatever scores.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import RewardError
from camshaft.ragged import on_last_token
from camshaft.rewards.manager import RewardResult
from camshaft.trainer.scoring import build_rewards, run_rewards
from spec.test_fields import run_with

SCORES = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0, seconds=0.0):
    time.sleep(seconds)
    if solution_str == "bad":
        raise ValueError("no")
    return {"score": 1.0 + bonus, "pid": float(os.getpid())}

def either(**given):
    return [2.0] * len(given["solution_strs"]) if "solution_strs" in given else 1.0

def half(data_source, solution_str, ground_truth, extra_info):
    return 0.5
"""


def batch_of(lengths: Sequence[int]) -> DataProto:
    """Responses whose tokens are the number of their row."""
    ids = Ragged.from_rows([[row] * length for row, length in enumerate(lengths)], torch.int64)
    return DataProto.from_dict(
        {
            "responses": ids,
            "response_mask": ids.map(lambda values: torch.ones_like(values, dtype=torch.bool)),
            "data_source": ["openai/gsm8k"] * len(lengths),
            "ground_truth": ["1"] * len(lengths),
            "extra_info": [{} for _ in lengths],
        }
    )


def scored(folder: Path, said: tuple[str, ...] = ("a", "b", "c", "d"), **keys: Any) -> RewardResult:
    (folder / "scores.py").write_text(SCORES)
    changed = {f"custom_reward_function.{key}": value for key, value in keys.items()}
    config = run_with(folder, {"custom_reward_function.path": f"{folder}/scores.py", **changed})
    batch = batch_of([1] * len(said))
    with build_rewards(config.custom_reward_function) as rewards:
        return rewards.score(batch, lambda rows: [said[row[0]] for row in rows])


def test_path_and_name_select_the_function(tmp_path: Path) -> None:
    assert scored(tmp_path).scores.tolist() == [1.0] * 4
    assert scored(tmp_path, name="half").scores.tolist() == [0.5] * 4
    # Without a path it is one of those here: "#### 1" is what this data set calls an answer.
    assert scored(tmp_path, said=("#### 1", "a"), path=None).scores.tolist() == [1.0, 0.0]


def test_reward_kwargs_are_arguments_of_every_call(tmp_path: Path) -> None:
    assert scored(tmp_path, reward_kwargs={"bonus": 2.0}).scores.tolist() == [3.0] * 4


def test_batched_selects_the_calling_convention(tmp_path: Path) -> None:
    assert scored(tmp_path, name="either").scores.tolist() == [1.0] * 4
    assert scored(tmp_path, name="either", batched=True).scores.tolist() == [2.0] * 4


def test_timeout_limits_one_call(tmp_path: Path) -> None:
    slow = {"reward_kwargs": {"seconds": 0.6}, "num_workers": 1, "said": ("a",)}
    assert scored(tmp_path, **slow).metrics["reward/timeouts"] == 0
    assert scored(tmp_path, **slow, timeout=0.1).metrics["reward/timeouts"] == 1


@pytest.mark.parametrize("workers", [1, 3])
def test_num_workers_is_the_number_of_scoring_processes(tmp_path: Path, workers: int) -> None:
    found = scored(tmp_path, said=tuple("abcdef"), num_workers=workers, reward_kwargs={"seconds": 0.2})
    assert len({parts["pid"] for parts in found.parts}) == workers


def test_on_error_selects_the_handling_of_failed_calls(tmp_path: Path) -> None:
    zero, drop = (scored(tmp_path, said=("a", "bad"), on_error=name) for name in ("zero", "drop"))
    assert zero.scores.tolist() == drop.scores.tolist() == [1.0, 0.0]
    assert (zero.dropped, drop.dropped) == ((), (1,))
    with pytest.raises(RewardError, match="no"):
        scored(tmp_path, said=("a", "bad"), on_error="raise")


# -- the penalty for long responses ---------------------------------------------------------------

BUFFER = "reward_model.overlong_buffer"
ON = {f"{BUFFER}.enable": True, f"{BUFFER}.len": 4}
PENALTIES: dict[str, tuple[Any, Mapping[str, Any], Callable[[RewardResult], Any], Any, Any]] = {
    # key: typed, beside what, where to look, what is seen without it, what with it
    "enable": (True, {f"{BUFFER}.len": 4}, lambda found: found.token_level_scores.sum().tolist(), [1, 1, 1],
               [1, 0.5, 0]),
    "len": (2, ON, lambda found: found.token_level_scores.sum().tolist(), [1, 0.5, 0], [1, 1, 0]),
    "penalty_factor": (2.0, ON, lambda found: found.token_level_scores.sum().tolist(), [1, 0.5, 0], [1, 0, -1]),
    "log": (True, ON, lambda found: found.metrics.get("reward/overlong/mean"), None, pytest.approx(2 / 3)),
}  # fmt: skip


@pytest.mark.parametrize("key", [f"{BUFFER}.{name}" for name in PENALTIES])
def test_key_changes_the_overlong_penalty(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each response is worth 1; at most 8 tokens, of which there are 4, 6 and 8."""
    batch, ones = batch_of([4, 6, 8]), torch.ones(3)
    given = RewardResult(ones, {}, (), (), (), on_last_token(ones, batch.ragged("response_mask")))
    function = SimpleNamespace(score=lambda batch, decode, begun=None: given)
    monkeypatch.setattr("camshaft.trainer.scoring.build_rewards", lambda custom: function)
    typed, beside, look, before, after = PENALTIES[key.rpartition(".")[2]]
    base = {"reward_model.enable": False, "data.max_response_length": 8, **beside}
    for words, wanted in ((base, before), ({**base, key: typed}, after)):
        rewards = run_rewards(run_with(tmp_path, words))
        assert look(rewards.score(batch, lambda rows: [""] * len(rows))) == wanted
