"""A tracker that stops a run at a given step, after the step is logged and before it is saved.

    trainer.logger=[jsonl,support.interrupting:InterruptingTracker]

The file `hold` in the run's folder makes the run block until it is killed. The file `stop` makes it exit with
SystemExit, because a run ignores other errors of a tracker. Each file contains a step number. Without these files the
tracker does nothing, so the same command also resumes the run. `run_until` starts a run with `hold`.

`HOLDING` is a policy that blocks in its update of a step until the run is killed, if the file `hold_update` contains
the step. It then writes the file `held`.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from camshaft.config import PPOConfig, Topology
from camshaft.controller import Dispatch, register
from camshaft.dataproto import DataProto
from camshaft.roles import ActorRolloutRefWorker
from camshaft.tracking import RunInfo, Tracker
from support.command_line import Forked, Run, finished, start

NAME = f"{__name__}:InterruptingTracker"


def _step(file: Path) -> int | None:
    return int(file.read_text()) if file.exists() else None


class InterruptingTracker(Tracker):
    synchronous = True

    def __init__(self, run: RunInfo):
        self.folder = run.folder

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step == _step(self.folder / "stop"):
            raise SystemExit("the test ends this run")
        while step == _step(self.folder / "hold"):
            time.sleep(0.01)

    def finish(self) -> None:
        pass


class HoldingPolicy(ActorRolloutRefWorker):
    def __init__(self, config: PPOConfig, topology: Topology, total_steps: int):
        super().__init__(config, topology, total_steps)
        self.folder, self.version = Path(config.trainer.default_local_dir), 0

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def publish(self, version: int) -> Any:
        self.version = version
        return super().publish(version)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto, *arguments: Any, **options: Any) -> DataProto:
        parent = os.getppid()
        while self.version + 1 == _step(self.folder / "hold_update") and os.getppid() == parent:
            (self.folder / "held").touch()
            time.sleep(0.01)
        return super().update_actor(data, *arguments, **options)


HOLDING = f"{__name__}:HoldingPolicy"


def kill_in_update(step: int, run: Path, args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Start `camshaft *args`, and kill it in the update of a step. Its policy is `HOLDING`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    run.mkdir()
    (run / "hold_update").write_text(str(step))
    process = start("-m", "camshaft", *args)
    try:
        deadline = time.monotonic() + 100
        while not (run / "held").exists():
            assert process.poll() is None, finished(process)
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        (run / "hold_update").unlink()
        finished(process)


def run_until(
    step: int,
    run: Path,
    args: list[str],
    monkeypatch: pytest.MonkeyPatch,
    how: signal.Signals = signal.SIGKILL,
    everybody: Callable[[signal.Signals], None] | None = None,
    fork: bool = False,
) -> Run:
    """Start `camshaft *args` in a separate process, and end it when the step is logged and not yet saved.

    `run` is the folder of the run, which has this module's tracker. `everybody` sends the signal to further processes
    besides the driver. `fork` saves the time of a new process, for runs without ranks.
    """
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    run.mkdir()
    (run / "hold").write_text(str(step))
    process, log = Forked(*args) if fork else start("-m", "camshaft", *args), run / "metrics.jsonl"
    try:
        deadline = time.monotonic() + 100
        while not log.exists() or f'{{"step": {step},' not in log.read_text():
            assert process.poll() is None, finished(process)
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        (everybody or process.send_signal)(how)
        (run / "hold").unlink()  # for signals that the run survives
        result = finished(process)
    return result
