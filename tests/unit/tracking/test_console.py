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


def make(tmp_path, clock, terminal=False, resumed_step=None, width=120):
    out = io.StringIO()
    # `_environ` replaces os.environ, so that the environment of the test run does not matter.
    console = Console(file=out, force_terminal=terminal, width=width, _environ={"NO_COLOR": "1", "TERM": "xterm"})
    run = RunInfo("p", "my-run", tmp_path, total_steps=100, resumed_step=resumed_step)
    return ConsoleTracker(run, console, clock), out


def test_without_a_terminal_each_step_is_one_line(tmp_path, clock):
    tracker, out = make(tmp_path, clock)
    clock.now += 2
    tracker.log(METRICS, step=1)
    # 99 steps of 2 s are left: 198 s.
    assert out.getvalue() == "step 1/100  reward 0.5312  tok/s 18,402  policy kl 0.001235  left 0:03:18\n"


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
    assert "2/100" in text
    assert "reward 0.5312" in text
    assert "step 1/100" not in text
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", text)


def test_values_that_are_not_finite_are_shown(tmp_path, clock):
    tracker, out = make(tmp_path, clock)
    tracker.log({"critic/score/mean": float("nan")}, step=1)
    assert "reward nan" in out.getvalue()
    tracker.finish()


@pytest.mark.parametrize(
    ("metric", "label"),
    [("actor/reward_kl_penalty", "kl penalty"), ("actor/kl_loss", "kl loss"), ("actor/ppo_kl", "policy kl")],
)
def test_each_divergence_has_its_own_name(metric, label, tmp_path, clock):
    tracker, out = make(tmp_path, clock)
    tracker.log({metric: 0.5}, step=1)
    assert out.getvalue().startswith(f"step 1/100  {label} 0.5  left")


def test_a_policy_divergence_that_is_always_zero_is_omitted(tmp_path, clock):
    tracker, out = make(tmp_path, clock)
    tracker.log({"actor/ppo_kl": 0.0, "actor/kl_loss": 0.0}, step=1)
    assert out.getvalue().startswith("step 1/100  kl loss 0  left")


FULL = {
    **{"critic/score/mean": 0.5, "val/reward/mean": 0.25, "actor/kl_loss": 0.1, "response_length/mean": 211.5},
    **{"response_length/clip_ratio": 0.125, "actor/grad_norm": 0.75, "perf/throughput": 1e4, "actor/ppo_kl": 0.1},
}
LABELS = ["reward", "val", "kl loss", "length", "clipped", "grad", "tok/s", "policy kl"]


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_a_narrow_terminal_omits_the_last_labels(width, tmp_path, clock):
    tracker, out = make(tmp_path, clock, terminal=True, width=width)
    tracker.log(FULL, step=1)
    tracker.finish()
    line = next(line for line in out.getvalue().splitlines() if "1/100" in line)
    line = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]|\r", "", line)
    shown = [label for label in LABELS if f" {label} " in f" {line} "]
    assert shown == LABELS[: len(shown)]
    assert len(line.rstrip()) <= width
    assert (len(shown) == len(LABELS)) == (width >= 140)
    assert "left 0:00:00" in line


def test_clipped_responses_are_a_percentage(tmp_path, clock):
    tracker, out = make(tmp_path, clock)
    tracker.log(FULL, step=1)
    assert "length 211.5  clipped 12%  grad 0.75" in out.getvalue()


ROW = {"prompt": "What is\n2 + 2?", "response": "4", "ground_truth": "4", "score": 1.0}


def test_samples_are_lines_above_the_step(tmp_path, clock):
    tracker, out = make(tmp_path, clock)
    tracker.log_samples([ROW, ROW | {"response": "5\x1b[31m", "score": 0.0}], step=3)
    assert out.getvalue().splitlines() == [
        "step 3, best response: score 1",
        "  prompt    What is\\n2 + 2?",
        "  response  4",
        "step 3, worst response: score 0",
        "  prompt    What is\\n2 + 2?",
        "  response  5\N{REPLACEMENT CHARACTER}[31m",
    ]


def test_a_long_sample_keeps_its_beginning_and_its_end(tmp_path, clock):
    tracker, out = make(tmp_path, clock, width=80)
    tracker.log_samples([ROW | {"response": "a" * 500 + "z"}], step=1)
    response = out.getvalue().splitlines()[2]
    assert len(response) == 80
    assert re.fullmatch(r"  response  a+ \.\.\. a+z", response)


def test_validation_samples_are_printed_once_a_minute(tmp_path, clock):
    tracker, out = make(tmp_path, clock)
    printed = []
    for step in range(0, 130, 10):
        tracker.log_generations([ROW] * 4, step)
        clock.now += 10
        printed.append(out.getvalue().count("validation after"))
    assert printed == [2] * 6 + [4] * 6 + [6]
