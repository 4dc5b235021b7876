"""A tracker that stops a run where a test wants it: right after a step was logged, before it is saved.

    trainer.logger=[jsonl,support.interrupting:InterruptingTracker]

With a file `hold` in the run's folder the run waits there for ever, to be killed; with a file `stop` it exits (of the
errors of a tracker a run takes no notice). Each holds the number of the step. Without them the tracker does nothing, so
one command serves for all. `run_until` is the test's side of the first.
"""

import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from camshaft.tracking import RunInfo, Tracker
from support.command_line import Run, finished, start

NAME = f"{__name__}:InterruptingTracker"


def _step(file: Path) -> int | None:
    return int(file.read_text()) if file.exists() else None


class InterruptingTracker(Tracker):
    at_once = True

    def __init__(self, run: RunInfo):
        self.folder = run.folder

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step == _step(self.folder / "stop"):
            raise SystemExit("the test ends this run")
        while step == _step(self.folder / "hold"):
            time.sleep(0.01)

    def finish(self) -> None:
        pass


def run_until(
    step: int,
    run: Path,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    how: signal.Signals = signal.SIGKILL,
    everybody: Callable[[signal.Signals], None] | None = None,
) -> Run:
    """Start `camshaft *words` in a process of its own, and end it when the step is logged and not yet saved.

    `run` is the folder of the run, which has this module's tracker. `everybody` sends the signal to more processes than
    the driver.
    """
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    run.mkdir()
    (run / "hold").write_text(str(step))
    process, log = start("-m", "camshaft", *words), run / "metrics.jsonl"
    try:
        until = time.monotonic() + 100
        while not log.exists() or f'{{"step": {step},' not in log.read_text():
            assert process.poll() is None, finished(process)
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        (everybody or process.send_signal)(how)
        (run / "hold").unlink()  # for those signals that a run does not end of
        ended = finished(process)
    return ended
