"""Tracking: the metrics of each step, to as many places as are wanted.

    with Tracking(["console", "jsonl"], RunInfo(project="demo", experiment="a", folder=Path("out"), ...)) as track:
        track.log({"critic/score/mean": 0.5, "timing_s/step": 1.2}, step=1)

One file per tracker; each brings its own library. Metric names begin with the part they come from: actor/,
critic/, rollout/, rollout_corr/, reward/, val/, timing_s/, perf/. The trainers call `log` once for each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from camshaft.errors import CamshaftError, ConfigError
from camshaft.plugins import load
from camshaft.tracking.base import RunInfo, Tracker, deterministic

__all__ = ["TRACKERS", "RunInfo", "Tracker", "Tracking", "deterministic"]

TRACKERS = {
    "console": "camshaft.tracking.console:ConsoleTracker",
    "jsonl": "camshaft.tracking.jsonl:JsonlTracker",
}


class Tracking:
    """The trackers called `names`: names above, entry points of `camshaft.trackers`, or `package.module:Class`."""

    def __init__(self, names: Sequence[str], run: RunInfo):
        self._trackers: list[Tracker] = []
        self._last_step: int | None = None
        with ExitStack() as opened:  # if one fails, those before it are finished
            for name in names:
                tracker = _start(name, run)
                self._trackers.append(tracker)
                opened.callback(tracker.finish)
            self._finish = opened.pop_all()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """All metrics of one step, to every tracker. Steps grow."""
        assert self._last_step is None or step > self._last_step, f"step {step} was logged after {self._last_step}"
        self._last_step = step
        for tracker in self._trackers:
            tracker.log(metrics, step)

    def finish(self) -> None:
        """Close all trackers, the others too if one of them fails."""
        self._finish.close()

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()


def _start(name: str, run: RunInfo) -> Tracker:
    try:
        chosen = load(name, TRACKERS, "camshaft.trackers", Tracker)
        return chosen(run)  # pyright: ignore[reportAbstractUsage]  (a class derived from it)
    except CamshaftError as error:
        raise ConfigError(f"the tracker '{name}' cannot be used: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"the tracker '{name}' did not start: {type(error).__name__}: {error}. "
            "Take its name out of trainer.logger to run without it"
        ) from error
