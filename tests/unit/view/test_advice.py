"""Advice names the cause of a bad run, and is silent on runs that learn."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.run_folders import Curve, make_run

from camshaft.errors import ConfigError
from camshaft.tracking import RunInfo, Tracking
from camshaft.tracking.jsonl import JsonlTracker
from camshaft.tracking.record import RECORD
from camshaft.tracking.run_folder import RunFolder, process_start
from camshaft.view.advice import SYMPTOMS, advise


def advice_on(folder: Path, now: float = 0.0) -> list[str]:
    run = RunFolder(folder)
    run.metrics.poll()
    return [advice.title for advice in advise(run, now)]


LOW: Curve = lambda step: 0.2  # noqa: E731
NONE: Curve = lambda step: math.nan  # noqa: E731

BAD: dict[str, dict[str, Curve]] = {
    "Reward function fails": {
        "reward/errors": lambda step: 12.0,
        "critic/score/mean": LOW,
        "rollout/response_tokens": lambda step: 6400.0,  # of 64 responses
        "response_length/mean": lambda step: 100.0,
        "rollout/rows_decoded": lambda step: 6336.0,
    },
    "Reward is always 0": {"critic/score/mean": lambda step: 0.0, "groups/same_share": lambda step: 1.0},
    "Responses are empty": {
        "response_length/mean": lambda step: max(1.0, 12.0 - step),
        "response_length/clip_ratio": lambda step: 0.0,
        "critic/score/mean": lambda step: min(0.0, step / 20 - 0.6),
        "critic/score/max": lambda step: 0.0,
        "critic/score/min": lambda step: min(0.0, step / 10 - 1.2),
        "actor/entropy": lambda step: 4.7 * 0.8**step,
        "actor/signal_share": lambda step: float(step < 13),
        "groups/same_share": lambda step: float(step > 12),
    },
    "Steps without signal": {
        "actor/signal_share": lambda step: float(step < 38),
        "critic/score/mean": LOW,
        "critic/score/min": LOW,
        "critic/score/max": LOW,
        "groups/same_share": lambda step: 1.0,
    },
    "Groups without signal": {
        "groups/same_share": lambda step: 0.97,
        "critic/score/mean": LOW,
        "critic/score/max": lambda step: 1.0,
    },
    "Advantages are equal": {
        "critic/advantages/min": lambda step: -1.0,
        "critic/advantages/max": lambda step: -1.0,
        "critic/score/mean": LOW,
        "critic/score/min": lambda step: 0.0,
        "critic/score/max": lambda step: 1.0,
    },
    "Entropy collapse": {
        "actor/entropy": lambda step: 2.0 * 0.8**step,
        "critic/score/mean": lambda step: 0.5 if step < 20 else 0.2,
    },
    "Learning rate too high": {
        "actor/grad_norm": lambda step: 1.0 if step < 20 else 500.0,
        "critic/score/mean": lambda step: 0.6 if step < 20 else 0.1,
    },
    "Policy does not change": {
        "critic/score/mean": lambda step: 0.1 + 0.01 * (step % 3),
        "actor/entropy": lambda step: 4.69 + 0.001 * (step % 2),
        "actor/lr": lambda step: 1e-6,
    },
    "Responses cut at the length limit": {
        "response_length/clip_ratio": lambda step: 0.8,
        "critic/score/mean": lambda step: 0.5 if step < 20 else 0.2,
    },
    "Generator differs from trainer": {
        "rollout/effective_sample_share": lambda step: 0.1,
        "rollout/log_prob_diff_mean": lambda step: 1.5,
    },
    "Rank is slow": {
        "perf/slowest_rank/rollout": lambda step: 0.0 if step % 10 == 0 else 3.0,
        "perf/rank_seconds/rollout/mean": lambda step: 2.0,
        "perf/rank_seconds/rollout/max": lambda step: 3.0,
    },
    "Skipped optimizer steps": {"actor/skipped_steps": lambda step: float(step > 35)},
}


def test_a_policy_that_collapses_at_once_has_too_high_a_rate(tmp_path: Path) -> None:
    curves: dict[str, Curve] = {
        "actor/entropy": lambda step: 4.0 if step == 1 else 0.1,
        "critic/score/mean": lambda step: 0.5 if step == 1 else 0.1,
        "critic/score/max": lambda step: 1.0,
        "groups/same_share": lambda step: float(step > 1),
    }
    assert advice_on(make_run(tmp_path / "bad", steps=40, curves=curves)) == ["Learning rate too high"]
    solved = curves | {"critic/score/mean": lambda step: 0.5 if step == 1 else 1.0}
    assert advice_on(make_run(tmp_path / "solved", steps=40, curves=solved)) == []


@pytest.mark.parametrize("algorithm", ["grpo", "gae"])
@pytest.mark.parametrize("engine", ["torch", "vllm", "again"])
def test_no_measured_reward_curve_gets_advice(algorithm: str, engine: str, tmp_path: Path) -> None:
    results = json.loads((Path(__file__).parents[3] / "benchmarks" / "results" / "reward_curves.json").read_text())
    for run in results["runs"][algorithm][engine]:
        rewards = run["rewards"]
        assert len(rewards) == 10
        tracker = JsonlTracker(RunInfo("sums", "run", tmp_path, total_steps=10))
        for step, reward in enumerate(rewards, start=1):
            tracker.log({"critic/score/mean": reward}, step)
        tracker.finish()
        assert advice_on(tmp_path) == []


@pytest.mark.parametrize("title", BAD)
def test_the_cause_of_a_bad_run_is_named(title: str, tmp_path: Path) -> None:
    assert advice_on(make_run(tmp_path / "bad", steps=40, curves=BAD[title])) == [title]


@pytest.mark.parametrize(
    "changed",
    [
        {
            "perf/slowest_rank/rollout": lambda step: float(step % 4)
        },  # the longest responses are on another rank each time
        {"perf/rank_seconds/rollout/max": lambda step: 2.1},
    ],
)
def test_ranks_that_take_turns_or_differ_little_are_not_slow(changed: dict[str, Curve], tmp_path: Path) -> None:
    assert advice_on(make_run(tmp_path / "run", steps=40, curves=BAD["Rank is slow"] | changed)) == []


def test_advice_names_the_slow_rank(tmp_path: Path) -> None:
    run = RunFolder(make_run(tmp_path / "run", steps=40, curves=BAD["Rank is slow"]))
    run.metrics.poll()
    (advice,) = advise(run, 0.0)
    assert "Rank 3 of the pool rollout works for 3 s per step, 1.5 times the mean" in advice.text
    assert "logs/rollout_rank3.log" in advice.text


@pytest.mark.parametrize(("gap", "text"), [(1e-6, "Lower max_staleness"), (0.3, "see docs/mismatch.md")])
def test_a_probe_tells_age_from_an_error_of_the_generator(gap: float, text: str, tmp_path: Path) -> None:
    curves = {**BAD["Generator differs from trainer"], "async/staleness_max": lambda step: 2.0}
    run = RunFolder(
        make_run(tmp_path / "run", steps=40, curves=curves | {"async/probe_log_prob_diff_mean": lambda _: gap})
    )
    run.metrics.poll()
    (advice,) = advise(run, 0.0)
    assert advice.title == "Generator differs from trainer"
    assert text in advice.text
    assert f"differ by {gap:g}" in advice.text.replace("1.0e-06", "1e-06")


def test_a_probe_is_read_although_all_samples_are_effective(tmp_path: Path) -> None:
    probe = {"async/probe_log_prob_diff_mean": lambda step: 0.3, "async/staleness_max": lambda step: 1.0}
    assert advice_on(make_run(tmp_path / "bad", steps=40, curves=probe)) == ["Generator differs from trainer"]
    probe["async/probe_log_prob_diff_mean"] = lambda step: 0.04
    assert advice_on(make_run(tmp_path / "good", steps=40, curves=probe)) == []


SCORES = {f"critic/score/{name}": LOW for name in ("mean", "min", "max")}


@pytest.mark.parametrize(
    ("curves", "n", "text"),
    [
        (SCORES, 8, "all scores are equal (0.2 in all steps)"),
        (SCORES | {"critic/score/min": lambda step: 0.2 if step > 5 else 0.0}, 8, "score of the run, 0.2: the prompts"),
        (SCORES | {"critic/score/min": lambda step: 0.1}, 1, "each prompt has a single response, which algorithm.adv"),
        (SCORES | {"critic/score/min": lambda step: 0.1}, 8, "the responses to each prompt have equal scores"),
        (
            SCORES | {"critic/advantages/max": LOW, "rollout_corr/rollout_rs_masked_fraction": lambda step: 1.0},
            8,
            "rollout correction rejects 100% of the tokens",
        ),
    ],
)
def test_advice_names_the_cause_of_steps_without_signal(
    curves: dict[str, Curve], n: int, text: str, tmp_path: Path
) -> None:
    curves = curves | {"actor/signal_share": lambda step: float(step < 6)}
    curves |= {"groups/same_share": lambda step: 1.0 if n > 1 else math.nan}
    run = RunFolder(make_run(tmp_path / "run", steps=8, curves=curves, changes={"algorithm.adv_estimator": "my:own"}))
    run.metrics.poll()
    (advice,) = advise(run, 0.0)
    assert advice.title == "Steps without signal"
    assert text in advice.text


def test_two_steps_without_signal_get_no_advice(tmp_path: Path) -> None:
    curves = SCORES | {"actor/signal_share": lambda step: float(step not in (7, 8))}
    assert advice_on(make_run(tmp_path / "run", steps=8, curves=curves)) == []


def test_a_policy_that_the_reward_does_not_reach_is_not_told_to_learn_faster(tmp_path: Path) -> None:
    curves = BAD["Policy does not change"] | {"actor/signal_share": lambda step: 0.0, "groups/same_share": NONE}
    curves |= {"critic/score/min": lambda step: 0.0, "critic/score/max": lambda step: 1.0}
    changes = {"algorithm.adv_estimator": "my:own"}
    assert advice_on(make_run(tmp_path / "run", steps=40, curves=curves, changes=changes)) == ["Steps without signal"]


def test_a_learning_run_gets_no_advice(tmp_path: Path) -> None:
    assert advice_on(make_run(tmp_path / "good", steps=60)) == []
    solved: dict[str, Curve] = {
        "critic/score/mean": lambda step: 1 - 0.8**step,
        "critic/score/max": lambda step: 1.0,
        "groups/same_share": lambda step: 1 - 0.8**step,
        "actor/entropy": lambda step: 2.0 * 0.9**step,
    }
    assert advice_on(make_run(tmp_path / "solved", steps=60, curves=solved)) == []


def test_truncated_responses_of_a_run_that_learns_get_no_advice(tmp_path: Path) -> None:
    curves: dict[str, Curve] = {
        "critic/score/mean": lambda step: 0.01 * step,
        "response_length/clip_ratio": lambda step: 0.9,
    }
    assert advice_on(make_run(tmp_path / "rising", steps=40, curves=curves)) == []


def test_equal_scores_from_the_start_are_no_solution(tmp_path: Path) -> None:
    curves: dict[str, Curve] = {
        "critic/score/mean": lambda step: 0.1,
        "critic/score/max": lambda step: 0.1,
        "groups/same_share": lambda step: 1.0,
    }
    assert advice_on(make_run(tmp_path / "constant", steps=40, curves=curves)) == ["Groups without signal"]


@pytest.mark.parametrize("steps", [1, 9])
def test_the_first_steps_get_no_advice(steps: int, tmp_path: Path) -> None:
    assert advice_on(make_run(tmp_path / "new", steps=steps, curves=BAD["Reward is always 0"])) == []


@pytest.fixture
def running(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a run in progress, in this process unless facts say otherwise."""

    def write(steps: int = 20, **facts: Any) -> Path:
        folder = make_run(tmp_path / "run", steps=steps, ending=None)
        status = {"step": steps + 1, "phase": "gen", "since": 1000.0, "at": 1000.0, "pid": os.getpid(), "host": "here"}
        (folder / "status.json").write_text(json.dumps(status))
        info = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(info | facts))
        return folder

    return write


def test_a_phase_that_does_not_end_is_stalled(running: Callable[..., Path]) -> None:
    folder = running(pid_start=process_start(os.getpid()))
    assert advice_on(folder, now=1030.0) == []
    assert advice_on(folder, now=1100.0) == ["Phase stalled"]


def test_a_first_step_that_does_not_end_is_stalled(running: Callable[..., Path]) -> None:
    folder = running(steps=0, pid_start=process_start(os.getpid()))
    assert advice_on(folder, now=1500.0) == []
    assert advice_on(folder, now=1700.0) == ["Phase stalled"]


def test_a_killed_process_is_named_with_its_phase(running: Callable[..., Path]) -> None:
    folder = running(pid_start="1")
    run = RunFolder(folder)
    run.metrics.poll()
    (advice,) = advise(run, 1030.0)
    assert advice.title == "Process killed"
    assert "in step 21, phase gen" in advice.text


def test_a_failed_run_shows_its_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError), Tracking([RECORD], RunInfo("sums", "first", tmp_path, total_steps=5)):
        raise ConfigError("the batch is too large")
    (advice,) = advise(RunFolder(tmp_path), 0.0)
    assert advice == ("Run failed", "the batch is too large")


def test_restarts_are_listed_with_their_causes(running: Callable[..., Path]) -> None:
    restart = {"at": 0.0, "saved": "7", "pause": 10.0, "cause": "WorkerError: rank 1 of 2 died"}
    run = RunFolder(running(restarts=[restart]))
    run.metrics.poll()
    (advice,) = advise(run, 1030.0)
    assert advice.title == "Run restarted"
    assert advice.text.endswith(", last saved step 7, pause 10 s: WorkerError: rank 1 of 2 died")


def test_every_symptom_is_tested() -> None:
    assert set(SYMPTOMS) == {*BAD, "Phase stalled", "Process killed", "Run failed", "Run restarted"}
