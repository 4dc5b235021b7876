"""Scores of responses that arrive in parts equal those of a complete batch, but are ready sooner."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.processes import parent, still_running

from camshaft.errors import BatchError, RewardError
from camshaft.rewards.combined import CombinedRewards
from camshaft.rewards.manager import PendingScores, RewardManager, RewardResult
from camshaft.rewards.overlong import OverlongPenalty

from .conftest import batch_of, decode

TEXTS = ["0", "1", "bad", "3", "dies", "5", "none", "7", "hangs", "9"]
ALL_KINDS = """
import os, time
if solution_str == 'bad': raise ValueError('bad')
if solution_str == 'dies': os._exit(7)
if solution_str == 'none': return None
if solution_str == 'hangs': time.sleep(60)
return {'score': int(solution_str), 'odd': int(solution_str) % 2, 'pred': solution_str}
"""


def added(begun: PendingScores | None, texts: Sequence[str], parts: Sequence[tuple[int, int]]) -> PendingScores:
    """Add to `begun` the rows from the first up to the second number of each pair."""
    assert begun is not None
    for first, end in parts:
        begun.add(first, texts[first:end])
    return begun


def untimed(result: RewardResult) -> tuple[object, ...]:
    """Return a result without its durations."""
    metrics = {name: value for name, value in result.metrics.items() if not name.startswith("timing_s/")}
    failures = [replace(failure, seconds=0.0) for failure in result.failures]
    rows = result.token_level_scores
    return (
        *(result.scores.tolist(), rows.values.tolist(), rows.lengths.tolist()),
        *(metrics, failures, result.parts, result.answers, result.dropped),
    )


@pytest.mark.alone
@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("parts", [[(0, 5), (5, 10)], [(5, 10), (0, 5)], [(8, 10), (0, 3), (3, 3), (3, 8)]])
def test_result_does_not_depend_on_the_order_of_parts(manager, num_workers, parts):
    rewards = manager(ALL_KINDS, timeout=0.5, num_workers=num_workers, on_error="drop")
    batch = batch_of(TEXTS)
    expected = rewards.score(batch, decode)
    assert (expected.dropped, expected.num_failed) == ((2, 4, 6, 8), 4)
    begun = added(rewards.begin(batch.drop("responses")), TEXTS, parts)
    assert untimed(rewards.score(batch, decode, begun)) == untimed(expected)


def exists(file: Path) -> bool:
    deadline = time.monotonic() + 120
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return file.exists()


def test_reward_calls_start_before_the_last_response(manager, tmp_path):
    rewards = manager(f"open({str(tmp_path)!r} + '/' + solution_str, 'w')\nreturn 1.0")
    batch = batch_of(["a", "b", "c", "d"])
    begun = added(rewards.begin(batch), "abcd", [(2, 4)])
    assert exists(tmp_path / "c")
    assert exists(tmp_path / "d")
    assert not (tmp_path / "a").exists()
    assert rewards.score(batch, decode, added(begun, "abcd", [(0, 2)])).scores.tolist() == [1.0] * 4


def test_parts_do_not_wait_for_slow_calls_of_others(manager, tmp_path):
    body = f"""
    import pathlib, time
    file = pathlib.Path({str(tmp_path / "quick")!r})
    if solution_str == 'quick': file.touch()
    while not file.exists(): time.sleep(0.01)
    return 1.0
    """
    rewards, texts = manager(body, timeout=10.0), ["slow", "quick"]
    begun = added(rewards.begin(batch_of(texts)), texts, [(0, 1)])
    time.sleep(0.2)
    assert rewards.score(batch_of(texts), decode, added(begun, texts, [(1, 2)])).num_failed == 0


def test_a_worker_death_between_two_parts_loses_no_sample(manager, alive):
    rewards, texts = manager("return 1.0", num_workers=1), ["a", "b"]
    begun = added(rewards.begin(batch_of(texts)), texts, [(0, 1)])
    deadline = time.monotonic() + 120
    while begun._job.outcomes[0][0] is None and time.monotonic() < deadline:
        time.sleep(0.01)
    workers = alive()
    guards = [parent(pid) for pid in workers]
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    assert still_running(guards) == []  # a guard ends when all threads of its worker have ended
    assert rewards.score(batch_of(texts), decode, added(begun, texts, [(1, 2)])).num_failed == 0


def test_raise_names_the_first_failing_row_in_any_order(manager):
    rewards = manager("return 1 / (solution_str not in 'bd')", on_error="raise")
    batch = batch_of(list("abcd"))
    with pytest.raises(RewardError, match=r"row 1 \(data_source 'test'\): error: ZeroDivisionError"):
        rewards.score(batch, decode, added(rewards.begin(batch), "abcd", [(2, 4), (0, 2)]))
    assert rewards.score(batch_of(["a"]), decode).scores.tolist() == [1.0]


def test_a_function_of_batches_waits_for_all_of_them(file):
    with RewardManager(file("def compute_score(solution_strs, **more): return [len(solution_strs)] * 3")) as rewards:
        batch = batch_of(list("abc"))
        begun = added(rewards.begin(batch), "abc", [(1, 3), (3, 3), (0, 1)])
        assert rewards.score(batch, decode, begun).scores.tolist() == [3.0] * 3


def test_unscorable_data_are_reported_at_once(manager):
    rewards = manager("return 1.0")
    with pytest.raises(BatchError, match="ground_truth"):
        rewards.begin(batch_of(["a"]).drop("ground_truth"))
    batch = batch_of(list("abc"))
    with pytest.raises(RewardError, match="2 of 3 responses are missing"):
        rewards.score(batch, decode, added(rewards.begin(batch), "abc", [(1, 2)]))


# -- canceled requests ----------------------------------------------------------------------------


@pytest.mark.alone
def test_closing_ends_pending_calls(manager, alive):
    rewards = manager("import time; time.sleep(600)", timeout=1000.0)
    added(rewards.begin(batch_of(list("abcd"))), "abcd", [(0, 2)])
    rewards.close()
    assert alive() == []


def test_the_next_batch_ignores_answers_of_a_cancelled_one(manager):
    rewards = manager("import time; time.sleep(60 * (solution_str == 'slow'))\nreturn len(solution_str)", timeout=100.0)
    for start in (rewards.begin, lambda batch: rewards.score(batch, decode)):
        texts = ["slow", "slow"]
        added(rewards.begin(batch_of(texts)), texts, [(0, 2)]).cancel()
        added(start(batch_of(["a"])), ["a"], [(0, 1)]) if start == rewards.begin else start(batch_of(["a"]))
    batch = batch_of(["a", "bc"])
    assert rewards.score(batch, decode, added(rewards.begin(batch), ["a", "bc"], [(0, 2)])).scores.tolist() == [1, 2]


def test_batches_that_have_begun_keep_their_calls(manager, tmp_path):
    rewards = manager(f"open({str(tmp_path)!r} + '/' + solution_str, 'w')\nreturn len(solution_str)", num_workers=2)
    texts = [["a", "bb"], ["ccc"], ["dddd", "eeeee"]]
    begun = [added(rewards.begin(batch_of(rows)), rows, [(0, len(rows))]) for rows in texts]
    assert exists(tmp_path / "eeeee")  # before any result is collected
    alone = rewards.score(batch_of(["ffffff"]), decode)
    assert alone.scores.tolist() == [6]
    for rows, pending in reversed(list(zip(texts, begun, strict=True))):  # in another order
        assert rewards.score(batch_of(rows), decode, pending).scores.tolist() == [len(row) for row in rows]


def test_a_batch_without_its_responses_is_named_instead_of_waited_for(manager):
    rewards = manager("return 1.0")
    first = added(rewards.begin(batch_of(list("abc"))), "abc", [(0, 1)])
    second = added(rewards.begin(batch_of(["d"])), "d", [(0, 1)])
    for score in (
        lambda: rewards.score(batch_of(["d"]), decode, second),
        lambda: rewards.score(batch_of(["e"]), decode),
    ):
        with pytest.raises(RewardError, match="2 of 3 responses of an earlier `begin` are missing"):
            score()
    first.cancel()
    assert rewards.score(batch_of(["d"]), decode, second).scores.tolist() == [1.0]


def test_a_scored_batch_does_not_wait_for_later_ones(manager):
    rewards = manager("import time; time.sleep(60 * (solution_str == 'slow'))\nreturn 1.0", timeout=100.0)
    first = added(rewards.begin(batch_of(["a"])), ["a"], [(0, 1)])
    first._done.result(60)
    for _ in range(2):
        added(rewards.begin(batch_of(["slow"])), ["slow"], [(0, 1)])
    assert rewards.score(batch_of(["a"]), decode, first).scores.tolist() == [1.0]


@pytest.mark.alone
def test_closing_ends_the_calls_of_all_batches(manager, alive):
    rewards = manager("import time; time.sleep(600)", timeout=1000.0)
    for _ in range(3):
        added(rewards.begin(batch_of(list("ab"))), "ab", [(0, 2)])
    rewards.close()
    assert alive() == []


@pytest.mark.slow
def test_a_failing_driver_leaves_no_processes(file, alive):
    path = file("import time\ndef compute_score(data_source, solution_str, ground_truth, extra_info): time.sleep(60)")
    driver = f"""
from camshaft.dataproto import DataProto
from camshaft.rewards.manager import RewardManager
rewards = RewardManager({path!r}, num_workers=2)
begun = rewards.begin(DataProto.from_dict({{"data_source": ["x"] * 4, "ground_truth": ["x"] * 4}}))
begun.add(0, ["a", "b"])
1 / 0
"""
    result = subprocess.run([sys.executable, "-c", driver], capture_output=True, text=True, timeout=30, check=False)
    assert result.stderr.rstrip().endswith("ZeroDivisionError: division by zero")
    deadline = time.monotonic() + 4  # a worker that is still starting finds its pipe closed
    while alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive() == []


class _Interrupt(Exception):
    pass


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raise an exception in the main thread, as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise _Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_during_scoring_stops_the_calls(manager, tmp_path):
    body = f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    rewards, batch = manager(body, timeout=100.0), batch_of(["a"])
    begun = added(rewards.begin(batch), "a", [(0, 1)])
    assert exists(tmp_path / "pid")
    with pytest.raises(_Interrupt), interrupted_after(0.2):
        rewards.score(batch, decode, begun)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# -- users of a manager -----------------------------------------------------------------------------


def test_combined_and_penalized_rewards_can_begin_early(manager):
    texts = ["a", "bcd"]
    batch = batch_of(texts)
    responses = batch.ragged("responses")
    batch = batch.with_columns(
        rm_scores=responses.map(lambda ids: ids.float()),
        response_mask=responses.map(lambda ids: ids > 0),
    )
    both = CombinedRewards(manager("return len(solution_str)"), weight=0.5)
    rewards = OverlongPenalty(both, limit=4, buffer=2, factor=1.0, log=True)
    expected = rewards.score(batch, decode)
    begun = added(rewards.begin(batch.drop("responses", "rm_scores")), texts, [(1, 2), (0, 1)])
    assert untimed(rewards.score(batch, decode, begun)) == untimed(expected)
    assert CombinedRewards(None).begin(batch) is None


def test_a_process_that_does_not_read_its_calls_is_killed_at_the_time_limit(manager, clock):
    """A regular expression holds the interpreter lock, so the process does not read the calls that follow."""
    body = f"import re\nif solution_str == 'b': {clock.event}; re.match('(a+)+$', 'a' * 60 + 'b')\nreturn 1.0"
    clock.seconds = 0.0
    rewards = manager(body, head="async def", num_workers=1)
    texts = ["b", *["x" * 100_000] * 8]
    begun = added(rewards.begin(batch_of(texts)), texts, [(0, 1)])
    while not clock.num_events:
        time.sleep(0.01)
    clock.seconds = 30.0
    result = rewards.score(batch_of(texts), decode, added(begun, texts, [(1, 9)]))
    assert result.scores.tolist() == [0, *[1] * 8]
    assert result.metrics["reward/timeouts"] == 1.0
