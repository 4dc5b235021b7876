"""Several reward functions, whose scores are weighted sums by hand."""

import pytest

from camshaft.errors import RewardError
from camshaft.rewards.combined import CombinedRewards
from camshaft.rewards.manager import RewardManager
from camshaft.rewards.messages import FunctionSpec

from .conftest import batch_of, decode

FUNCTIONS = """
import os, time
from camshaft.rewards import register_reward

def length(response): return {"score": len(response), "even": len(response) % 2 == 0, "pred": response}

def batched(responses): return [None if text == "none" else 10.0 for text in responses]

async def judge(response, level=1):
    if response == "bad": raise ValueError("no answer")
    return None if response == "none" else level

def process(response):
    if response == "dies": os._exit(7)
    return os.getpid()

def nothing(response): return None
"""


@pytest.fixture
def several(file):
    """Return a manager of functions of one file, with their weights."""
    opened = []

    def make(weights: dict[str, float], kwargs: dict[str, dict] | None = None, **options) -> RewardManager:
        path = file(FUNCTIONS)
        functions = [
            FunctionSpec(path, name, (kwargs or {}).get(name, {}), label=name, weight=weight)
            for name, weight in weights.items()
        ]
        opened.append(RewardManager(functions=functions, **({"num_workers": 2, "timeout": 20.0} | options)))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def test_scores_are_weighted_sums_with_metrics_of_each_function(several, score):
    rewards = several({"length": 0.5, "batched": 2.0, "judge": -1.0}, {"judge": {"level": 3}})
    result = score(rewards, ["a", "none", "abcdef"])
    # 0.5 x 1 + 2 x 10 - 3; 0.5 x 4; 0.5 x 6 + 2 x 10 - 3
    assert result.scores.tolist() == [17.5, 2.0, 20.0]
    assert result.parts[0] == {"length": 1.0, "length/even": 0.0, "batched": 10.0, "judge": 3.0}
    assert result.parts[1] == {"length": 4.0, "length/even": 1.0}
    assert result.answers == ("a", "none", "abcdef")
    metrics = {name.removeprefix("reward/"): value for name, value in result.metrics.items()}
    assert (metrics["length/mean"], metrics["length/min"], metrics["length/max"]) == (11 / 3, 1.0, 6.0)
    assert metrics["length/std"] == pytest.approx((19 / 3) ** 0.5)
    assert (metrics["length/even/mean"], metrics["length/scored"], metrics["batched/scored"]) == (2 / 3, 3.0, 2.0)
    assert (metrics["judge/mean"], metrics["judge/std"], metrics["judge/failed"], result.num_failed) == (3.0, 0, 0, 0)


def test_failures_are_counted_for_each_function(several, score, caplog):
    result = score(several({"length": 1.0, "judge": 1.0, "process": 0.0}), ["a", "bad", "dies"])
    assert result.scores.tolist() == [2.0, 3.0, 5.0]  # the other functions count
    assert (result.metrics["reward/errors"], result.metrics["reward/crashes"], result.num_failed) == (1.0, 1.0, 2)
    failed = [result.metrics[f"reward/{name}/failed"] for name in ("length", "judge", "process")]
    assert failed == [0.0, 1.0, 1.0]
    assert [(failure.row, failure.function, failure.kind) for failure in result.failures] == [
        (1, "judge", "error"), (2, "process", "crash"),
    ]  # fmt: skip
    assert "2 of 3 samples could not be scored and lack the score of a function" in caplog.text
    assert "row 1 (data_source 'test', function 'judge'): error: ValueError: no answer" in caplog.text


def test_rows_that_a_function_fails_on_can_be_dropped(several, score):
    result = score(several({"length": 1.0, "judge": 1.0}, on_error="drop"), ["bad", "a", "bad"])
    assert (result.dropped, result.keep_mask.tolist()) == ((0, 2), [False, True, False])
    with pytest.raises(RewardError, match=r"row 1 \(data_source 'test', function 'judge'\): error"):
        score(several({"length": 1.0, "judge": 1.0}, on_error="raise"), ["a", "bad", "bad"])


def test_a_row_that_no_function_scores_has_failed(several, score):
    result = score(several({"nothing": 1.0, "judge": 1.0}), ["none", "a"])
    assert (result.scores.tolist(), result.metrics["reward/invalid"]) == ([0.0, 1.0], 1.0)
    assert result.failures[0].message == "every function returned None; return a number"
    assert [result.metrics[f"reward/{name}/failed"] for name in ("nothing", "judge")] == [0.0, 0.0]


def test_all_functions_run_in_the_same_processes(several, score, alive):
    rewards = several({"process": 1.0, "length": 0.0, "judge": 0.0}, num_workers=1)
    score(rewards, list("abcd"))
    assert len(alive()) == 1


def test_responses_that_arrive_in_parts_have_the_same_scores(several):
    rewards, texts = several({"length": 1.0, "batched": 1.0, "judge": 1.0}), ["a", "none", "bad", "ab"]
    batch = batch_of(texts)
    pending = rewards.begin(batch)
    for first, end in ((2, 4), (0, 2)):
        pending.add(first, texts[first:end])
    result, expected = rewards.score(batch, decode, pending), rewards.score(batch, decode)
    assert result.scores.tolist() == expected.scores.tolist() == [12.0, 4.0, 13.0, 13.0]
    assert (result.parts, result.dropped) == (expected.parts, expected.dropped)


def test_files_of_one_name_in_two_folders_are_different_modules(tmp_path, score):
    for folder, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / folder).mkdir()
        text = f"from camshaft.rewards import register_reward\n@register_reward('{folder}')\ndef f(response): return "
        (tmp_path / folder / "same.py").write_text(f"{text}{value}\n")
    functions = [FunctionSpec(str(tmp_path / name / "same.py"), "f", label=name) for name in "ab"]
    with RewardManager(functions=functions) as rewards:
        assert score(rewards, ["x"]).parts == ({"a": 1.0, "b": 2.0},)


def test_an_error_names_the_function_that_cannot_be_loaded(file):
    functions = [FunctionSpec(file(FUNCTIONS), name, label=name) for name in ("length", "lenght")]
    with pytest.raises(RewardError, match="has no function 'lenght'; its functions are length, batched, judge"):
        RewardManager(functions=functions)


def test_functions_and_a_reward_model_add_up(several):
    batch = batch_of(["a", "abc"])
    batch = batch.with_columns(rm_scores=batch.ragged("responses").map(lambda ids: 0.0 * ids.float() + 1.0))
    result = CombinedRewards(several({"length": 2.0, "judge": 1.0}), weight=0.5).score(batch, decode)
    assert result.scores.tolist() == [2 + 1 + 0.5, 6 + 1 + 1.5]
    assert result.parts[0] == {"length": 1.0, "length/even": 0.0, "judge": 1.0, "function": 3.0, "model": 1.0}
