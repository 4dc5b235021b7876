"""What a tracker is: something that takes the metrics of one step after another.

    class MyTracker(Tracker):
        def __init__(self, run: RunInfo): ...
        def log(self, metrics, step): ...

Chosen with `my_package.my_module:MyTracker`, or by a name in the entry points of `camshaft.trackers`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WALL_CLOCK = ("timing_s/", "timing/", "perf/")
"""Metrics with these beginnings differ from run to run."""


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
    """The whole config as plain values."""


class Tracker(ABC):
    """Constructed once with the `RunInfo`; `log` once per step; `finish` at the end, also after an error."""

    @abstractmethod
    def __init__(self, run: RunInfo): ...

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """All metrics of one step."""

    @abstractmethod
    def finish(self) -> None:
        """Flush and close."""


def deterministic(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those metrics that two runs with one seed must agree on to the last bit."""
    return {name: value for name, value in metrics.items() if not name.startswith(WALL_CLOCK)}
