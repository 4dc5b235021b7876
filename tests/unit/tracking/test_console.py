import io
import re

import pytest
from rich.console import Console

from camshaft.tracking import RunInfo
from camshaft.tracking.console import ConsoleTracker

METRICS = {"critic/score/mean": 0.53124, "actor/ppo_kl": 0.00123456, "perf/throughput": 18402.3, "actor/lr": 1e-6}


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def make(tmp_path, clock, terminal=False, resumed_step=None):
    out = io.StringIO()
    # `_environ` replaces os.environ, so that the environment of the test run does not matter.
    console = Console(file=out, force_terminal=terminal, width=120, _environ={"NO_COLOR": "1", "TERM": "xterm"})
    run = RunInfo("p", "my-run", tmp_path, total_steps=100, resumed_step=resumed_step)
    return ConsoleTracker(run, console, clock), out


def test_without_a_terminal_each_step_is_one_line(tmp_path, clock):
    tracker, out = make(tmp_path, clock)
    clock.now += 2
    tracker.log(METRICS, step=1)
    # 99 steps of 2 s are left: 198 s.
    assert out.getvalue() == "step 1/100  reward 0.5312  kl 0.001235  tok/s 18,402  left 0:03:18\n"


def test_missing_metrics_are_not_shown(tmp_path, clock):
    tracker, out = make(tmp_path, clock)
    tracker.log({"val/reward/mean": 0.25}, step=0)
    assert out.getvalue() == "step 0/100  val 0.25  left ?\n"


def test_remaining_time_is_estimated_from_recent_steps(tmp_path, clock):
    tracker, out = make(tmp_path, clock)
    for step in range(1, 51):
        clock.now += 10 if step <= 25 else 1  # the slow start is no longer part of the average
        tracker.log({}, step)
    assert out.getvalue().splitlines()[-1] == "step 50/100  left 0:00:50"


def test_a_resumed_run_counts_only_its_steps(tmp_path, clock):
    tracker, out = make(tmp_path, clock, resumed_step=90)
    clock.now += 3
    tracker.log({}, step=91)
    assert out.getvalue() == "step 91/100  left 0:00:27\n"


def test_the_end_is_a_table(tmp_path, clock):
    tracker, out = make(tmp_path, clock)
    for step, reward in enumerate([0.25, 0.75, 0.5], start=1):
        clock.now += 20
        tracker.log({"critic/score/mean": reward}, step)
    tracker.finish()
    end = out.getvalue()
    assert "3 steps in 0:01:00" in end
    row = next(line for line in end.splitlines() if "reward" in line and "step" not in line)
    assert re.findall(r"[\d.]+", row) == ["0.25", "0.5", "0.25", "0.75"]


def test_the_validation_before_the_first_step_is_not_a_step(tmp_path, clock):
    tracker, out = make(tmp_path, clock)
    tracker.log({"val/reward/mean": 0.25}, step=0)
    for step in (1, 2):
        tracker.log({"critic/score/mean": 0.5}, step)
    tracker.finish()
    assert "2 steps in" in out.getvalue()


def test_a_run_without_steps_ends_silently(tmp_path, clock):
    tracker, out = make(tmp_path, clock)
    tracker.finish()
    assert out.getvalue() == ""


def test_a_terminal_has_one_live_line_without_colours(tmp_path, clock):
    tracker, out = make(tmp_path, clock, terminal=True)
    for step in (1, 2):
        tracker.log(METRICS, step)
    tracker.finish()
    text = out.getvalue()
    assert "my-run" in text
    assert "2/100" in text
    assert "reward 0.5312" in text
    assert "step 1/100" not in text
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", text)


def test_values_that_are_not_finite_are_shown(tmp_path, clock):
    tracker, out = make(tmp_path, clock)
    tracker.log({"critic/score/mean": float("nan")}, step=1)
    assert "reward nan" in out.getvalue()
    tracker.finish()
