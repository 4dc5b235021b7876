import contextlib
import re
import subprocess
import sys

import pytest

from camshaft.errors import ConfigError
from camshaft.plugins import install_command
from camshaft.tracking import TRACKERS, RunInfo, Tracker, Tracking, check_trackers, deterministic

EVENTS: list[tuple] = []


class Recorder(Tracker):
    """A tracker that records its calls."""

    synchronous = True

    def __init__(self, run):
        EVENTS.append(("start", run.experiment))

    def log(self, metrics, step):
        EVENTS.append(("log", step, dict(metrics)))

    def finish(self):
        EVENTS.append(("finish",))


class OtherRecorder(Recorder):
    """Another tracker with the same base."""


class FailsOnFinish(Recorder):
    """A tracker that fails on finish."""

    def finish(self):
        super().finish()
        raise OSError("disk full")


class FailsOnStart(Recorder):
    """A tracker that cannot start."""

    def __init__(self, run):
        raise OSError("no login")


class NeedsStatus(Recorder):
    """A tracker that needs the status of the run."""

    def on_run_end(self, ending):
        EVENTS.append(("on_run_end", ending))


class NeedsStatusInThread(NeedsStatus):
    """A tracker with a thread that the run does not wait for."""

    synchronous = False


@pytest.fixture(autouse=True)
def events(monkeypatch):
    monkeypatch.setitem(sys.modules, "recorders", sys.modules[__name__])
    EVENTS.clear()
    return EVENTS


@pytest.fixture
def run(tmp_path):
    return RunInfo(project="p", experiment="e", folder=tmp_path, total_steps=3)


def test_every_tracker_gets_every_step(run, events):
    with Tracking(["recorders:Recorder", "recorders:OtherRecorder"], run) as tracking:
        tracking.log({"a": 1}, step=0)
        tracking.log({"a": 2.0}, step=5)
    start, finish = ("start", "e"), ("finish",)
    logs = [("log", 0, {"a": 1.0})] * 2 + [("log", 5, {"a": 2.0})] * 2
    assert events == [start, start, *logs, finish, finish]


def test_a_repeated_tracker_name_is_used_once(run, events):
    with Tracking(["recorders:Recorder", "recorders:Recorder"], run):
        pass
    assert events == [("start", "e"), ("finish",)]


def test_all_are_finished_even_if_one_cannot(run, events, caplog):
    Tracking(["recorders:Recorder", "recorders:FailsOnFinish", "recorders:OtherRecorder"], run).finish()
    assert events.count(("finish",)) == 3
    assert caplog.messages == ["the tracker 'recorders:FailsOnFinish' failed to close: OSError: disk full"]


def test_finishing_twice_is_finishing_once(run, events):
    with Tracking(["recorders:Recorder"], run) as tracking:
        tracking.finish()
    assert events.count(("finish",)) == 1


def test_a_startup_error_names_the_tracker_and_finishes_others(run, events):
    with pytest.raises(
        ConfigError, match=r"'recorders:FailsOnStart' failed to start: OSError: no login. .*trainer\.logger"
    ):
        Tracking(["recorders:Recorder", "recorders:FailsOnStart"], run)
    assert events == [("start", "e"), ("finish",)]


@pytest.mark.parametrize("name", ["NeedsStatus", "NeedsStatusInThread"])
def test_trackers_receive_the_ending_of_the_run(name, run, events):
    def ending(error: BaseException | None = None, stopped: bool = False) -> str:
        events.clear()
        with contextlib.suppress(BaseException), Tracking([f"recorders:{name}"], run) as tracking:
            if error is not None:
                raise error
            tracking.ending = "stopped" if stopped else tracking.ending
        assert events[-1] == ("finish",)
        return dict(events[:-1])["on_run_end"]

    assert ending() == "finished"
    assert ending(stopped=True) == "stopped"
    assert ending(ConfigError("x")) == ending(SystemExit(1)) == "failed"
    assert ending(KeyboardInterrupt()) == "stopped"


def test_trackers_end_as_failed_if_another_cannot_start(run, events):
    with pytest.raises(ConfigError):
        Tracking(["recorders:NeedsStatus", "recorders:FailsOnStart"], run)
    assert events == [("start", "e"), ("on_run_end", "failed"), ("finish",)]


def test_an_unknown_tracker_is_named_with_the_nearest(run):
    with pytest.raises(ConfigError, match=r"unknown name 'consol' .*Did you mean 'console'"):
        Tracking(["consol"], run)


def test_a_tracker_must_be_one(run):
    with pytest.raises(ConfigError, match="is not a subclass of Tracker"):
        Tracking(["pathlib:Path"], run)


@pytest.mark.parametrize("name", TRACKERS)
def test_every_built_in_takes_a_run(run, name, monkeypatch, caplog):
    if name == "trackio":
        pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(run.folder))
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    with Tracking([name], run) as tracking:
        tracking.log({"critic/score/mean": 0.5}, step=1)
    assert "the tracker" not in caplog.text


@pytest.mark.parametrize("library", ["mlflow", "tensorboard", "trackio", "wandb"])
def test_a_missing_library_error_names_the_fix(library, monkeypatch):
    for name in list(sys.modules):
        if name.startswith((f"{library}.", f"camshaft.tracking.{library}")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    with pytest.raises(ConfigError, match=f"'{library}' cannot be used: .* {re.escape(install_command(library))}"):
        check_trackers(["jsonl", library])


def test_a_step_is_logged_once(run):
    tracking = Tracking([], run)
    tracking.log({}, step=1)
    with pytest.raises(AssertionError, match="step 1 was logged after 1"):
        tracking.log({}, step=1)


def test_wall_clock_metrics_are_not_deterministic():
    metrics = {"timing_s/step": 1.0, "perf/throughput": 2.0, "actor/loss": 3.0, "reward/errors": 0.0}
    assert deterministic(metrics) == {"actor/loss": 3.0, "reward/errors": 0.0}


def test_importing_the_package_leaves_the_trackers_libraries_out():
    libraries = {"torch", "rich", "wandb", "mlflow", "tensorboard", "trackio"}
    code = f"import camshaft.tracking, sys; assert not {libraries} & sys.modules.keys()"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
