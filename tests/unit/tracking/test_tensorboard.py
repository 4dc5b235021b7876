"""The real tensorboard library: its reader reads back the event files."""

import math
import time
from collections.abc import Callable

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from camshaft.tracking import RunInfo, Tracking

ROW = {"prompt": "1+1=", "response": "**2**\n| 3", "ground_truth": "2", "score": 1.0}


def log(folder, steps, resumed_step=None, value: Callable[[int], float] = float):
    run = RunInfo("p", "e", folder, total_steps=9, resumed_step=resumed_step, config={"actor": {"lr": 1e-6}})
    with Tracking(["tensorboard"], run) as tracking:
        for step in steps:
            tracking.log({"critic/score/mean": value(step), "x@2": 1}, step)


def read(folder):
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def scalars(folder, name="critic/score/mean"):
    return [(event.step, event.value) for event in read(folder).Scalars(name)]


def test_steps_are_restored(tmp_path):
    log(tmp_path, [0, 3, 4])
    assert scalars(tmp_path / "tensorboard") == [(0, 0.0), (3, 3.0), (4, 4.0)]
    assert scalars(tmp_path / "tensorboard", "x@2") == [(0, 1.0), (3, 1.0), (4, 1.0)]


def test_a_step_is_in_the_file_before_the_run_ends(tmp_path):
    tracking = Tracking(["tensorboard"], RunInfo("p", "e", tmp_path, total_steps=9))
    tracking.log({"critic/score/mean": 0.5}, 1)
    deadline = time.monotonic() + 200
    while "critic/score/mean" not in read(tmp_path / "tensorboard").Tags()["scalars"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    tracking.finish()


def test_values_that_are_not_finite_are_kept(tmp_path):
    log(tmp_path, [1], value=lambda step: math.nan)
    ((step, value),) = scalars(tmp_path / "tensorboard")
    assert step == 1
    assert math.isnan(value)


def test_a_run_that_resumes_has_each_step_once(tmp_path):
    log(tmp_path, [1, 2, 3, 4])
    log(tmp_path, [3, 4, 5], resumed_step=2, value=lambda step: 10.0 * step)
    assert scalars(tmp_path / "tensorboard") == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]


def test_a_new_run_renames_an_existing_folder(tmp_path):
    log(tmp_path, [1, 2])
    log(tmp_path, [1], value=lambda step: 7.0)
    assert scalars(tmp_path / "tensorboard") == [(1, 7.0)]
    assert scalars(tmp_path / "tensorboard.1") == [(1, 1.0), (2, 2.0)]


def test_config_and_responses_are_markdown_code_blocks(tmp_path):
    run = RunInfo("p", "e", tmp_path, total_steps=9, config={"actor": {"lr": 1e-6}})
    with Tracking(["tensorboard"], run) as tracking:
        tracking.log_generations([ROW, ROW], step=4)
    result = read(tmp_path / "tensorboard")
    config, texts = (result.Tensors(f"{name}/text_summary") for name in ("config", "val/generations"))
    assert '\n      "actor": {\n        "lr": 1e-06\n' in config[0].tensor_proto.string_val[0].decode()
    assert texts[0].step == 4
    one = ["prompt: 1+1=", "response: **2**", "| 3", "ground_truth: 2", "score: 1.0"]
    assert texts[0].tensor_proto.string_val[0].decode().split("\n") == [
        *(f"    {line}" for line in one), "    ", *(f"    {line}" for line in one)
    ]  # fmt: skip
