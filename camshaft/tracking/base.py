"""What a tracker is: something that takes the metrics of one step after another.

    class MyTracker(Tracker):
        def __init__(self, run: RunInfo): ...
        def log(self, metrics, step): ...
        def finish(self): ...

Those that show how a run ended have `ended(self, ending)` too.

Chosen with `my_package.my_module:MyTracker`, or by a name in the entry points of `camshaft.trackers`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

WALL_CLOCK = ("timing_s/", "timing/", "perf/")
"""Metrics with these beginnings differ from run to run."""

Ending = Literal["finished", "failed", "stopped"]
"""How a run ended: with its last step, with an error, or before its last step because it was asked to."""

Row = Mapping[str, str | float]
"""One validation response: prompt, response, ground truth, score."""


@dataclass(frozen=True)
class RunInfo:
    """What trackers may want to know of a run."""

    project: str
    experiment: str
    folder: Path
    """Where files of this run go."""
    total_steps: int
    resumed_step: int | None = None
    """The last step of the checkpoint that the run continues from; None for a run from the start."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The whole config as plain values, without secrets."""

    def place(self, name: str) -> Path:
        """`name` in the run's folder, which is there now."""
        folder = Path(self.folder).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name

    def kept_id(self, tracker: str) -> str | None:
        """The id by which a tracker knows the run that this one continues."""
        path = self.place(f"{tracker}_run_id.txt")
        return path.read_text(encoding="utf-8").strip() if self.resumed_step is not None and path.exists() else None

    def keep_id(self, tracker: str, run_id: str) -> None:
        """For the run that continues this one."""
        self.place(f"{tracker}_run_id.txt").write_text(run_id + "\n", encoding="utf-8")


class Tracker(ABC):
    """Constructed once with the `RunInfo`; `log` once per step; `finish` at the end, also after an error.

    All calls come from one thread, which is the tracker's own. What `log` and `log_generations` raise is told to the
    user once and stops nothing; what `check` and the constructor raise ends the run before its first step.
    """

    at_once: ClassVar[bool] = False
    """Called by the run itself, which waits for it: for what is done in no time and never hangs."""

    @classmethod
    def check(cls) -> None:
        """Raise a ConfigError if the tracker cannot work here; called before models are loaded."""
        return

    @abstractmethod
    def __init__(self, run: RunInfo): ...

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """All metrics of one step. Values are floats; they may be nan, inf and -inf."""

    def log_generations(self, rows: Sequence[Row], step: int) -> None:
        """Responses of the validation after `step`, for trackers that show texts; called before `log` of the step."""
        return

    def ended(self, ending: Ending) -> None:
        """How the run ended, for trackers that show it; called right before `finish`."""
        return

    @abstractmethod
    def finish(self) -> None:
        """Flush and close."""


def put_aside(path: Path) -> None:
    """Give a file or folder of an earlier run the first free name beside it: metrics.jsonl -> metrics.1.jsonl."""
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)


def deterministic(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those metrics that two runs with one seed must agree on to the last bit."""
    return {name: value for name, value in metrics.items() if not name.startswith(WALL_CLOCK)}
