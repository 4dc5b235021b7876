"""Runs that stop or block at a given step, so that a test can end them there.

    trainer.logger=[jsonl,support.interrupting:InterruptingTracker]
    actor_rollout_ref.worker_cls=support.interrupting:HoldingPolicy
    custom_reward_function.path=.../support/interrupting.py

Files in the run's folder, each of which contains a step number, say where. Without them nothing happens, so the same
command also resumes the run.

- `stop`: after the step is logged, the run exits with SystemExit, because it ignores other errors of a tracker.
- `hold`: the run blocks after the step is logged and before it is saved. `run_until` starts a run with it.
- `hold_<state>`: the run blocks in a state of the step, one of `STATES`, and writes the file `held`. This requires the
  tracker, the policy, and the reward function with the run's folder in the environment variable `FOLDER`.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from camshaft.checkpoint.manager import LATEST
from camshaft.config import PPOConfig, Topology
from camshaft.dataproto import DataProto
from camshaft.reshard import Snapshot
from camshaft.roles import ActorRolloutRefWorker, RolloutWorker
from camshaft.tracking import RunInfo, Tracker
from support.command_line import Forked, Run, finished, start
from support.even_digits import compute_score as count_even_digits

NAME = f"{__name__}:InterruptingTracker"
FOLDER = "CAMSHAFT_TEST_FOLDER"
"""Environment variable with the folder of the run, for its reward function."""
SAVES: dict[str, tuple[str, str]] = {
    "storing": ("open", "/global_step_{step}/trainer.unfinished/state.json"),
    "completing": ("os.rename", "/global_step_{step}/trainer.unfinished"),
    "marking": ("os.rename", f"/{LATEST}.unfinished/{LATEST}"),
    "pruning": ("os.remove", "/global_step_{earlier}/actor"),
}
"""Audit event and part of its path for each phase of a save in the driver, after the roles have saved their weights."""
SECONDS = 240.0
"""Time limit for a run to reach a state, and to end, on a machine that is busy with other tests."""
STATES = ("publishing", "receiving", "generating", "scoring", "learning", "saving", *SAVES)


def _step(file: Path) -> int | None:
    return int(file.read_text()) if file.exists() else None


def _hold(folder: Path, state: str, step: int | None = None) -> None:
    """Block while the file of the state exists and contains the step, if one is given."""
    file, parent = folder / f"hold_{state}", os.getppid()
    try:
        while os.getppid() == parent and file.exists() and step in (None, _step(file)):
            (folder / "held").touch()
            time.sleep(0.01)
    except FileNotFoundError:  # released
        return


class InterruptingTracker(Tracker):
    synchronous = True

    def __init__(self, run: RunInfo):
        self.folder = run.folder
        steps = {state: _step(self.folder / f"hold_{state}") for state in SAVES}
        self.steps = {state: step for state, step in steps.items() if step is not None}
        if self.steps:
            sys.addaudithook(self.audit)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Block in a phase of a save, which is recognized by what the driver does to a file."""
        for state, step in self.steps.items() if event in ("open", "os.rename", "os.remove") else ():
            name, part = SAVES[state]
            is_there = event == name and part.format(step=step, earlier=step - 2) in str(arguments[0])
            if is_there and self.has_saved(state, step):
                _hold(self.folder, state)

    def has_saved(self, state: str, step: int) -> bool:
        """Return True if the state is part of the save of the step, whose checkpoint may have to be complete."""
        complete = state in ("marking", "pruning")
        return (self.folder / f"global_step_{step}" / ("trainer" if complete else "actor")).exists()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step == _step(self.folder / "stop"):
            raise SystemExit("the test ends this run")
        while step == _step(self.folder / "hold"):
            time.sleep(0.01)

    def finish(self) -> None:
        pass


class HoldingRollout(RolloutWorker):
    def receive_weights(self, snapshot: Snapshot) -> dict[str, float]:
        _hold(Path(self.config.trainer.default_local_dir), "receiving", snapshot.version + 1)
        return super().receive_weights(snapshot)

    def generate_sequences(self, prompts: DataProto, validate: bool = False, greedy: bool = False) -> DataProto:
        _hold(Path(self.config.trainer.default_local_dir), "generating", self.rollout.version + 1)
        return super().generate_sequences(prompts, validate, greedy)


class HoldingPolicy(ActorRolloutRefWorker):
    rollout_class = HoldingRollout

    def __init__(self, config: PPOConfig, topology: Topology, total_steps: int):
        super().__init__(config, topology, total_steps)
        self.folder, self.version = Path(config.trainer.default_local_dir), 0

    def publish(self, version: int) -> Any:
        self.version = version
        _hold(self.folder, "publishing", version + 1)
        return super().publish(version)

    def update_actor(self, data: DataProto, *arguments: Any, **options: Any) -> DataProto:
        _hold(self.folder, "learning", self.version + 1)
        return super().update_actor(data, *arguments, **options)

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        super().save_checkpoint(*arguments, **options)
        _hold(self.folder, "saving", self.version + 1)


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    _hold(Path(os.environ[FOLDER]), "scoring")
    return count_even_digits(data_source, solution_str, ground_truth, extra_info)


HOLDING = f"{__name__}:HoldingPolicy"


def kill_in_update(step: int, run: Path, args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Start `camshaft *args`, and kill it in the update of a step. Its policy is `HOLDING`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    run.mkdir()
    (run / "hold_learning").write_text(str(step))
    process = start("-m", "camshaft", *args)
    try:
        deadline = time.monotonic() + SECONDS
        while not (run / "held").exists():
            assert process.poll() is None, finished(process)
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        (run / "hold_learning").unlink()
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
        deadline = time.monotonic() + SECONDS
        while not log.exists() or f'{{"step": {step},' not in log.read_text():
            assert process.poll() is None, finished(process)
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        (everybody or process.send_signal)(how)
        (run / "hold").unlink()  # for signals that the run survives
        result = finished(process, SECONDS)
    return result
