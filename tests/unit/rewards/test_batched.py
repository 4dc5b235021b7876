"""Reward functions that are called once for the whole batch."""

import logging

import pytest

from camshaft.errors import RewardError
from camshaft.rewards.manager import RewardManager

HEAD = "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"


@pytest.fixture
def batched(file):
    """Return a manager of a batch function with this body."""
    opened = []

    def make(body: str, head: str = HEAD, **options) -> RewardManager:
        source = head + "".join(f"    {line}\n" for line in body.splitlines())
        opened.append(RewardManager(file(source), **({"num_workers": 2, "timeout": 20.0} | options)))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def test_one_call_receives_the_lists_of_the_batch(batched, score):
    body = """
assert data_sources == ['test'] * 200 and ground_truths[7] == 't7' and extra_infos[7] == {'k': 7}
return [{'score': int(text), 'size': len(solution_strs)} for text in solution_strs]
"""
    texts = [str(i) for i in range(200)]
    extra = [{"k": i} for i in range(200)]
    result = score(batched(body), texts, truths=[f"t{i}" for i in range(200)], extra_info=extra)
    assert result.scores.tolist() == [float(i) for i in range(200)]
    assert result.metrics["reward/size/mean"] == 200.0


def test_a_coroutine_and_an_array_will_do(batched, score):
    body = "import asyncio; await asyncio.sleep(0.01)\nimport numpy\nreturn numpy.arange(len(solution_strs)) / 2"
    assert score(batched(body, head="async " + HEAD), ["a", "b", "c"]).scores.tolist() == [0.0, 0.5, 1.0]


def test_a_batch_without_rows_makes_no_call(batched, score):
    assert len(score(batched("raise ValueError"), []).scores) == 0


@pytest.mark.parametrize(
    ("failure", "metric"),
    [
        ("raise ValueError('bad text')", "errors"),
        ("__import__('os')._exit(7)", "crashes"),
        ("__import__('time').sleep(60)", "timeouts"),
        ("return solution_strs[:-1]", "invalid"),
        ("return 'many texts'", "invalid"),
        ("return {'score': 1.0}", "invalid"),
    ],
)
def test_a_sample_that_fails_its_batch_fails_alone(batched, score, clock, failure, metric):
    fail = f"{clock.event}; {failure}" if metric == "timeouts" else failure
    body = f"if '5' in solution_strs: {fail}\nreturn [1.0] * len(solution_strs)"
    rewards = batched(body, num_workers=1 if metric == "timeouts" else 2)
    result = score(rewards, [str(i) for i in range(8)])
    assert result.scores.tolist() == [1, 1, 1, 1, 1, 0, 1, 1]
    assert result.metrics[f"reward/{metric}"] == result.num_failed == 1
    assert [failure.row for failure in result.failures] == [5]


def test_failed_batches_are_retried_in_halves_with_a_warning(file, batched, score, tmp_path, caplog):
    # 8 rows of which row 5 is bad: all; 0-3 and 4-7; 4-5 and 6-7; 4 and 5.
    body = f"""
open({str(tmp_path / "calls")!r}, 'a').write(str(len(solution_strs)) + ' ')
return [1 / (text != '5') for text in solution_strs]
"""
    with caplog.at_level(logging.WARNING):
        score(batched(body, num_workers=1), [str(i) for i in range(8)])
    assert sorted((tmp_path / "calls").read_text().split()) == sorted("8442211")
    assert "a batched reward call with 8 samples failed; retrying each half: ZeroDivisionError" in caplog.text


def test_one_invalid_result_of_a_batch_affects_only_its_sample(batched, score, caplog):
    rewards = batched("return [float('nan'), 'high', None, 1.0]", num_workers=1)
    result = score(rewards, list("abcd"))
    assert (result.scores.tolist(), result.metrics["reward/invalid"]) == ([0, 0, 0, 1], 3)
    assert "halves" not in caplog.text


@pytest.mark.parametrize("num_workers", [1, 3])
def test_raise_names_the_first_row_that_fails(batched, score, num_workers):
    body = "return [1 / (int(text) not in (4, 6, 7)) for text in solution_strs]"
    rewards = batched(body, on_error="raise", num_workers=num_workers)
    with pytest.raises(RewardError, match=r"row 4 \(data_source 'test'\): error: ZeroDivisionError"):
        score(rewards, [str(i) for i in range(16)])
    assert score(rewards, ["1", "2"]).scores.tolist() == [1.0, 1.0]


def test_a_function_that_always_fails_fails_on_every_row(batched, score):
    result = score(batched("raise KeyError"), ["a"] * 9)
    assert (result.num_failed, len(result.failures)) == (9, 9)


def test_keyword_arguments_come_from_the_config(batched, score):
    head = "def compute_score(**given):\n"
    body = "return [2.0] * len(given['solution_strs']) if 'solution_strs' in given else 1.0"
    assert score(batched(body, head=head), ["a", "b"]).scores.tolist() == [1.0, 1.0]
    assert score(batched(body, head=head, batched=True), ["a", "b"]).scores.tolist() == [2.0, 2.0]


def test_config_and_parameters_are_compared(batched):
    with pytest.raises(
        RewardError, match=r"cannot be called with custom_reward_function\.batched=false: it has no parameter for the"
    ):
        batched("return []", batched=False)
    with pytest.raises(RewardError, match=r"contains solution_strs, already passed from the dataset"):
        batched("return []", reward_kwargs={"solution_strs": 1})
