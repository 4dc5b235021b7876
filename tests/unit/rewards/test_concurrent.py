"""Async reward functions: many calls at a time, each with its time limit."""

import pytest

from camshaft.errors import RewardError

TRACE = """
import asyncio, os, time
delay = float(solution_str)
with open({path!r}, "a") as log: log.write("+")
try:
    await asyncio.sleep(delay)
finally:
    with open({path!r}, "a") as log: log.write("-")
return delay
"""


def peak(trace: str) -> int:
    """Return the largest number of calls that ran at the same time."""
    counts = [trace[:end].count("+") - trace[:end].count("-") for end in range(len(trace) + 1)]
    return max(counts)


@pytest.mark.parametrize(("num_workers", "limit"), [(1, 6), (2, 3)])
def test_calls_run_at_the_same_time_up_to_the_limit(manager, score, tmp_path, num_workers, limit):
    body = TRACE.format(path=str(tmp_path / "trace"))
    rewards = manager(body, head="async def", num_workers=num_workers, max_concurrency=limit)
    assert score(rewards, ["0.2"] * 12).scores.tolist() == [pytest.approx(0.2)] * 12
    trace = (tmp_path / "trace").read_text()
    assert (trace.count("+"), trace.count("-")) == (12, 12)
    assert 1 < peak(trace) <= limit


@pytest.mark.alone
def test_a_call_is_cancelled_at_its_time_limit(manager, score, tmp_path):
    body = TRACE.format(path=str(tmp_path / "trace"))
    rewards = manager(body, head="async def", num_workers=1, timeout=1.0)
    result = score(rewards, ["0", "600", "0.1", "600"])
    assert result.scores.tolist() == [0.0, 0.0, pytest.approx(0.1), 0.0]
    assert [(failure.row, failure.kind) for failure in result.failures] == [(1, "timeout"), (3, "timeout")]
    assert result.failures[0].message == "no result within 1 s; the call was cancelled"
    assert (tmp_path / "trace").read_text().count("-") == 4  # the calls were cancelled, not killed


@pytest.mark.parametrize(
    ("failure", "kind"),
    [("os._exit(7)", "crash"), ("time.sleep(60)", "timeout"), ("raise SystemExit", "error"), ("return 'x'", "invalid")],
)
def test_a_failure_affects_only_its_own_call(manager, score, clock, failure, kind):
    fail = f"{clock.event}; {failure}" if kind == "timeout" else failure
    body = f"import asyncio, os, time\nif solution_str == '5': {fail}\nawait asyncio.sleep(0.05)\nreturn 1.0"
    rewards = manager(body, head="async def", num_workers=1 if kind == "timeout" else 2)
    result = score(rewards, [str(row) for row in range(8)])
    assert result.scores.tolist() == [1, 1, 1, 1, 1, 0, 1, 1]
    assert [(failure.row, failure.kind) for failure in result.failures if failure.kind != "slow"] == [(5, kind)]


@pytest.mark.alone
def test_a_suppressed_cancellation_counts_as_a_timeout(manager, score):
    body = "import asyncio\ntry: await asyncio.sleep(60)\nexcept asyncio.CancelledError: return 1.0"
    result = score(manager(body, head="async def", timeout=0.5, num_workers=1), ["a"])
    assert (result.scores.tolist(), result.metrics["reward/timeouts"]) == ([0.0], 1.0)


def test_calls_of_a_process_share_an_event_loop(manager, score):
    body = "import asyncio\nreturn id(asyncio.get_running_loop()) % 10007"
    rewards = manager(body, head="async def", num_workers=1)
    scores = [score(rewards, ["a", "b"]).scores.tolist() for _ in range(2)]
    assert len({value for row in scores for value in row}) == 1


def test_the_first_failure_is_reported_with_raise(manager, score):
    body = "import asyncio\nawait asyncio.sleep(0.01)\nreturn 1 / (solution_str not in '37')"
    rewards = manager(body, head="async def", on_error="raise", num_workers=1, max_concurrency=2)
    with pytest.raises(RewardError, match=r"row 3 \(data_source 'test'\): error: ZeroDivisionError"):
        score(rewards, [str(row) for row in range(9)])
    assert score(rewards, ["1"]).scores.tolist() == [1.0]


@pytest.mark.alone
def test_a_function_whose_first_calls_are_all_cancelled_is_rejected(manager, score):
    body = "import asyncio\nawait asyncio.sleep(60)"
    rewards = manager(body, head="async def", timeout=0.3, num_workers=1, max_concurrency=9)
    with pytest.raises(RewardError, match=r"first 9 calls of the reward function 'compute_score' returned nothing"):
        score(rewards, ["a"] * 20)
