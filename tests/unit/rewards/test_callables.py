"""Reward functions that Python passes are pickled, and identified by their code."""

import json
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from camshaft.config import CustomRewardConfig, PPOConfig
from camshaft.config.load import resolved_defaults
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import RewardError
from camshaft.rewards.callables import name_of, pickle_reward, reward_checksum, reward_name
from camshaft.rewards.manager import Scores
from camshaft.trainer.scoring import build_rewards

DEFINED_TWICE = """
import json
from camshaft.rewards.callables import pickle_reward, reward_checksum
{space}
def make(wanted):
    def digits(response, answer={default}):
        return len([c for c in response if c in wanted]) {operator} 2
    return digits

class Bonus:
    def __call__(self, response):
        return 1.0 {operator} len(response)

rewards = [make("012"), Bonus(), [make("012"), (Bonus(), {weight})]]
print(json.dumps([reward_checksum(pickle_reward(reward)) for reward in rewards]))
"""


def checksums(folder: Path, name: str, **values: str) -> list[str]:
    """Return the checksums of functions of a script that runs in a new process."""
    script = folder / f"{name}.py"
    script.write_text(DEFINED_TWICE.format(**{"space": "", "default": "1", "operator": "*", "weight": "0.5", **values}))
    output = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True, timeout=100).stdout
    return json.loads(output)


def test_checksums_depend_on_code_and_not_on_its_place(tmp_path: Path) -> None:
    first = checksums(tmp_path, "first")
    assert checksums(tmp_path, "second", space="# further down\n" * 9) == first
    assert all(old != new for old, new in zip(first, checksums(tmp_path, "third", operator="+"), strict=True))
    assert [old == new for old, new in zip(first, checksums(tmp_path, "fourth", default="2"), strict=True)] == [
        *(False, True, False)
    ]
    assert [old == new for old, new in zip(first, checksums(tmp_path, "fifth", weight="2"), strict=True)] == [
        *(True, True, False)
    ]


USES_HELPERS = """
import functools, json, math, subprocess, sys
from camshaft.rewards.callables import pickle_reward, reward_checksum

@functools.lru_cache(maxsize=9)
def count(text, depth=2):
    return len(text) + (count(text, depth - 1) if depth else 0){more}

def half(text):
    return count(text) / 2

SCALE = {scale}

def reward(response):
    return sum(map(lambda text: SCALE * half(text), [response])) + 0 * math.pi

functions = pickle_reward(reward)
load = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read())('abcd'))"
score = subprocess.run([sys.executable, "-c", load], input=functions[0].pickled, capture_output=True, check=True).stdout
print(json.dumps([float(score), reward_checksum(functions)]))
"""


def test_helpers_of_a_script_are_sent_and_identified(tmp_path: Path) -> None:
    def run(**values: str) -> tuple[float, str]:
        script = tmp_path / "script.py"
        script.write_text(USES_HELPERS.format(**{"scale": "10", "more": "", **values}))
        done = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True, timeout=100)
        return tuple(json.loads(done.stdout))

    first, scaled, changed = run(), run(scale="20"), run(more=" + 1")
    assert [score for score, _ in (first, scaled, changed)] == [60.0, 120.0, 75.0]
    assert run() == first
    assert len({checksum for _, checksum in (first, scaled, changed)}) == 3


def test_checksums_depend_on_captured_values() -> None:
    def make(wanted: object) -> Any:
        return lambda response: response == wanted

    same, other = (reward_checksum(pickle_reward(make(value))) for value in ({"a", "b"}, {"a", "c"}))
    assert same != other
    assert reward_checksum(pickle_reward(make({"b", "a"}))) == same
    first, second = (pickle_reward(partial(max, value))[0].checksum for value in (1, 2))
    assert first != second


class Judge:
    def __init__(self, strictness: int) -> None:
        self.strictness = strictness

    def __call__(self, response: str) -> float:
        return float(len(response) > self.strictness)

    def score(self, response: str) -> float:
        return self(response)


class StricterJudge(Judge):
    pass


def test_checksums_depend_on_the_plain_attributes_of_an_object() -> None:
    def checksum(reward: Any) -> str:
        return pickle_reward(reward)[0].checksum

    assert checksum(Judge(1)) == checksum(Judge(1)) != checksum(Judge(2))
    assert checksum(StricterJudge(1)) != checksum(StricterJudge(2))
    assert checksum(Judge(1).score) == checksum(Judge(1).score) != checksum(Judge(2).score)


def test_a_function_may_capture_itself() -> None:
    def count(response: str) -> int:
        return 0 if not response else 1 + count(response[1:])

    (pickled,) = pickle_reward(count)
    assert pickled.name == "count"
    assert pickled.pickled is not None
    assert pickle.loads(pickled.pickled)("abc") == 3


def test_names_are_identifiers() -> None:
    assert name_of(lambda response: 0) == "reward"
    assert name_of(partial(json.dumps)) == "dumps"
    assert reward_name([json.dumps, lambda response: 0, json.dumps]) == "dumps_reward_dumps_2"


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ([], "an empty list"),
        ([("file.py", 1.0)], r"reward contains \('file.py', 1.0\)"),
        ([(len, "heavy")], "reward contains"),
        (7, "reward contains 7"),
    ],
)
def test_invalid_rewards_are_rejected(reward: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        pickle_reward(reward)


def scores_of(reward: Any, texts: list[str], **settings: Any) -> Scores:
    """Score texts in the processes of a run."""
    values = resolved_defaults(PPOConfig)["custom_reward_function"]
    custom = CustomRewardConfig.model_validate(values | {"num_workers": 1, **settings})
    rows = DataProto({"responses": Ragged.from_rows([[1]] * len(texts))})
    rows = rows.with_columns(data_source=["x"] * len(texts), ground_truth=[None] * len(texts))
    with build_rewards(custom, pickled=pickle_reward(reward)) as rewards:
        return rewards.score_texts(rows, texts)


def test_a_worker_calls_a_closure_and_can_be_killed() -> None:
    import time

    def wait_for(response: str) -> float:
        time.sleep(60 if response == "slow" else 0)
        return float(len(response))

    result = scores_of(wait_for, ["abc", "slow"], timeout=1.0)
    assert result.scores.tolist() == [3.0, 0.0]
    assert result.metrics["reward/timeouts"] == 1
    assert "reward/wait_for/mean" not in result.metrics


def test_weighted_functions_have_metrics_of_their_own() -> None:
    def length(response: str) -> float:
        return float(len(response))

    async def constant(responses: list[str]) -> list[float]:
        return [4.0 for _ in responses]

    result = scores_of([(length, 0.5), constant, lambda response: 1.0, lambda response: 2.0], ["a", "abc"])
    assert result.scores.tolist() == [0.5 + 4 + 1 + 2, 1.5 + 4 + 1 + 2]
    means = {name: result.metrics[f"reward/{name}/mean"] for name in ("length", "constant", "reward", "reward_2")}
    assert means == {"length": 2.0, "constant": 4.0, "reward": 1.0, "reward_2": 2.0}


def test_a_function_without_the_response_is_rejected() -> None:
    with pytest.raises(RewardError, match=r"no_text.* cannot be called: it has no parameter for the response"):
        scores_of([no_text], ["a"])


def no_text(text: str) -> float:
    return 0.0
