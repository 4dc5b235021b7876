"""Runs leave the files of users alone, also beside and inside their folders."""

import os
import random
import tempfile
import time
from pathlib import Path

import pytest
from support.command_line import Forked, Run, finished, sft_args
from support.foreign_files import World
from support.recorded_disk import Disk

from camshaft.temporary import MARKER, private_folder

SLOW = pytest.mark.slow


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty folder for temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def sft(folder: Path, out: Path, steps: int) -> Forked:
    settings = {"trainer.default_local_dir": out, "trainer.total_training_steps": steps, "trainer.save_freq": 1}
    return Forked("sft", *sft_args(folder, settings))


def trained(folder: Path, out: Path, steps: int) -> Run:
    return finished(sft(folder, out, steps), 600)


def test_a_run_keeps_finished_runs_notes_and_its_log(tmp_path: Path, temporary: Path) -> None:
    """The run trains longer, as its last message says, in a folder whose name begins like that of camshaft."""
    mine, notes, log = temporary / "camshaft-mine", temporary / "camshaft-notes.txt", temporary / "camshaft-log.txt"
    first = trained(tmp_path, mine, steps=1)
    assert first.status == 0, first.err
    assert f"train longer   the same command with out={mine} steps=2" in first.out
    notes.write_text("foreign")
    log.write_text(first.out)
    (private_folder() / "0a1b2c3d.lock").write_bytes(MARKER)  # left by a killed process
    other = trained(tmp_path, temporary / "other", steps=1)
    assert other.status == 0, other.err
    assert f"removed {temporary}/.camshaft-tmp-{os.geteuid()}/0a1b2c3d, which a killed process left" in other.out
    assert (mine / "global_step_1" / "model" / "manifest.json").exists()
    longer = trained(tmp_path, mine, steps=2)
    assert longer.status == 0, longer.err
    assert (mine / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert (notes.read_text(), log.read_text()) == ("foreign", first.out)


def test_the_config_of_a_project_is_not_replaced(tmp_path: Path, temporary: Path) -> None:
    out = tmp_path / "project"
    out.mkdir()
    (out / "config.yaml").write_text("trainer: {}\n")
    run = trained(tmp_path, out, steps=1)
    assert run.status == 2
    assert f"{out}: the folder contains a config.yaml that is not that of a run; use another folder" in run.err
    assert (out / "config.yaml").read_text() == "trainer: {}\n"


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=SLOW) for seed in range(2, 20))])
def test_random_commands_change_no_foreign_file(seed: int, tmp_path: Path, temporary: Path) -> None:
    """Runs between which users add files are killed at random moments and started again."""
    draw, world = random.Random(seed), World(tmp_path, Disk(str(tmp_path)))
    for number in range(draw.randint(1, 3)):
        world.fill(draw)
        run = sft(tmp_path, tmp_path / "run", steps=number + 2)
        if draw.random() < 0.5:
            deadline = time.monotonic() + draw.uniform(0.5, 4.0)
            while time.monotonic() < deadline and run.poll() is None:
                time.sleep(0.01)
            run.kill()
        assert "Traceback" not in finished(run, 600).err
        world.check()
