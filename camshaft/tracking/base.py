"""Base class of trackers. A tracker receives the metrics of each step.

    class MyTracker(Tracker):
        def __init__(self, run: RunInfo): ...
        def log(self, metrics, step): ...
        def finish(self): ...

A tracker that shows the final state of a run also implements `on_run_end(self, ending)`, and
`on_error(self, message)` for the error of a run that failed.

`trainer.logger` selects a custom tracker by its import path (`my_package.my_module:MyTracker`), or by the name of an
entry point in the group `camshaft.trackers`.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from camshaft import storage

WALL_CLOCK = ("timing_s/", "timing/", "perf/", "async/trainer_wait", "async/generation", "async/generator")
"""Prefixes of metrics that depend on wall-clock time or on the memory of the machine."""

Ending = Literal["finished", "failed", "stopped"]
"""Final state of a run: completed, ended by an error, or stopped by a signal."""

Command = Literal["ppo", "sft", "rm", "serve"]
"""Command that trains a model."""

Row = Mapping[str, str | float]
"""Response with its prompt, ground truth and score."""


@dataclass(frozen=True)
class RunInfo:
    """Description of a run for trackers."""

    project: str
    experiment: str
    folder: Path
    """Folder for the files of trackers."""
    total_steps: int
    resumed_step: int | None = None
    """Step of the checkpoint that the run resumes from. None for a new run."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Config of the run as nested dicts, without secrets."""
    command: Command = "ppo"
    """Command that started the run."""
    recorded_steps: Sequence[Sequence[int]] = ()
    """Ranges of the steps that `metrics.jsonl` contained when the checkpoint was saved, as far as they are known."""

    def path(self, name: str) -> Path:
        """Return the path of the file `name` in the folder of the run, and create the folder if necessary."""
        folder = Path(self.folder).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name

    def load_run_id(self, tracker: str) -> str | None:
        """Return the run ID that the tracker saved, if this run resumes; None for a new run."""
        path = self.path(f"{tracker}_run_id.txt")
        if self.resumed_step is None or not path.exists():
            return None
        return path.read_text(encoding="utf-8").strip() or None  # empty after a power failure

    def save_run_id(self, tracker: str, run_id: str) -> None:
        """Save the run ID of the tracker, so that a resumed run can continue it."""
        path = self.path(f"{tracker}_run_id.txt")
        if self.load_run_id(tracker) != run_id:
            if os.path.lexists(path):
                storage.rename_existing(path)
            storage.write_text(path.parent, path.name, run_id + "\n")


class Tracker(ABC):
    """Base class of trackers.

    A run calls the constructor, `log` once per step, and `finish` at the end, also after an error. All calls are made
    from one dedicated thread, unless `synchronous` is set. Errors of `log` and `log_generations` do not stop the run,
    and only the first one is logged. Errors of `check` and of the constructor end the run before its first step.
    """

    synchronous: ClassVar[bool] = False
    """True if the run calls the tracker synchronously. Set it only for trackers that are fast and never block."""

    @classmethod
    def check(cls) -> None:
        """Raise a ConfigError if the tracker cannot run on this machine. Called before models are loaded."""
        return

    @abstractmethod
    def __init__(self, run: RunInfo): ...

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log all metrics of a step. Values are floats and can be nan, inf or -inf."""

    def log_generations(self, rows: Sequence[Row], step: int) -> None:
        """Log validation responses. Called before `log` for the same step."""
        return

    def log_samples(self, rows: Sequence[Row], step: int) -> None:
        """Log some training responses of a step. Called before `log` for the same step, but not in every step."""
        return

    def on_error(self, message: str) -> None:
        """Record the error that ended the run. Called before `on_run_end` with the ending `failed`."""
        return

    def on_run_end(self, ending: Ending) -> None:
        """Record the final state of the run. Called directly before `finish`."""
        return

    @abstractmethod
    def finish(self) -> None:
        """Write outstanding metrics and close the tracker."""


def deterministic(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that must be bitwise equal in two runs with the same seed."""
    return {name: value for name, value in metrics.items() if not name.startswith(WALL_CLOCK)}
