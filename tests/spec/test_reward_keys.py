"""Each key of `custom_reward_function` and `reward_model.overlong_buffer` changes the scores of a batch.

The scores are computed by the reward manager and its processes.
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
from camshaft.trainer.scoring import build_rewards, build_run_rewards
from spec.test_fields import run_with

SCORES = """
import asyncio, os, time

def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0, seconds=0.0):
    time.sleep(seconds)
    if solution_str == "bad":
        raise ValueError("no")
    return {"score": 1.0 + bonus, "pid": float(os.getpid())}

def either(**arguments):
    return [2.0] * len(arguments["solution_strs"]) if "solution_strs" in arguments else 1.0

running = 0

async def at_once(response):
    global running
    running += 1
    await asyncio.sleep(0.1)
    count, running = running, running - 1
    return count

def half(data_source, solution_str, ground_truth, extra_info):
    return 0.5
"""


def batch_of(lengths: Sequence[int]) -> DataProto:
    """Build responses whose tokens equal the number of their row."""
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


def scored(folder: Path, responses: tuple[str, ...] = ("a", "b", "c", "d"), **keys: Any) -> RewardResult:
    (folder / "scores.py").write_text(SCORES)
    changed = {f"custom_reward_function.{key}": value for key, value in keys.items()}
    config = run_with(folder, {"custom_reward_function.path": f"{folder}/scores.py", **changed})
    batch = batch_of([1] * len(responses))
    with build_rewards(config.custom_reward_function) as rewards:
        return rewards.score(batch, lambda rows: [responses[row[0]] for row in rows])


def test_path_and_name_select_the_function(tmp_path: Path) -> None:
    assert scored(tmp_path).scores.tolist() == [1.0] * 4
    assert scored(tmp_path, name="half").scores.tolist() == [0.5] * 4
    # Without a path a built-in function scores; "#### 1" is the answer format of this data set.
    assert scored(tmp_path, responses=("#### 1", "a"), path=None).scores.tolist() == [1.0, 0.0]


def test_reward_kwargs_are_arguments_of_every_call(tmp_path: Path) -> None:
    assert scored(tmp_path, reward_kwargs={"bonus": 2.0}).scores.tolist() == [3.0] * 4


def test_batched_selects_the_calling_convention(tmp_path: Path) -> None:
    assert scored(tmp_path, name="either").scores.tolist() == [1.0] * 4
    assert scored(tmp_path, name="either", batched=True).scores.tolist() == [2.0] * 4


def test_functions_and_weights_are_summed(tmp_path: Path) -> None:
    file = tmp_path / "scores.py"
    several = {"path": None, "functions": [f"{file}:half", f"{file}"], "reward_kwargs": {"scores": {"bonus": 2.0}}}
    assert scored(tmp_path, **several).scores.tolist() == [3.5] * 4
    assert scored(tmp_path, **several, weights=[4.0, -1]).scores.tolist() == [-1.0] * 4


@pytest.mark.parametrize("limit", [1, 4])
def test_max_concurrency_limits_async_calls(tmp_path: Path, limit: int) -> None:
    result = scored(tmp_path, name="at_once", num_workers=1, max_concurrency=limit)
    assert max(result.scores.tolist()) == limit


def test_timeout_limits_one_call(tmp_path: Path) -> None:
    slow = {"reward_kwargs": {"seconds": 0.6}, "num_workers": 1, "responses": ("a",)}
    assert scored(tmp_path, **slow).metrics["reward/timeouts"] == 0
    assert scored(tmp_path, **slow, timeout=0.1).metrics["reward/timeouts"] == 1


@pytest.mark.parametrize("workers", [1, 3])
def test_num_workers_is_the_number_of_scoring_processes(tmp_path: Path, workers: int) -> None:
    seconds = 1.0 if workers > 1 else 0.0  # every worker starts before the first ones have scored all responses
    result = scored(tmp_path, responses=tuple("abcdef"), num_workers=workers, reward_kwargs={"seconds": seconds})
    assert len({parts["pid"] for parts in result.parts}) == workers


def test_on_error_selects_the_handling_of_failed_calls(tmp_path: Path) -> None:
    zero, drop = (scored(tmp_path, responses=("a", "bad"), on_error=name) for name in ("zero", "drop"))
    assert zero.scores.tolist() == drop.scores.tolist() == [1.0, 0.0]
    assert (zero.dropped, drop.dropped) == ((), (1,))
    with pytest.raises(RewardError, match="no"):
        scored(tmp_path, responses=("a", "bad"), on_error="raise")


# -- the penalty for long responses ---------------------------------------------------------------

BUFFER = "reward_model.overlong_buffer"
ON = {f"{BUFFER}.enable": True, f"{BUFFER}.len": 4}
PENALTIES: dict[str, tuple[Any, Mapping[str, Any], Callable[[RewardResult], Any], Any, Any]] = {
    # key: value, other keys, observation, observed without the key, observed with it
    "enable": (True, {f"{BUFFER}.len": 4}, lambda result: result.token_level_scores.sum().tolist(), [1, 1, 1],
               [1, 0.5, 0]),
    "len": (2, ON, lambda result: result.token_level_scores.sum().tolist(), [1, 0.5, 0], [1, 1, 0]),
    "penalty_factor": (2.0, ON, lambda result: result.token_level_scores.sum().tolist(), [1, 0.5, 0], [1, 0, -1]),
    "log": (True, ON, lambda result: result.metrics.get("reward/overlong/mean"), None, pytest.approx(2 / 3)),
}  # fmt: skip


@pytest.mark.parametrize("key", [f"{BUFFER}.{name}" for name in PENALTIES])
def test_key_changes_the_overlong_penalty(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses of 4, 6 and 8 tokens, at most 8, have a score of 1 each."""
    batch, ones = batch_of([4, 6, 8]), torch.ones(3)
    unpenalized = RewardResult(ones, {}, (), (), (), on_last_token(ones, batch.ragged("response_mask")))
    function = SimpleNamespace(score=lambda batch, decode, begun=None: unpenalized)
    monkeypatch.setattr("camshaft.trainer.scoring.build_rewards", lambda *_, **__: function)
    value, others, observe, before, after = PENALTIES[key.rpartition(".")[2]]
    base = {"reward_model.enable": False, "data.max_response_length": 8, **others}
    for overrides, expected in ((base, before), ({**base, key: value}, after)):
        rewards = build_run_rewards(run_with(tmp_path, overrides))
        assert observe(rewards.score(batch, lambda rows: [""] * len(rows))) == expected
