"""Tracking: send the metrics of each step to several trackers.

    with Tracking(["console", "jsonl"], RunInfo(project="demo", experiment="a", folder=Path("out"), ...)) as track:
        track.log({"critic/score/mean": 0.5, "timing_s/step": 1.2}, step=1)

Modules:

    base.py         base class of trackers
    bounded.py      run trackers so that errors and hangs do not stop a run
    names.py        table of all metrics
    console.py, jsonl.py, mlflow.py, tensorboard.py, trackio.py, wandb.py: one tracker each, with its library

The trainers call `log` once per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from camshaft.errors import CamshaftError, ConfigError
from camshaft.plugins import TRACKERS, load
from camshaft.tracking.base import Ending, RunInfo, Tracker, deterministic
from camshaft.tracking.bounded import InTurn, OwnThread

__all__ = ["TRACKERS", "Ending", "RunInfo", "Tracker", "Tracking", "check_trackers", "deterministic"]


class Tracking:
    """All trackers of a run: built-in names, entry points of `camshaft.trackers`, or `package.module:Class`."""

    def __init__(self, names: Sequence[str], run: RunInfo):
        self._trackers: list[InTurn | OwnThread] = []
        self._last_step: int | None = None
        self.ending: Ending = "failed"
        """Final state passed to the trackers; an error that ends the `with` block sets it automatically."""
        with ExitStack() as opened:  # if one fails to start, the previous ones are finished
            for name in dict.fromkeys(names):
                tracker = _start(name, run)
                self._trackers.append(tracker)
                opened.callback(self._close, tracker)
            self._finish = opened.pop_all()
        self.ending = "finished"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send all metrics of one step to every tracker; steps must increase."""
        assert self._last_step is None or step > self._last_step, f"step {step} was logged after {self._last_step}"
        self._last_step = step
        plain = {name: float(value) for name, value in metrics.items()}
        for tracker in self._trackers:
            tracker.put(lambda it: it.log(plain, step), step)

    def log_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Send validation responses to every tracker; call it before `log` of that step."""
        plain = [{name: _plain(value) for name, value in row.items()} for row in rows]
        for tracker in self._trackers:
            tracker.put(lambda it: it.log_generations(plain, step), step)

    def finish(self) -> None:
        """Close all trackers."""
        self._finish.close()

    def _close(self, tracker: InTurn | OwnThread) -> None:
        tracker.finish(self.ending)

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.ending = "stopped" if kind is KeyboardInterrupt else "failed"
        self.finish()


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker that is unknown, lacks its library, or cannot run here."""
    for name in names:
        _class(name).check()


def _class(name: str) -> type[Tracker]:
    try:
        return load(name, TRACKERS, "camshaft.trackers", Tracker)
    except CamshaftError as error:
        raise ConfigError(f"the tracker '{name}' cannot be used: {error}") from error


def _start(name: str, run: RunInfo) -> InTurn | OwnThread:
    tracker_class = _class(name)
    try:
        runner = InTurn if tracker_class.at_once else OwnThread
        return runner(name, lambda: tracker_class(run))  # pyright: ignore[reportAbstractUsage]  (a subclass)
    except Exception as error:
        raise ConfigError(
            f"the tracker '{name}' did not start: {type(error).__name__}: {error}. "
            "Remove it from trainer.logger to run without it"
        ) from error


def _plain(value: Any) -> str | float:
    return value if isinstance(value, str | int | float) else str(value)
