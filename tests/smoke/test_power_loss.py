"""A checkpoint that a run has reported as saved survives a power failure.

A run writes to a file system in an image file. A copy of the image at any moment is the disk after a power failure. The
kernel writes file contents back only after many seconds unless they are flushed.
"""

import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.command_line import start
from support.ppo_runs import ppo_args

from camshaft.checkpoint import CheckpointManager
from camshaft.checkpoint.manager import LATEST

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]
NUM_IMAGES = 50


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
def test_any_power_failure_leaves_the_last_saved_step(tmp_path: Path) -> None:
    image, copy = tmp_path / "disk.img", tmp_path / "copy.img"
    subprocess.run(["truncate", "-s", "64M", str(image)], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    with mounted(image, tmp_path / "disk") as disk:
        settings = {
            "trainer.default_local_dir": disk / "run",
            "trainer.total_training_steps": 1000,
            "trainer.total_epochs": 1000,
            "trainer.save_freq": 1,
            "trainer.max_actor_ckpt_to_keep": 1,
            "trainer.max_critic_ckpt_to_keep": 1,
            "trainer.resume_mode": "auto",
        }
        run = start("-m", "camshaft", "ppo", *ppo_args(tmp_path, settings))
        try:
            marker, moments = disk / "run" / LATEST, random.Random(0)
            wait_for(marker, run)
            recovered = []
            for _ in range(NUM_IMAGES):
                time.sleep(moments.uniform(0.0, 0.4))
                saved_step = int(marker.read_text())
                shutil.copy(image, copy)
                recovered.append((saved_step, recover(copy, tmp_path / "after")))
        finally:
            run.kill()
            run.communicate()
    assert all(newest >= saved for saved, newest in recovered), recovered
    assert recovered[-1][0] > recovered[0][0] + 5, "the run saved checkpoints between the copies"


def wait_for(marker: Path, run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 100
    while not marker.exists():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def recover(image: Path, folder: Path) -> int:
    """Mount the image, which replays its journal, and return the step from which a run would resume."""
    with mounted(image, folder) as disk:
        saved = CheckpointManager(disk / "run").latest()
    assert saved is not None
    return saved.step
