"""Experiment tracking: send the metrics of each step to one or more trackers.

    with Tracking(["console", "jsonl"], RunInfo(project="demo", experiment="a", folder=Path("out"), ...)) as track:
        track.log({"critic/score/mean": 0.5, "timing_s/step": 1.2}, step=1)

Modules:

    base.py         base class of trackers
    bounded.py      calls trackers so that their errors and hangs do not stop a run
    names.py        table of all metrics, and the reference page
    console.py, jsonl.py, mlflow.py, prometheus.py, tensorboard.py, trackio.py, wandb.py
                    one tracker each
    terminal.py     the log on the console, and standard streams without a reader
    record.py       run.json, config.yaml, status.json and log.txt in the run folder
    no_signal.py    finds out why a step gives the policy no signal
    samples.py      responses of the steps in the run folder
    durable.py      flushes these files before a checkpoint covers them
    run_folder.py   reads the run folder, without torch

Only the file of a tracker imports its library. The trainers call `Tracking.log` once per step.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

from camshaft.errors import CamshaftError, ConfigError
from camshaft.plugins import TRACKERS, load
from camshaft.tracking.base import Ending, RunInfo, Tracker, deterministic
from camshaft.tracking.bounded import SynchronousTracker, ThreadedTracker

__all__ = ["TRACKERS", "Ending", "RunInfo", "Tracker", "Tracking", "check_trackers", "deterministic"]


class Tracking:
    """The trackers of a run.

    `names` are built-in names, entry points of the group `camshaft.trackers`, or import paths `package.module:Class`.
    """

    def __init__(self, names: Sequence[str], run: RunInfo):
        self._trackers: list[SynchronousTracker | ThreadedTracker] = []
        self._last_step: int | None = None
        self.ending: Ending = "failed"
        """Final state of the run, which trackers record. An exception in the `with` block sets it."""
        with ExitStack() as opened:  # if a tracker fails to start, those that started before are finished
            for name in dict.fromkeys(names):
                tracker = _start(name, run)
                self._trackers.append(tracker)
                opened.callback(self._close, tracker)
            self._finish = opened.pop_all()
        self.ending = "finished"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send all metrics of a step to every tracker. Step numbers must increase."""
        assert self._last_step is None or step > self._last_step, f"step {step} was logged after {self._last_step}"
        self._last_step = step
        plain = {name: float(value) for name, value in metrics.items()}
        for tracker in self._trackers:
            tracker.put(lambda it: it.log(plain, step), step)

    def log_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Send validation responses to every tracker. Call this method before `log` for the same step."""
        plain = [{name: _plain(value) for name, value in row.items()} for row in rows]
        for tracker in self._trackers:
            tracker.put(lambda it: it.log_generations(plain, step), step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Send some training responses of a step to every tracker. Call this method before `log` for the same step."""
        plain = [{name: _plain(value) for name, value in row.items()} for row in rows]
        for tracker in self._trackers:
            tracker.put(lambda it: it.log_samples(plain, step), step)

    def finish(self) -> None:
        """Finish all trackers."""
        self._finish.close()

    def _close(self, tracker: SynchronousTracker | ThreadedTracker) -> None:
        tracker.finish(self.ending)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if kind is not None:
            self.ending = "stopped" if kind is KeyboardInterrupt else "failed"
        if self.ending == "failed" and error is not None:
            message = str(error) if isinstance(error, CamshaftError) else f"{type(error).__name__}: {error}"
            for tracker in self._trackers:
                tracker.put(lambda it: it.on_error(message), self._last_step or 0)
        self.finish()


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError if a tracker is unknown, its library is not installed, or it cannot run on this machine."""
    for name in names:
        _class(name).check()


def _class(name: str) -> type[Tracker]:
    try:
        return load(name, TRACKERS, "camshaft.trackers", Tracker)
    except CamshaftError as error:
        raise ConfigError(f"the tracker '{name}' cannot be used: {error}") from error


def _start(name: str, run: RunInfo) -> SynchronousTracker | ThreadedTracker:
    tracker_class = _class(name)
    try:
        runner = SynchronousTracker if tracker_class.synchronous else ThreadedTracker
        return runner(name, lambda: tracker_class(run))
    except Exception as error:
        raise ConfigError(
            f"the tracker '{name}' failed to start: {type(error).__name__}: {error}. "
            "Remove it from trainer.logger to run without it"
        ) from error


def _plain(value: Any) -> str | float:
    return value if isinstance(value, str | int | float) else str(value)
