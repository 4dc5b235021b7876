"""Tracking: the metrics of each step, to as many places as are wanted.

    with Tracking(["console", "jsonl"], RunInfo(project="demo", experiment="a", folder=Path("out"), ...)) as track:
        track.log({"critic/score/mean": 0.5, "timing_s/step": 1.2}, step=1)

One file per tracker; each brings its own library. What the metrics are called and mean is one table, `names.py`. The
trainers call `log` once for each step. A tracker that fails or hangs does not stop a run (`bounded.py`).
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
    """The trackers called `names`: names above, entry points of `camshaft.trackers`, or `package.module:Class`."""

    def __init__(self, names: Sequence[str], run: RunInfo):
        self._trackers: list[InTurn | OwnThread] = []
        self._last_step: int | None = None
        self.ending: Ending = "failed"
        """What the trackers are told at the end; the error that ends a `with` block is noticed by itself."""
        with ExitStack() as opened:  # if one fails, those before it are finished
            for name in dict.fromkeys(names):
                tracker = _start(name, run)
                self._trackers.append(tracker)
                opened.callback(self._close, tracker)
            self._finish = opened.pop_all()
        self.ending = "finished"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """All metrics of one step, to every tracker. Steps grow."""
        assert self._last_step is None or step > self._last_step, f"step {step} was logged after {self._last_step}"
        self._last_step = step
        plain = {name: float(value) for name, value in metrics.items()}
        for tracker in self._trackers:
            tracker.put(lambda it: it.log(plain, step), step)

    def log_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Responses of a validation, to every tracker; before the metrics of that step."""
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
    """A ConfigError for a tracker whose library is missing, or that cannot work here."""
    for name in names:
        _class(name).check()


def _class(name: str) -> type[Tracker]:
    try:
        return load(name, TRACKERS, "camshaft.trackers", Tracker)
    except CamshaftError as error:
        raise ConfigError(f"the tracker '{name}' cannot be used: {error}") from error


def _start(name: str, run: RunInfo) -> InTurn | OwnThread:
    chosen = _class(name)
    try:
        runner = InTurn if chosen.at_once else OwnThread
        return runner(name, lambda: chosen(run))  # pyright: ignore[reportAbstractUsage]  (a class derived from it)
    except Exception as error:
        raise ConfigError(
            f"the tracker '{name}' did not start: {type(error).__name__}: {error}. "
            "Take its name out of trainer.logger to run without it"
        ) from error


def _plain(value: Any) -> str | float:
    return value if isinstance(value, str | int | float) else str(value)
