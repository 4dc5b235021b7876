import contextlib
import json
import math
import resource
import time

import pytest

from camshaft.errors import ConfigError
from camshaft.tracking import RunInfo, Tracking
from camshaft.tracking.jsonl import JsonlTracker, read_metrics


@pytest.fixture
def start(tmp_path):
    def start(resumed_step=None):
        run = RunInfo("p", "e", tmp_path / "deep" / "folder", total_steps=9, resumed_step=resumed_step)
        return JsonlTracker(run)

    return start


def steps(path):
    return [line["step"] for line in read_metrics(path)]


def test_a_step_is_one_line_with_the_step_first(start):
    tracker = start()
    before = time.time()
    tracker.log({"b": 1.0, "a": 2}, step=3)
    line = json.loads(tracker.path.read_text())  # flushed before finish
    assert list(line) == ["step", "timing/at", "b", "a"]
    assert before <= line.pop("timing/at") <= time.time()
    assert line == {"step": 3, "b": 1.0, "a": 2}
    tracker.finish()


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-300, 5e-324, -0.0, 2.0**53 + 2, math.pi, 123456789.123456789])
def test_floats_are_restored_bitwise(start, value):
    tracker = start()
    tracker.log({"x": value}, step=1)
    (line,) = read_metrics(tracker.path)
    assert line["x"].hex() == value.hex()


def test_values_that_are_not_finite_become_texts_and_numbers_again(start):
    tracker = start()
    tracker.log({"a": math.nan, "b": math.inf, "c": -math.inf}, step=1)
    texts = json.loads(tracker.path.read_text())
    assert [texts[name] for name in "abc"] == ["nan", "inf", "-inf"]
    (line,) = read_metrics(tracker.path)
    assert math.isnan(line["a"])
    assert (line["b"], line["c"]) == (math.inf, -math.inf)


def test_a_resumed_run_has_each_step_once(start):
    before = start()
    for step in range(1, 6):
        before.log({"x": float(step)}, step)
    text = before.path.read_text()
    after = start(resumed_step=3)
    assert after.path.read_text() == "".join(text.splitlines(keepends=True)[:3])
    for step in (4, 5):
        after.log({"x": float(step)}, step)
    with_times = map(json.loads, text.splitlines())
    assert [line | {"timing/at": 0.0} for line in read_metrics(after.path)] == [
        line | {"timing/at": 0.0} for line in with_times
    ]


def test_an_incomplete_last_line_is_dropped(start):
    before = start()
    before.log({"x": 1.0}, 1)
    with open(before.path, "a") as file:
        file.write('{"step": 2, "x"')
    after = start(resumed_step=2)
    after.log({"x": 3.0}, 3)
    assert steps(after.path) == [1, 3]


def test_resuming_without_a_file_begins_one(start):
    tracker = start(resumed_step=4)
    tracker.log({}, 5)
    assert steps(tracker.path) == [5]


def test_a_new_run_renames_an_existing_file(start):
    for value in (1.0, 2.0, 3.0):
        tracker = start()
        tracker.log({"x": value}, step=1)
        tracker.finish()
    folder = tracker.path.parent
    assert [line["x"] for line in read_metrics(tracker.path)] == [3.0]
    assert [read_metrics(folder / f"metrics.{n}.jsonl")[0]["x"] for n in (1, 2)] == [1.0, 2.0]


def test_lines_lost_to_a_full_disk_are_written_later(start):
    tracker = start()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in range(1, 5):
        full = step in (2, 3)  # space for half a line
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (tracker.path.stat().st_size + 9 * (step == 2) if full else soft, hard)
        )
        try:
            with pytest.raises(OSError, match="too large") if full else contextlib.nullcontext():
                tracker.log({"x": float(step)}, step)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    tracker.finish()
    assert [(line["step"], line["x"]) for line in read_metrics(tracker.path)] == [(step, step) for step in range(1, 5)]


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="the tracker 'jsonl' failed to start"):
        Tracking(["jsonl"], RunInfo("p", "e", tmp_path / "file" / "folder", total_steps=1))
