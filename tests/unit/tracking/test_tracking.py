import pytest

from camshaft.errors import ConfigError
from camshaft.tracking import TRACKERS, RunInfo, Tracker, Tracking, deterministic

EVENTS: list[tuple] = []


class Recorder(Tracker):
    """Writes down what it is told."""

    def __init__(self, run):
        EVENTS.append(("start", run.experiment))

    def log(self, metrics, step):
        EVENTS.append(("log", step, dict(metrics)))

    def finish(self):
        EVENTS.append(("finish",))


class Clumsy(Recorder):
    """Cannot finish."""

    def finish(self):
        super().finish()
        raise OSError("disk full")


class Absent(Recorder):
    """Cannot start."""

    def __init__(self, run):
        raise OSError("no login")


@pytest.fixture(autouse=True)
def events(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "recorders", sys.modules[__name__])
    EVENTS.clear()
    return EVENTS


@pytest.fixture
def run(tmp_path):
    return RunInfo(project="p", experiment="e", folder=tmp_path, total_steps=3)


def test_every_tracker_gets_every_step(run, events):
    with Tracking(["recorders:Recorder", "recorders:Recorder"], run) as tracking:
        tracking.log({"a": 1.0}, step=0)
        tracking.log({"a": 2.0}, step=5)
    start, finish = ("start", "e"), ("finish",)
    logs = [("log", 0, {"a": 1.0})] * 2 + [("log", 5, {"a": 2.0})] * 2
    assert events == [start, start, *logs, finish, finish]


def test_all_are_finished_even_if_one_cannot(run, events):
    tracking = Tracking(["recorders:Recorder", "recorders:Clumsy", "recorders:Recorder"], run)
    with pytest.raises(OSError, match="disk full"):
        tracking.finish()
    assert events.count(("finish",)) == 3


def test_finishing_twice_is_finishing_once(run, events):
    with Tracking(["recorders:Recorder"], run) as tracking:
        tracking.finish()
    assert events.count(("finish",)) == 1


def test_a_tracker_that_does_not_start_is_named_and_the_others_are_finished(run, events):
    with pytest.raises(ConfigError, match=r"'recorders:Absent' did not start: OSError: no login. .*trainer\.logger"):
        Tracking(["recorders:Recorder", "recorders:Absent"], run)
    assert events == [("start", "e"), ("finish",)]


def test_an_unknown_tracker_is_named_with_the_nearest(run):
    with pytest.raises(ConfigError, match=r"no 'consol' .*Did you mean 'console'"):
        Tracking(["consol"], run)


def test_a_tracker_must_be_one(run):
    with pytest.raises(ConfigError, match="is not a Tracker"):
        Tracking(["pathlib:Path"], run)


@pytest.mark.parametrize("name", TRACKERS)
def test_every_built_in_takes_a_run(run, name):
    with Tracking([name], run) as tracking:
        tracking.log({"critic/score/mean": 0.5}, step=1)


def test_a_step_is_logged_once(run):
    tracking = Tracking([], run)
    tracking.log({}, step=1)
    with pytest.raises(AssertionError, match="step 1 was logged after 1"):
        tracking.log({}, step=1)


def test_wall_clock_metrics_are_not_deterministic():
    metrics = {"timing_s/step": 1.0, "perf/throughput": 2.0, "actor/loss": 3.0, "reward/errors": 0.0}
    assert deterministic(metrics) == {"actor/loss": 3.0, "reward/errors": 0.0}


def test_importing_the_package_leaves_the_trackers_libraries_out():
    import subprocess
    import sys

    code = "import camshaft.tracking, sys; assert not {'torch', 'rich'} & sys.modules.keys()"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
