"""`camshaft plan --like RUN` forecasts the time of a step from the times of an earlier run."""

import json
import statistics
from dataclasses import asdict, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from support.command_line import ROOT, camshaft
from support.ppo_runs import ppo_args

from benchmarks.workload import (
    LONGEST_ANSWER,
    LONGEST_PROMPT,
    LONGEST_RESPONSE,
    MINI_BATCH,
    PROMPTS,
    SAMPLES,
    SHAPES,
    TOKEN_BUDGET,
)
from camshaft.config import PPOConfig, load_ppo
from camshaft.errors import ConfigError
from camshaft.models.tiny import VOCABULARY_ROWS, make_tiny_model
from camshaft.planning.step_time import WARM_UP, Load, forecast_times, phase_costs
from camshaft.tracking.run_folder import RunFolder
from camshaft.trainer.resume import config_record

RESULTS = ROOT / "benchmarks" / "results"
UPDATES, STEPS = (
    json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"] for name in ("train_step.json", "ppo_step.json")
)
"""Committed measurements of updates, and of entire steps."""


def config(folder: Path, **more: Any) -> PPOConfig:
    (folder / "train.parquet").touch()
    settings = {
        "actor_rollout_ref.model.path": folder,
        "actor_rollout_ref.actor.strategy": "reference",
        "actor_rollout_ref.actor.ppo_mini_batch_size": MINI_BATCH // SAMPLES,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": TOKEN_BUDGET,
        "actor_rollout_ref.rollout.name": "torch",
        "actor_rollout_ref.rollout.n": SAMPLES,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "train.parquet",
        "data.val_files": "null",
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": LONGEST_PROMPT,
        "data.max_response_length": LONGEST_RESPONSE,
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
    }
    return load_ppo([f"{key}={value}" for key, value in (settings | more).items()])


def write_run(folder: Path, config: PPOConfig, steps: list[dict[str, float]]) -> RunFolder:
    """Write the folder of a finished run with these metrics."""
    folder.mkdir()
    facts = {"command": "ppo", "status": "finished", "config": config_record(config)}
    (folder / "run.json").write_text(json.dumps(facts, default=str), encoding="utf-8")
    lengths = {"prompt_length/mean": 32.0, "response_length/mean": 64.0, "response_length/max": 100.0}
    lines = [json.dumps({"step": number} | lengths | step) for number, step in enumerate(steps, start=1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return RunFolder(folder)


def grpo_step(seconds: float) -> dict[str, float]:
    """Return the times of a step of `seconds`."""
    return {
        "timing_s/gen": 0.3 * seconds,
        "timing_s/sync": 0.1 * seconds,  # a part of gen
        "timing_s/reward": 0.05 * seconds,
        "timing_s/old_log_prob": 0.1 * seconds,
        "timing_s/adv": 0.01 * seconds,
        "timing_s/update_actor": 0.5 * seconds,
        "timing_s/step": seconds,
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def measured_row(rows: list[dict[str, Any]], model: str, threads: int) -> dict[str, Any]:
    """Return the row of camshaft's actor."""
    facts = {"model": model, "threads": threads, "side": "camshaft"}
    (row,) = (row for row in rows if row | facts == row and row.get("role", "actor") == "actor")
    return row


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("planned", "earlier"), permutations(["1M", "4M", "18M"], 2))
def test_committed_times_of_updates_predict_each_other(
    planned: str, earlier: str, threads: int, tmp_path: Path
) -> None:
    load = Load(PROMPTS, SAMPLES, LONGEST_PROMPT / 2, LONGEST_RESPONSE / 2, LONGEST_RESPONSE)
    costs = {}
    for name in (planned, earlier):
        make_tiny_model(tmp_path / name, **asdict(SHAPES[name]))
        costs[name] = phase_costs(config(tmp_path / name), load)["update_actor"]
    seconds = {name: measured_row(UPDATES, name, threads)["seconds"] for name in costs}
    forecast = seconds[earlier] * costs[planned] / costs[earlier]
    assert forecast == pytest.approx(seconds[planned], rel=0.25)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("planned", "earlier"), permutations(["1M", "4M"], 2))
def test_committed_times_of_steps_predict_each_other(planned: str, earlier: str, threads: int, tmp_path: Path) -> None:
    costs, seconds = {}, {}
    for name in (planned, earlier):
        row = measured_row(STEPS, name, threads)
        load = Load(PROMPTS, SAMPLES, LONGEST_PROMPT / 2, row["mean_length"], LONGEST_ANSWER)
        make_tiny_model(tmp_path / name, **asdict(replace(SHAPES[name], vocab_size=VOCABULARY_ROWS)))
        phases = phase_costs(config(tmp_path / name), load)
        costs[name] = sum(phases[phase] for phase in ("gen", "old_log_prob", "update_actor"))
        seconds[name] = load.rows * row["mean_length"] / row["tokens_per_second"]
    forecast = seconds[earlier] * costs[planned] / costs[earlier]
    assert forecast == pytest.approx(seconds[planned], rel=0.25)


def test_the_same_run_has_the_measured_times(model: Path, tmp_path: Path) -> None:
    steps = [grpo_step(seconds) for seconds in (60.0, 30.0, 4.0, 5.0, 6.0)]
    run = write_run(tmp_path / "run", config(model), steps)
    times = forecast_times(config(model), run.path)
    assert times.phases["gen"] == pytest.approx(1.5)
    assert times.phases["update_actor"] == pytest.approx(2.5)
    assert times.step == pytest.approx(5.0)
    assert times.notes == []


def test_twice_the_prompts_take_twice_as_long(model: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", config(model), [grpo_step(5.0)] * (WARM_UP + 1))
    double = {"data.train_batch_size": 2 * PROMPTS}
    times = forecast_times(config(model, **double), run.path)
    assert times.phases["update_actor"] == pytest.approx(5.0, rel=0.02)


def test_a_phase_that_the_earlier_run_lacks_is_forecast_from_a_similar_one(model: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", config(model), [grpo_step(6.0)] * (WARM_UP + 1))
    times = forecast_times(config(model, **{"actor_rollout_ref.actor.use_kl_loss": True}), run.path)
    assert times.phases["ref"] == pytest.approx(0.6)
    assert times.notes == ["the time of ref is forecast from that of old_log_prob"]


def test_longer_limits_lengthen_only_responses_that_reached_them(model: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", config(model), [grpo_step(5.0)] * (WARM_UP + 1))
    longer = {"data.max_response_length": 2 * LONGEST_RESPONSE}
    assert forecast_times(config(model, **longer), run.path).step == pytest.approx(5.0)
    limit = config(model, **{"data.max_response_length": 64})
    full = write_run(tmp_path / "full", limit, [grpo_step(5.0)] * (WARM_UP + 1))
    assert forecast_times(config(model), full.path).phases["update_actor"] > 1.5 * 2.5


def test_a_run_that_is_too_short_is_an_error(model: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", config(model), [grpo_step(5.0)] * WARM_UP)
    with pytest.raises(ConfigError, match="pass a run of at least 3 steps"):
        forecast_times(config(model), run.path)


def test_a_folder_without_a_run_is_an_error(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run\.json of a PPO run"):
        forecast_times(config(model), tmp_path)


def test_the_command_forecasts_the_times_of_a_real_run(tmp_path: Path) -> None:
    settings = {
        "trainer.total_training_steps": WARM_UP + 2,
        "trainer.logger": "[jsonl]",
        "trainer.default_local_dir": tmp_path / "run",
    }
    arguments = ppo_args(tmp_path, settings)
    assert camshaft("ppo", *arguments).status == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = [line["timing_s/step"] for line in lines if "timing_s/step" in line][WARM_UP:]
    plan = camshaft("plan", "--like", str(tmp_path / "run"), *arguments)
    assert plan.status == 0, plan.err
    step = next(line for line in plan.out.splitlines() if line.startswith("step "))
    assert float(step.split()[1]) == pytest.approx(statistics.median(measured), rel=0.1)
    content = json.loads(camshaft("plan", "--json", "--like", str(tmp_path / "run"), *arguments).out)
    assert content["times"]["phases"].keys() >= {"gen", "update_actor", "other"}
