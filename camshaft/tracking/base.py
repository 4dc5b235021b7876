"""Base class of trackers, which receive the metrics of each step.

    class MyTracker(Tracker):
        def __init__(self, run: RunInfo): ...
        def log(self, metrics, step): ...
        def finish(self): ...

Trackers that show the final state of a run also implement `on_run_end(self, ending)`.

Select a custom tracker with `my_package.my_module:MyTracker` or by an entry point of the group `camshaft.trackers`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

WALL_CLOCK = ("timing_s/", "timing/", "perf/")
"""Prefixes of metrics that depend on wall-clock time."""

Ending = Literal["finished", "failed", "stopped"]
"""Final state of a run: completed, ended by an error, or interrupted by a signal."""

Row = Mapping[str, str | float]
"""One validation response: prompt, response, ground truth, score."""


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run, for trackers."""

    project: str
    experiment: str
    folder: Path
    """Folder for the files of the run."""
    total_steps: int
    resumed_step: int | None = None
    """Step of the checkpoint that the run resumes from; None for a new run."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The whole config as plain values, without secrets."""

    def place(self, name: str) -> Path:
        """Return the path of `name` in the run's folder, which is created."""
        folder = Path(self.folder).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name

    def kept_id(self, tracker: str) -> str | None:
        """Return the tracker's id of the run that this one resumes, or None."""
        path = self.place(f"{tracker}_run_id.txt")
        return path.read_text(encoding="utf-8").strip() if self.resumed_step is not None and path.exists() else None

    def keep_id(self, tracker: str, run_id: str) -> None:
        """Save the tracker's run id for resumed runs."""
        self.place(f"{tracker}_run_id.txt").write_text(run_id + "\n", encoding="utf-8")


class Tracker(ABC):
    """A tracker. Call order: constructor, `log` once per step, `finish` at the end, also after an error.

    All calls are made from one dedicated thread. Errors of `log` and `log_generations` are logged once and do not stop
    the run. Errors of `check` and the constructor end the run before its first step.
    """

    at_once: ClassVar[bool] = False
    """True if the run calls the tracker synchronously; only for trackers that are fast and never block."""

    @classmethod
    def check(cls) -> None:
        """Raise a ConfigError if the tracker cannot work here; called before models are loaded."""
        return

    @abstractmethod
    def __init__(self, run: RunInfo): ...

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log all metrics of one step. Values are floats, including nan, inf and -inf."""

    def log_generations(self, rows: Sequence[Row], step: int) -> None:
        """Log responses of the validation after `step`; called before `log` of that step."""
        return

    def on_run_end(self, ending: Ending) -> None:
        """Record the final state of the run; called directly before `finish`."""
        return

    @abstractmethod
    def finish(self) -> None:
        """Flush and close."""


def back_up(path: Path) -> None:
    """Rename a file or folder of an earlier run to the first free name: metrics.jsonl -> metrics.1.jsonl."""
    number = 1
    while (target := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(target)


def deterministic(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that are bitwise equal between two runs with the same seed."""
    return {name: value for name, value in metrics.items() if not name.startswith(WALL_CLOCK)}
