"""Asynchronous runs that are stopped or killed resume with the batches under way, and equal an undisturbed run."""

import json
import shutil
import signal
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file
from support.command_line import camshaft
from support.interrupting import HOLDING, NAME, kill_in_update, run_until
from support.ppo_runs import ppo_args, saved_weights
from support.shared_folders import shared_folder

from camshaft import storage
from camshaft.tracking.jsonl import read_metrics

from .test_async_ppo import GRPO, MEASURED, PPO, STALENESS

STEPS = 6
RUNS: dict[str, tuple[dict[str, Any], int]] = {
    "grpo 1": (GRPO, 1),
    "grpo 2": (GRPO, 2),
    "ppo 1": (PPO, 1),
    "ppo 2": (PPO, 2),
}


def arguments(name: str, run: Path, **changes: Any) -> list[str]:
    overrides, staleness = RUNS[name]
    of_run: dict[str, Any] = {
        **overrides,
        STALENESS: staleness,
        "trainer.default_local_dir": run,
        "trainer.total_training_steps": STEPS,
        "trainer.total_epochs": 1,
        "trainer.save_freq": 2,
        "trainer.logger": f"[jsonl,{NAME}]",
        "trainer.resume_mode": "auto",
        "actor_rollout_ref.worker_cls": HOLDING,
    }
    return ["ppo", *ppo_args(home(), {**of_run, **changes})]


@cache
def home() -> Path:
    return shared_folder("async_home", lambda folder: None)


def undisturbed(name: str) -> Path:
    def write(folder: Path) -> None:
        result = camshaft(*arguments(name, folder / "run"))
        assert result.status == 0, result

    return shared_folder(f"async_{name.replace(' ', '_')}", write) / "run"


def lines(run: Path) -> list[dict[str, float]]:
    """Return the metrics of the steps without those that a clock measures."""
    return [
        {
            key: value
            for key, value in line.items()
            if not key.startswith((*MEASURED, "timing/")) or key.startswith("async/probe")
        }
        for line in read_metrics(run / "metrics.jsonl")
    ]


def assert_equal(run: Path, expected: Path) -> None:
    assert [json.dumps(line, sort_keys=True) for line in lines(run)] == [
        json.dumps(line, sort_keys=True) for line in lines(expected)
    ]
    roles = [role for role in ("actor", "critic") if (expected / f"global_step_{STEPS}" / role).exists()]
    for role in roles:
        actual, wanted = (saved_weights(folder / f"global_step_{STEPS}" / role) for folder in (run, expected))
        assert actual.keys() == wanted.keys()
        assert all(torch.equal(actual[name], wanted[name]) for name in wanted)


def learned_prompts(run: Path) -> Counter[str]:
    """Return the number of responses that were learned for each prompt, from the samples of the run."""
    tables = [pyarrow.parquet.read_table(file) for file in sorted((run / "samples").glob("*.parquet"))]
    return Counter(uid for table in tables for uid in table["uid"].to_pylist())


@pytest.mark.alone
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "grpo 1" else pytest.mark.slow) for name in RUNS]
)
def test_a_stopped_run_saves_the_batches_under_way(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staleness, run = RUNS[name][1], tmp_path / "run"
    result = run_until(3, run, arguments(name, run), monkeypatch, signal.SIGTERM)
    assert result.status == -signal.SIGTERM or result.status == 128 + signal.SIGTERM
    folder = run / "global_step_3" / "trainer"
    state = storage.read_state(folder / "state.json")
    batches = state["loader"]["pipeline"]["under_way"]
    steps = [4, 5][:staleness]
    assert [(batch["step"], batch["version"]) for batch in batches] == [(b, max(0, b - 1 - staleness)) for b in steps]
    tensors = load_file(folder / "in_flight.safetensors")
    for step in steps:
        versions = tensors[f"in_flight/{step}/policy_versions/values"]
        assert set(versions.tolist()) == {max(0, step - 1 - staleness)}
        assert len(versions) == len(tensors[f"in_flight/{step}/responses/values"])
    assert {"state.json", "in_flight.safetensors"} <= storage.read_manifest(folder)["files"].keys()
    assert camshaft(*arguments(name, run)).status == 0
    assert_equal(run, undisturbed(name))
    assert learned_prompts(run) == learned_prompts(undisturbed(name))
    per_prompt = 2 if "grpo" in name else 1
    assert set(learned_prompts(run).values()) == {per_prompt}
    assert len(learned_prompts(run)) == 8 * STEPS


@pytest.mark.alone
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "ppo 2" else pytest.mark.slow) for name in RUNS]
)
def test_a_run_that_is_killed_in_an_update_resumes_bitwise(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    kill_in_update(4, run, arguments(name, run), monkeypatch)
    assert [step for step, _ in storage.step_folders(run)] == [2]
    assert camshaft(*arguments(name, run)).status == 0
    assert_equal(run, undisturbed(name))
    assert learned_prompts(run) == learned_prompts(undisturbed(name))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("name", ["grpo 1", "ppo 2"])
def test_a_run_that_is_killed_before_its_save_resumes_bitwise(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run_until(4, run, arguments(name, run), monkeypatch)
    assert camshaft(*arguments(name, run)).status == 0
    assert_equal(run, undisturbed(name))


def stopped() -> Path:
    """Return a run with `max_staleness=2` that was stopped after step 3, with batches 4 and 5 under way."""

    def write(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            run_until(3, folder / "run", arguments("grpo 2", folder / "run"), monkeypatch, signal.SIGTERM)

    return shared_folder("async_stopped", write) / "run"


CHANGES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "smaller": ({STALENESS: 1}, [2, 2, 1]),
    "larger": ({STALENESS: 4}, [2, 2, 2]),
    "synchronous": ({STALENESS: 0}, []),
    "other batch": ({"data.train_batch_size": 4, "actor_rollout_ref.actor.ppo_mini_batch_size": 4}, [0, 1, 2]),
    "other group": ({"actor_rollout_ref.rollout.n": 4}, [0, 1, 2]),
}
"""Overrides of the resumed run, and the ages of the batches of steps 4 to 6."""


@pytest.mark.alone
@pytest.mark.parametrize("name", [pytest.param(c, marks=() if c == "smaller" else pytest.mark.slow) for c in CHANGES])
def test_a_resumed_run_may_change_its_bound_and_its_batches(name: str, tmp_path: Path) -> None:
    changes, ages = CHANGES[name]
    run = tmp_path / "run"
    shutil.copytree(stopped(), run)
    result = camshaft(*arguments("grpo 2", run, **changes))
    assert result.status == 0, result
    metrics = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert [line["async/staleness_max"] for line in metrics if "async/staleness_max" in line] == [0, 1, 2, *ages]
    assert f"{next(iter(changes))}={next(iter(changes.values()))} (was " in result.out
    if name.startswith("other"):
        assert "the batches under way are generated again" in result.out
    prompts = learned_prompts(run)
    size, group = changes.get("data.train_batch_size", 8), changes.get("actor_rollout_ref.rollout.n", 2)
    assert Counter(prompts.values()) == Counter({2: 24}) + Counter({group: 3 * size})
