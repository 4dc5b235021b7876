"""Ranks killed while saving: the last complete checkpoint resumes with bit-identical steps."""

import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.ranks import _Runner, run_ranks

from camshaft import storage
from camshaft.contracts.engine.harness import EngineHarness
from camshaft.controller import Options, PoolSpec, spawn
from camshaft.controller.local import process_pool
from camshaft.engine.fsdp import FSDPEngine
from camshaft.errors import CheckpointError, WorkerError

STEPS = 12


def _train(folder: str, in_background: bool) -> dict[int, list[float]]:
    """Train from the newest complete checkpoint to STEPS, saving after each step; return (loss, norm) by step."""
    common_fields = {"options": {"async_save": in_background}, "override_config": {"attention_dropout": 0.1}}
    harness = EngineHarness(FSDPEngine, folder, common_fields=common_fields)
    engine = harness.build()
    start = _newest(Path(folder) / "run")
    if start:
        engine.load_checkpoint(f"{folder}/run/global_step_{start}/actor")
    batch, history = harness.share(engine, harness.batch), {}
    for step in range(start + 1, STEPS + 1):
        with engine.train_mode():
            result = engine.train_batch(batch)
        history[step] = [result.loss, result.grad_norm]
        path = f"{folder}/run/global_step_{step}/actor"
        engine.save_checkpoint(path, global_step=step, max_ckpt_to_keep=2)
    engine.wait_for_checkpoint()
    return history


def _newest(run: Path) -> int:
    for step, path in reversed(storage.step_folders(run)):
        try:
            storage.verify(path / "actor")
        except CheckpointError:
            continue
        return step
    return 0


def _killed(folder: Path, in_background: bool, pause: float) -> None:
    """Start training and kill all ranks `pause` seconds after the third save has started."""
    pool = process_pool(PoolSpec("killed", ranks_per_node=2), Options(timeout=60.0))
    runner: Any = spawn(_Runner, pool=pool, name="killed", timeout=60.0)  # takes and returns one entry per rank

    def kill() -> None:
        deadline = time.monotonic() + 60
        while not list(folder.glob("run/global_step_*3/actor*")) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(pause)
        for process in pool.processes:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)

    threading.Thread(target=kill).start()
    try:
        with pytest.raises(WorkerError, match="died"):
            runner.run([_train] * 2, [(str(folder), in_background)] * 2)
    finally:
        pool.shutdown()


@pytest.mark.parametrize(
    "in_background",
    [
        pytest.param(False, id="waiting", marks=pytest.mark.slow),
        pytest.param(True, id="in the background", marks=pytest.mark.slow),
    ],
)
def test_killed_while_saving(in_background: bool, tmp_path: Path) -> None:
    uninterrupted = run_ranks(_train, 2, str(tmp_path / "whole"), in_background)[0]
    assert list(uninterrupted) == list(range(1, STEPS + 1))
    draw = random.Random(5)
    for trial in range(4):
        folder = tmp_path / f"trial{trial}"
        _killed(folder, in_background, pause=draw.uniform(0, 0.15))
        last = _newest(folder / "run")
        assert last >= 1, "there was no whole checkpoint although two had been written"
        again = run_ranks(_train, 2, str(folder), in_background)[0]
        assert again == {step: numbers for step, numbers in uninterrupted.items() if step > last}
        unfinished = [path for path in folder.rglob("*") if storage.is_unfinished(path)]
        assert not unfinished, json.dumps([str(path) for path in unfinished])
