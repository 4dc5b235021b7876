"""A run resumes from the checkpoint that it has reported as saved, after a power failure at any moment.

A run writes to a file system in an image file. A copy of the image at any moment is the disk after a power failure. The
kernel writes file contents back only after many seconds unless they are flushed. Each copy contains the metrics, the
responses and the other files of all steps up to its checkpoint, and a run resumed from it for one step has bitwise the
metrics of the undisturbed run. The process is stopped while the image is copied, because a copy takes a while.
"""

import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyarrow import parquet
from support.command_line import start
from support.ppo_runs import ppo_args, run_ppo

from camshaft.checkpoint import CheckpointManager
from camshaft.checkpoint.manager import LATEST
from camshaft.tracking import deterministic
from camshaft.tracking.jsonl import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]
NUM_IMAGES = 50
SAVING: dict[str, Any] = {
    "trainer.total_epochs": 1000,
    "trainer.save_freq": 1,
    "trainer.test_freq": 1,
    "trainer.max_actor_ckpt_to_keep": 1,
    "trainer.max_critic_ckpt_to_keep": 1,
    "trainer.resume_mode": "auto",
    "trainer.logger": "[jsonl]",
}


@contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    result = subprocess.run(["mount", "-o", "loop", str(image), str(folder)], capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"mounting an image is not permitted: {result.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(not shutil.which("mkfs.ext4"), reason="mkfs.ext4 is not installed")
def test_a_run_resumes_from_its_last_saved_step(tmp_path: Path) -> None:
    image, copy = tmp_path / "disk.img", tmp_path / "copy.img"
    subprocess.run(["truncate", "-s", "64M", str(image)], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    saved_steps, resumed = [], []
    with mounted(image, tmp_path / "disk") as disk:
        folder = disk / "run"
        settings = {**SAVING, "trainer.default_local_dir": folder, "trainer.total_training_steps": 10**6}
        run = start("-m", "camshaft", "ppo", *ppo_args(tmp_path, settings))
        try:
            marker, moments = folder / LATEST, random.Random(0)
            wait_for(marker, run)
            for _ in range(NUM_IMAGES):
                time.sleep(moments.uniform(0.0, 0.4))
                with stopped(run):
                    saved_steps.append(int(marker.read_text()))
                    shutil.copy(image, copy)
                resumed.append(resume(copy, tmp_path))
            last = int(resumed[-1]["step"])
            while max((line["step"] for line in read_metrics(folder / "metrics.jsonl")), default=0) < last:
                assert run.poll() is None, run.communicate()
                time.sleep(0.1)
        finally:
            run.kill()
            run.communicate()
        undisturbed = {int(line["step"]): deterministic(line) for line in read_metrics(folder / "metrics.jsonl")}
    assert [line["step"] > saved for line, saved in zip(resumed, saved_steps, strict=True)] == [True] * NUM_IMAGES
    for line in resumed:
        other = undisturbed[int(line["step"])]
        assert {name: value for name, value in line.items() if repr(value) != repr(other.get(name))} == {}
    assert saved_steps[-1] > saved_steps[0] + 5, "the run saved checkpoints between the copies"


@contextmanager
def stopped(run: subprocess.Popen[str]) -> Iterator[None]:
    """Stop all threads of a process within the block. A flush that has begun ends before."""
    run.send_signal(signal.SIGSTOP)
    try:
        deadline = time.monotonic() + 100
        while states := [thread_state(thread) for thread in Path(f"/proc/{run.pid}/task").iterdir()]:
            if set(states) <= {"T", None}:
                break
            assert time.monotonic() < deadline, states
            time.sleep(0.001)
        yield
    finally:
        run.send_signal(signal.SIGCONT)


def thread_state(thread: Path) -> str | None:
    try:
        return (thread / "stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return None  # the thread has ended


def wait_for(marker: Path, run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 100
    while not marker.exists():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def resume(image: Path, home: Path) -> dict[str, float]:
    """Mount the image, which replays its journal, resume the run for one step, and return the metrics of the step."""
    with mounted(image, home / "after") as disk:
        saved = CheckpointManager(disk / "run").latest()
        assert saved is not None
        check_files(disk / "run", saved.step)
        (step,) = run_ppo(home, {**SAVING, "trainer.default_local_dir": disk / "run"}, steps=saved.step + 1)
        return deterministic({"step": saved.step + 1, **step.metrics})


def check_files(run: Path, step: int) -> None:
    """Check that all files of the steps up to a checkpoint are there."""
    steps = range(1, step + 1)
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")][:step] == list(steps)
    for number in steps:
        assert parquet.read_table(run / "samples" / f"step_{number}.parquet").num_rows == 8
        rows = (run / "validation" / f"step_{number}.jsonl").read_text().splitlines()
        assert [json.loads(row).keys() >= {"prompt", "response"} for row in rows] == [True] * 16
    assert json.loads((run / "run.json").read_text())["status"] == "running"
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["save_freq"] == 1
    log = (run / "log.txt").read_text()
    assert [f"global_step_{number}: " in log for number in steps[:-1]] == [True] * (step - 1)
