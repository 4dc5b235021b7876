"""Calls of the trackio library, with a fake module and, if installed, with the library."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest

from camshaft.tracking import RunInfo, Tracking

ROW = {"prompt": "1+1=", "response": "2", "ground_truth": "2", "score": 1.0}


def info(folder, resumed_step=None):
    config = {"actor": {"lr": 1e-6}}
    return RunInfo("my-project", "my-run", folder, total_steps=9, resumed_step=resumed_step, config=config)


@pytest.fixture
def calls(monkeypatch):
    """Record the calls of a fake library, which prints like the real one."""
    calls = []

    def init(**options):
        sys.stdout.write("* Trackio project initialized\n")
        calls.append(("init", options))
        return SimpleNamespace(
            name=options["name"], finish=finish, log=lambda values, step: calls.append((step, values))
        )

    def finish():
        sys.stdout.write("* Run finished.\n")
        calls.append("finish")

    double = SimpleNamespace(init=init, Table=lambda columns, data: (columns, data))
    monkeypatch.setitem(sys.modules, "trackio", double)
    monkeypatch.delitem(sys.modules, "camshaft.tracking.trackio", raising=False)
    yield calls
    sys.modules.pop("camshaft.tracking.trackio", None)


def test_a_run_is_logged_without_console_output(tmp_path, calls, capsys):
    with Tracking(["trackio"], info(tmp_path)) as tracking:
        tracking.log_generations([ROW], step=1)
        tracking.log({"critic/score/mean": 0.5}, step=1)
    init_options = {"project": "my-project", "name": "my-run", "resume": "never", "config": {"actor": {"lr": 1e-6}}}
    assert calls == [
        ("init", init_options | {"embed": False}),
        (1, {"val/generations": (list(ROW), [["1+1=", "2", "2", 1.0]])}),
        (1, {"critic/score/mean": 0.5}),
        "finish",
    ]
    assert capsys.readouterr() == ("", "")


def test_a_run_that_resumes_continues_the_same_one(tmp_path, calls):
    for resumed in (None, 2):
        with Tracking(["trackio"], info(tmp_path, resumed)):
            pass
    arguments = [call[1] for call in calls if call[0] == "init"]
    assert [(init["name"], init["resume"]) for init in arguments] == [("my-run", "never"), ("my-run", "allow")]


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
def test_the_real_library_accepts_the_calls(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for resumed, steps in ((None, (1, 2)), (2, (3,))):
        with Tracking(["trackio"], info(tmp_path / "run", resumed)) as tracking:
            for step in steps:
                tracking.log({"x": step / 3, "bad": float("nan")}, step)
            tracking.log_generations([ROW], step=steps[-1])
    assert capfd.readouterr() == ("", "")
    api = importlib.import_module("trackio").Api()
    assert [run.name for run in api.runs("my-project")] == ["my-run"]
    stored = importlib.import_module("trackio.sqlite_storage").SQLiteStorage.get_logs("my-project", "my-run")
    assert [(line["step"], line["x"]) for line in stored if "x" in line] == [(1, 1 / 3), (2, 2 / 3), (3, 1.0)]
    tables = [line["val/generations"] for line in stored if "val/generations" in line]
    assert [table["_value"] for table in tables] == [[ROW], [ROW]]
