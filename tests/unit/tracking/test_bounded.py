"""Trackers that fail or hang: the run continues and one warning is logged."""

import sys
import threading
import time

import pytest

from camshaft.errors import ConfigError
from camshaft.tracking import RunInfo, Tracker, Tracking, bounded
from camshaft.tracking.jsonl import read_metrics

pytestmark = pytest.mark.alone


class State:
    """State of one test: a thread that outlives its test cannot write into the next one."""

    def __init__(self):
        self.steps: list[int] = []
        self.gate = threading.Event()
        """Hanging trackers wait for this event."""


STATES: list[State] = []


class Plain(Tracker):
    def __init__(self, run):
        self.state = STATES[-1]

    def log(self, metrics, step):
        self.state.steps.append(step)

    def finish(self):
        pass


class FullDisk(Plain):
    """A tracker that fails for odd steps."""

    def log(self, metrics, step):
        if step % 2:
            raise OSError("no space left on device")
        super().log(metrics, step)


class Exiting(Plain):
    """A tracker that tries to end the program at odd steps."""

    def log(self, metrics, step):
        if step % 2:
            sys.exit("the login has expired")
        super().log(metrics, step)


class AtOnce(FullDisk):
    synchronous = True


class Hanging(Plain):
    def log(self, metrics, step):
        self.state.gate.wait()
        super().log(metrics, step)


class NeverClosing(Plain):
    def finish(self):
        self.state.gate.wait()


class NeverStarting(Plain):
    def __init__(self, run):
        STATES[-1].gate.wait()


class NoServer(Plain):
    def __init__(self, run):
        raise TimeoutError("the server did not answer")


@pytest.fixture(autouse=True)
def state(monkeypatch):
    monkeypatch.setitem(sys.modules, "faulty", sys.modules[__name__])
    STATES.append(State())
    yield STATES[-1]
    STATES.pop().gate.set()


@pytest.fixture
def log(tmp_path):
    """Log so many steps to one of these trackers and to a file, which always receives all of them."""

    def log(name, steps, pause=0.0):
        run = RunInfo("p", "e", tmp_path, total_steps=steps)
        with Tracking([f"faulty:{name}", "jsonl"], run) as tracking:
            for step in range(1, steps + 1):
                tracking.log({"x": float(step)}, step)
                time.sleep(pause)
        assert [line["x"] for line in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, steps + 1))

    return log


def test_a_tracker_gets_all_steps_in_order(state, log, caplog):
    log("Plain", 50)
    assert len(state.steps) == 50
    assert sorted(state.steps) == state.steps
    assert caplog.messages == []


@pytest.mark.parametrize("name", ["FullDisk", "AtOnce"])
def test_a_failing_tracker_is_logged_once_and_called_again(state, log, caplog, name):
    log(name, 6)
    assert state.steps == [2, 4, 6]
    assert caplog.messages == [
        f"the tracker 'faulty:{name}' failed at step 1: OSError: no space left on device. "
        "The run continues to log later steps",
        f"the tracker 'faulty:{name}' failed in 3 of 6 calls",
    ]


def test_a_tracker_that_exits_is_logged_and_called_again(state, log, caplog):
    log("Exiting", 6)
    assert state.steps == [2, 4, 6]
    assert "failed at step 1: SystemExit: the login has expired. The run continues" in caplog.messages[0]


def test_a_hanging_tracker_is_logged_once_and_abandoned(state, log, caplog, monkeypatch):
    monkeypatch.setattr(bounded, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(bounded, "FINISH_SECONDS", 0.2)
    log("Hanging", 30, pause=0.01)
    assert state.steps == []
    slow, abandoned = caplog.messages
    assert "'faulty:Hanging' has not responded for 0 s. The run continues, and metrics are queued" in slow
    assert "'faulty:Hanging' did not finish within 0.2 s after the end of the run and is abandoned" in abandoned


def test_queued_calls_run_when_the_tracker_answers_again(state, tmp_path):
    tracking = Tracking(["faulty:Hanging"], RunInfo("p", "e", tmp_path, total_steps=9))
    for step in range(1, 10):
        tracking.log({"x": 1.0}, step)
    state.gate.set()
    tracking.finish()
    assert [*range(1, 10)] == state.steps


def test_the_queue_is_bounded(log, caplog, monkeypatch):
    monkeypatch.setattr(bounded, "MAX_QUEUED_CALLS", 3)
    monkeypatch.setattr(bounded, "FINISH_SECONDS", 0.1)
    log("Hanging", 30)
    warnings = [message for message in caplog.messages if "is full" in message]
    assert len(warnings) == 1
    assert "the queue of the tracker 'faulty:Hanging' is full; it loses metrics from step" in warnings[0]


def test_closing_is_bounded(state, log, caplog, monkeypatch):
    monkeypatch.setattr(bounded, "FINISH_SECONDS", 0.2)
    log("NeverClosing", 2)
    assert state.steps == [1, 2]
    assert "is abandoned" in caplog.text


@pytest.mark.parametrize(
    ("name", "why"),
    [("NeverStarting", "the tracker did not start within 0.2 s"), ("NoServer", "the server did not answer")],
)
def test_startup_is_bounded_and_errors_are_raised(log, monkeypatch, name, why):
    monkeypatch.setattr(bounded, "START_SECONDS", 0.2)
    with pytest.raises(ConfigError, match=rf"'faulty:{name}' failed to start: TimeoutError: {why}.*trainer\.logger"):
        log(name, 1)
