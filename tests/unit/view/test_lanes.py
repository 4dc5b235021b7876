"""The lanes of a run, of hand-worked times, and of a real run."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.command_line import camshaft
from support.ppo_runs import ppo_args
from support.run_folders import make_run

from camshaft.tracking.run_folder import RunFolder
from camshaft.view.lanes import STEPS, lanes

NOON = 1_764_000_000.0
# A step takes 10 s: it publishes weights for 1 s, waits for 2 s, and learns for 7 s. Batch b is generated in 8 s from
# 4 s after the start of step b - 1 on, so that it is there when step b has waited for 2 s.
TIMES: dict[str, Any] = {
    "timing_s/step": lambda step: 10.0,
    "timing_s/sync": lambda step: 1.0,
    "timing_s/gen": lambda step: 2.0,
    "timing/received": lambda step: NOON + 10 * step + 3,
    "timing/generated": lambda step: NOON + 10 * step + 2.5,
    "async/generation": lambda step: 8.0,
    "async/staleness_max": lambda step: min(step - 1.0, 1.0),
}


def lanes_of(folder: Path) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    picture = lanes(RunFolder(folder))
    assert picture is not None
    return picture, {lane["name"]: lane["spans"] for lane in picture["lanes"]}


def seconds(spans: list[dict[str, Any]], kind: str) -> list[float]:
    return [round(span["end"] - span["start"], 3) for span in spans if span["kind"] == kind]


def test_lanes_of_hand_worked_times(tmp_path: Path) -> None:
    picture, of = lanes_of(make_run(tmp_path / "run", steps=3, curves=TIMES))
    # The first generation begins at 10 + 2.5 - 8 s, and the last step ends at 40 s after noon.
    assert (picture["first"], picture["last"], picture["seconds"]) == (1, 3, 40 - 4.5)
    assert seconds(of["trainer"], "publish") == [1.0] * 3
    assert seconds(of["trainer"], "wait") == [2.0] * 3
    assert seconds(of["trainer"], "learn") == [7.0] * 3
    assert seconds(of["generator"], "generate") == [8.0] * 3
    assert seconds(of["generator"], "wait") == [2.0] * 2
    starts = [span["start"] for span in of["trainer"] if span["kind"] == "learn"]
    assert starts == [13 - 4.5, 23 - 4.5, 33 - 4.5]
    assert [span["label"] for span in of["generator"] if span["kind"] == "generate"] == ["1: v0", "2: v0", "3: v1"]
    assert "step 3 trains version 2 on batch 3 for 7 s" in [span["text"] for span in of["trainer"]]
    assert "generates batch 3 with version 1 for 8 s" in [span["text"] for span in of["generator"]]


def test_a_synchronous_run_has_no_lanes(tmp_path: Path) -> None:
    assert lanes(RunFolder(make_run(tmp_path / "run"))) is None


def test_lanes_begin_behind_an_interruption(tmp_path: Path) -> None:
    curves = {**TIMES, "timing/generated": lambda step: float("nan") if step == 7 else NOON + 10 * step + 2.5}
    picture, of = lanes_of(make_run(tmp_path / "run", steps=9, curves=curves))
    assert (picture["first"], picture["last"]) == (8, 9)
    assert seconds(of["generator"], "generate") == [8.0] * 2
    picture, _ = lanes_of(make_run(tmp_path / "long", steps=40, curves=TIMES))
    assert (picture["first"], picture["last"]) == (41 - STEPS, 40)


def test_a_real_run_has_lanes_without_overlaps(tmp_path: Path) -> None:
    overrides: Mapping[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 2,
        "algorithm.rollout_correction.bypass_mode": True,
        "async_training.max_staleness": 1,
        "trainer.total_training_steps": 5,
        "trainer.logger": "[file]",
    }
    folder = tmp_path / "run"
    run = camshaft("ppo", *ppo_args(tmp_path, {**overrides, "trainer.default_local_dir": folder}))
    assert run.status == 0, run.err
    picture, of = lanes_of(folder)
    assert (picture["first"], picture["last"]) == (1, 5)
    labels = [span["label"] for span in of["generator"] if span["kind"] == "generate"]
    assert labels == ["1: v0", "2: v0", "3: v1", "4: v2", "5: v3"]
    for spans in of.values():
        assert all(one["end"] <= other["start"] + 1e-3 for one, other in pairwise(spans))
    arrivals = {span["step"]: span["end"] for span in of["generator"] if span["kind"] == "generate"}
    received = {span["step"]: span["start"] for span in of["trainer"] if span["kind"] == "learn"}
    assert all(arrivals[step] <= received[step] + 1e-3 for step in range(1, 6))
    assert picture["seconds"] == pytest.approx(max(span["end"] for spans in of.values() for span in spans), abs=1e-3)
