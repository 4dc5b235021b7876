"""A tracker that stops a run where a test wants it: right after a step was logged, before it is saved.

    trainer.logger=[jsonl,support.interrupting:InterruptingTracker]

With a file `hold` in the run's folder the run waits there for ever, to be killed; with a file `stop` it ends with an
error. Each holds the number of the step. Without them the tracker does nothing, so one command serves for all.
"""

import time
from collections.abc import Mapping
from pathlib import Path

from camshaft.errors import WorkerError
from camshaft.tracking import RunInfo, Tracker

NAME = f"{__name__}:InterruptingTracker"


def _step(file: Path) -> int | None:
    return int(file.read_text()) if file.exists() else None


class InterruptingTracker(Tracker):
    def __init__(self, run: RunInfo):
        self.folder = run.folder

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step == _step(self.folder / "stop"):
            raise WorkerError("the test ends this run")
        while step == _step(self.folder / "hold"):
            time.sleep(0.01)

    def finish(self) -> None:
        pass
