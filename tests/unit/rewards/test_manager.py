import logging
import sys
import time

import pytest
import torch

from camshaft.dataproto import Ragged
from camshaft.errors import BatchError, RewardError
from camshaft.ragged import on_last_token
from camshaft.rewards.manager import RewardManager

FAIL_AT_B = "if solution_str == 'b': {}\nreturn 1.0"


# -- scores -----------------------------------------------------------------------------------------


def test_scores_are_on_the_last_response_token(manager, score):
    result = score(manager("return len(solution_str) / 2"), ["a", "bcd"])
    # responses "a" and "bcd": 1/2 on the only token, then 3/2 on the third.
    assert result.token_level_scores.values.tolist() == [0.5, 0, 0, 1.5]
    assert result.token_level_scores.lengths.tolist() == [1, 3]
    assert result.token_level_scores.values.dtype == result.scores.dtype == torch.float32
    assert result.scores.tolist() == [0.5, 1.5]


def test_an_empty_response_has_only_a_sequence_score(manager, score):
    result = score(manager("return 1.0"), ["", "b"])
    assert (result.token_level_scores.values.tolist(), result.scores.tolist()) == ([1.0], [1.0, 1.0])


def test_the_function_gets_all_four_arguments(manager, score):
    rewards = manager(
        "return float((data_source, solution_str, ground_truth, extra_info) == ('test', 'a', 'x', {'k': 1}))"
    )
    assert score(rewards, ["a"], truths=["x"], extra_info=[{"k": 1}]).scores.tolist() == [1.0]


def test_reward_kwargs_reach_the_function(file, score):
    path = file("def f(data_source, solution_str, ground_truth, extra_info, *, scale): return scale * 2")
    with RewardManager(path, "f", {"scale": 3}) as rewards:
        assert score(rewards, ["a"]).scores.tolist() == [6.0]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_200_calls_keep_their_order_with_any_worker_count(manager, score, num_workers):
    rewards = manager("return {'score': int(solution_str), 'odd': int(solution_str) % 2}", num_workers=num_workers)
    result = score(rewards, [str(i) for i in range(200)])
    assert result.scores.tolist() == [float(i) for i in range(200)]
    assert result.metrics["reward/odd/mean"] == 0.5


@pytest.mark.alone
def test_calls_are_cheap(manager, score):
    rewards = manager("return 1.0")
    score(rewards, ["a"])
    start_time = time.process_time()
    score(rewards, ["a"] * 2000)
    assert time.process_time() - start_time < 2.0  # a millisecond each; about a thirtieth of it is used


def test_workers_are_kept_between_batches(manager, score):
    rewards = manager("import os\nreturn os.getpid()", num_workers=1)
    assert score(rewards, ["a"]).scores.tolist() == score(rewards, ["b"]).scores.tolist()


ALL_AT_ONCE = """import os, pathlib, time
folder = pathlib.Path({folder!r})
(folder / str(os.getpid())).touch()
while len(list(folder.iterdir())) < 4: time.sleep(0.01)
return 1.0"""


def test_several_workers_work_at_once(manager, score, tmp_path):
    folder = tmp_path / "processes"
    folder.mkdir()
    rewards = manager(ALL_AT_ONCE.format(folder=str(folder)), num_workers=4, timeout=200.0)
    assert score(rewards, ["a"] * 4).scores.tolist() == [1.0] * 4


def test_no_more_workers_start_than_samples(manager, score, alive):
    rewards = manager("return 1.0", num_workers=8)
    score(rewards, ["a", "b"])
    assert len(alive()) <= 2


def test_a_coroutine_is_awaited(manager, score):
    rewards = manager("import asyncio\nawait asyncio.sleep(0.01)\nreturn 2.0", head="async def")
    assert score(rewards, ["a", "b", "c"]).scores.tolist() == [2.0] * 3


def test_dict_entries_are_averaged_over_rows_that_have_them(manager, score):
    body = """
    if solution_str == 'a': return {'score': 1, 'format': 0.5, 'ok': True, 'text': 'x', 'bad': float('nan')}
    return {'score': 0, 'format': 1.0}
    """
    metrics = score(manager(body), ["a", "b", "b"]).metrics
    assert metrics["reward/format/mean"] == (0.5 + 1 + 1) / 3
    assert metrics["reward/ok/mean"] == 1.0
    assert not any("text" in name or "bad" in name for name in metrics)


def test_extracted_answers_are_strings_and_not_averaged(manager, score):
    body = """
    if solution_str == 'a': return {'score': 1, 'pred': ' 42 ', 'format': 0.5}
    if solution_str == 'b': return {'score': 1, 'pred': 42.5}
    if solution_str == 'c': return {'score': 0, 'pred': None}
    if solution_str == 'd': raise ValueError
    return 1.0
    """
    result = score(manager(body), ["a", "b", "c", "d", "e"])
    assert result.answers == ("42", "42.5", None, None, None)
    assert result.parts == ({"format": 0.5}, {}, {}, {}, {})
    assert not any("pred" in name for name in result.metrics)


@pytest.mark.parametrize(
    "value", ["float('nan')", *(pytest.param(v, marks=pytest.mark.slow) for v in ("1e39", "'high'"))]
)
def test_a_row_without_a_valid_score_has_no_parts(manager, score, value):
    body = f"return {{'score': {value} if solution_str == 'a' else 1.0, 'acc': 1.0, 'pred': 'x'}}"
    result = score(manager(body), ["a", "b"])
    assert (result.parts, result.answers) == (({}, {"acc": 1.0}), (None, "x"))
    assert (result.metrics["reward/invalid"], result.metrics["reward/acc/mean"]) == (1.0, 1.0)


def test_any_real_number_is_a_score(manager, score):
    result = score(
        manager("import fractions; return eval(solution_str)"), ["True", "3", "2.5", "fractions.Fraction(1, 2)"]
    )
    assert (result.num_failed, result.scores.tolist()) == (0, [1.0, 3.0, 2.5, 0.5])


def test_a_batch_without_rows_is_fine(manager, score):
    assert len(score(manager("return 1.0"), []).scores) == 0


def test_a_missing_column_is_named(manager):
    from camshaft.dataproto import DataProto

    with pytest.raises(BatchError, match="ground_truth"):
        manager("return 1.0").score(DataProto.from_dict({"data_source": ["x"]}), list)


# -- failures ---------------------------------------------------------------------------------------


def test_an_exception_fails_only_its_sample_and_is_logged(manager, score, caplog):
    rewards = manager(FAIL_AT_B.format("raise KeyError('no such thing')"))
    with caplog.at_level(logging.WARNING):
        result = score(rewards, ["a", "b", "c"])
    assert result.scores.tolist() == [1.0, 0.0, 1.0]
    assert (result.metrics["reward/errors"], result.num_failed) == (1.0, 1)
    (failure,) = result.failures
    assert (failure.row, failure.kind, failure.data_source) == (1, "error", "test")
    assert "KeyError: 'no such thing'" in failure.message
    # The traceback begins in the user's file.
    assert "my_reward.py" in failure.trace
    assert "worker.py" not in failure.trace
    assert "1 of 3 samples could not be scored" in caplog.text


def test_non_finite_numbers_are_invalid(manager, score):
    values = [
        *("float('nan')", "float('inf')", "-float('inf')", "1e300", "10**400", "None", "'1.0'", "[1.0]", "1j"),
        *("{'reward': 1}", "{'score': None}"),
    ]
    result = score(manager("return eval(solution_str)"), ["1.0", *values, "1.0"])
    assert result.scores.tolist() == [1.0, *[0.0] * len(values), 1.0]
    assert [failure.kind for failure in result.failures] == ["invalid"] * len(values)
    assert (result.metrics["reward/invalid"], result.num_failed) == (len(values), len(values))


def test_a_hanging_call_is_killed_and_others_are_scored(manager, score, clock):
    rewards = manager(FAIL_AT_B.format(f"{clock.event}; import time; time.sleep(600)"), num_workers=1)
    result = score(rewards, ["a", "b", "c", "d", "b", "e"])
    assert result.scores.tolist() == [1, 0, 1, 1, 0, 1]
    assert (result.metrics["reward/timeouts"], result.num_failed) == (2.0, 2)
    assert "20 s" in result.failures[0].message


def test_a_call_that_blocks_the_interpreter_is_killed(manager, score, clock):
    # This regular expression needs about 2**60 steps and releases no lock.
    fail = f"{clock.event}; import re; re.match(r'(a+)+$', 'a' * 60 + 'b')"
    rewards = manager(FAIL_AT_B.format(fail), num_workers=1)
    assert score(rewards, ["a", "b"]).metrics["reward/timeouts"] == 1.0


def test_the_time_limit_applies_per_call(manager, score, clock):
    clock.seconds = 9.0
    rewards = manager(f"{clock.event}\nreturn 1.0", num_workers=1)
    assert score(rewards, ["a"] * 8).num_failed == 0


@pytest.mark.alone
def test_loading_does_not_count_against_the_limit(file, score):
    path = file(
        """
        import time; time.sleep(1.0)
        def compute_score(data_source, solution_str, ground_truth, extra_info): return 1.0
        """
    )
    with RewardManager(path, timeout=0.3, num_workers=2) as rewards:
        assert score(rewards, ["a"] * 4).num_failed == 0


@pytest.mark.parametrize(
    ("death", "message"),
    [
        ("__import__('os')._exit(7)", "exited with code 7"),
        ("__import__('ctypes').string_at(0)", "signal 11"),
        pytest.param("__import__('os').kill(__import__('os').getpid(), 9)", "signal 9", marks=pytest.mark.slow),
    ],
)
def test_a_dead_process_fails_only_its_sample(manager, score, death, message):
    result = score(manager(FAIL_AT_B.format(death)), list("abcdefgb"))
    assert result.scores.tolist() == [1, 0, 1, 1, 1, 1, 1, 0]
    assert (result.metrics["reward/crashes"], result.num_failed) == (2.0, 2)
    assert message in result.failures[0].message


def test_sys_exit_is_an_error_and_not_the_end(manager, score):
    result = score(manager(FAIL_AT_B.format("raise SystemExit(3)")), list("abc"))
    assert (result.metrics["reward/errors"], result.scores.tolist()) == (1.0, [1, 0, 1])


def test_prints_do_not_disturb_the_scores(manager, score, capfd):
    rewards = manager("import os; print('to stdout'); os.write(1, b'raw'); os.system('echo child')\nreturn 1.0")
    assert score(rewards, ["a"] * 3).scores.tolist() == [1.0] * 3
    rewards.close()
    out, err = capfd.readouterr()
    assert out == ""
    assert "to stdout" in err
    assert "child" in err


def test_reading_standard_input_finds_nothing(manager, score):
    assert score(manager("import sys\nreturn len(sys.stdin.read())"), ["a"] * 3).scores.tolist() == [0.0] * 3


def test_a_function_may_use_alarms(manager, score):
    body = """
    import signal, time
    def late(*_): raise TimeoutError('mine')
    signal.signal(signal.SIGALRM, late); signal.setitimer(signal.ITIMER_REAL, 0.05)
    try: time.sleep(10)
    except TimeoutError: return 0.5
    """
    assert score(manager(body), ["a", "b"]).scores.tolist() == [0.5, 0.5]


@pytest.mark.alone
@pytest.mark.parametrize(
    "power",
    ["9^{9^{9^{9}}}", *(pytest.param(power, marks=pytest.mark.slow) for power in ("2^{1000000000}", "100000000!"))],
)
def test_slow_math_scores_zero_without_a_failure(score, power):
    with RewardManager(name="math", reward_kwargs={"seconds": 1}, timeout=20.0, num_workers=1) as rewards:
        result = score(rewards, [rf"\boxed{{{power}}}", r"\boxed{\frac12}"], truths=["3", "0.5"])
    assert (result.num_failed, result.scores.tolist()) == (0, [0.0, 1.0])
    assert result.metrics["timing_s/reward_call_max"] < 10


def test_a_file_may_limit_the_memory_of_its_processes(file, score):
    path = file(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            return len(bytearray(2**40 if solution_str == "b" else 8))
        """
    )
    with RewardManager(path) as rewards:
        result = score(rewards, ["a", "b", "c"])
    assert result.scores.tolist() == [8, 0, 8]
    assert "MemoryError" in result.failures[0].message


@pytest.mark.slow
def test_a_torch_scalar_is_a_valid_score_but_no_tensor(manager, score):
    body = "import torch; return torch.tensor([0.5] * len(solution_str)).squeeze()"
    result = score(manager(body, timeout=60.0, num_workers=1), ["a", "ab"])
    assert (result.scores.tolist(), result.num_failed) == ([0.5, 0.0], 1)


def test_an_unpicklable_object_fails_only_its_sample(manager, score, monkeypatch):
    import types

    module = types.ModuleType("only_in_the_driver")
    exec("class Thing: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_in_the_driver", module)
    result = score(manager("return 1.0"), ["a", "b"], truths=["x", module.Thing()])
    assert (result.scores.tolist(), result.metrics["reward/errors"]) == ([1.0, 0.0], 1.0)


def test_first_failures_are_listed_and_all_are_counted(manager, score, caplog):
    with caplog.at_level(logging.WARNING):
        result = score(manager("1 / 0"), ["a"] * 120)
    assert result.num_failed == 120
    assert [failure.row for failure in result.failures] == list(range(100))
    assert "120 of 120 samples could not be scored and count as 0" in caplog.text
    assert "row 0 (" in caplog.text
    assert caplog.text.count("ZeroDivisionError: division by zero\n") == 2  # of its message and its traceback
    assert "row 3 (" not in caplog.text


@pytest.mark.alone
def test_slow_calls_are_counted_and_listed_after_failures(manager, score):
    body = "import time\ntime.sleep(0.7 * (solution_str == 'late'))\nreturn 1 / (solution_str != 'bad')"
    result = score(manager(body, timeout=1.2, num_workers=1), ["late", "a", "bad"])
    assert (result.scores.tolist(), result.metrics["reward/slow"]) == ([1.0, 1.0, 0.0], 1.0)
    assert 0.7 <= result.metrics["timing_s/reward_call_max"] < 1.2
    assert [(one.row, one.kind, one.response) for one in result.failures] == [(2, "error", "bad"), (0, "slow", "late")]
    assert result.failures[1].seconds == result.metrics["timing_s/reward_call_max"]


# -- on_error=drop ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "failure",
    [
        *(pytest.param(failure, marks=pytest.mark.slow) for failure in ("raise ValueError", "return None")),
        "import os; os._exit(1)",
    ],
)
def test_drop_names_the_rows_that_failed(manager, score, caplog, failure):
    with caplog.at_level(logging.WARNING):
        result = score(manager(FAIL_AT_B.format(failure), on_error="drop"), list("abcb"))
    assert (result.dropped, result.scores.tolist()) == ((1, 3), [1.0, 0.0, 1.0, 0.0])
    assert "2 of 4 samples could not be scored and are dropped" in caplog.text
    assert score(manager(FAIL_AT_B.format(failure)), list("ab")).dropped == ()


# -- on_error=raise ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 3])
def test_raise_names_the_first_failing_row(manager, score, num_workers):
    # Row 4 fails late and rows from 5 on fail at once; the error names row 4.
    body = """
    import time
    row = int(solution_str)
    if row == 4: time.sleep(0.3)
    if row >= 4: raise ValueError(f'row {row} is bad')
    return 1.0
    """
    rewards = manager(body, on_error="raise", num_workers=num_workers)
    with pytest.raises(RewardError) as exc_info:
        score(rewards, [str(i) for i in range(40)])
    text = str(exc_info.value)
    assert "row 4 (data_source 'test')" in text
    assert "ValueError: row 4 is bad" in text
    assert "my_reward.py" in text
    assert score(rewards, ["1", "2"]).scores.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("failure", ["return None", "__import__('os')._exit(1)", "__import__('time').sleep(60)"])
def test_raise_covers_every_kind_of_failure(manager, score, clock, failure):
    hangs = "sleep" in failure
    fail = f"{clock.event}; {failure}" if hangs else failure
    rewards = manager(FAIL_AT_B.format(fail), on_error="raise", num_workers=1 if hangs else 2)
    with pytest.raises(RewardError, match="row 1"):
        score(rewards, ["a", "b", "a"])


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"timeout": 0}])
def test_no_workers_or_no_time_is_an_error(options):
    with pytest.raises(RewardError):
        RewardManager(**options)


def test_scores_are_on_the_last_masked_in_token():
    # Rows of 3, 2 and 1 tokens; tool tokens (mask 0) end the first row and are all tokens of the third.
    chosen = Ragged(torch.tensor([1, 1, 0, 1, 1, 0]).bool(), torch.tensor([3, 2, 1]))
    placed = on_last_token(torch.tensor([5.0, 7.0, 9.0]), chosen)
    assert placed.values.tolist() == [0.0, 5.0, 0.0, 0.0, 7.0, 0.0]
