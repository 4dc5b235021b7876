import os
import time
from pathlib import Path

import pytest
from support.command_line import camshaft

from camshaft import storage
from camshaft.checkpoint import CheckpointManager
from camshaft.checkpoint.manager import format_size


def role(local: str, _: str | None) -> None:
    with storage.new_folder(local) as work:
        (work / "weights.bin").write_bytes(bytes(3_000_000))


def saved(root: Path, *steps: int, best: int | None = None) -> None:
    for step in steps:
        CheckpointManager(root).save(step, {"actor": role}, {}, {}, best=best)


def test_each_step_has_one_line(tmp_path: Path) -> None:
    saved(tmp_path, 5, 10, 20, best=5)
    os.truncate(tmp_path / "global_step_20" / "actor" / "weights.bin", 1_000_000)
    two_hours_ago = time.time() - 7300
    os.utime(tmp_path / "global_step_5" / "trainer" / "manifest.json", (two_hours_ago, two_hours_ago))
    run = camshaft("checkpoints", str(tmp_path))
    assert run.status == 0
    head, *lines = [line.split(maxsplit=6) for line in run.out.splitlines()]
    assert head == ["step", "state", "size", "age"]
    assert [line[:4] for line in lines] == [
        ["5", "complete", "3.0", "MB"],
        ["10", "complete", "3.0", "MB"],
        ["20", "broken", "1.0", "MB"],
    ]
    assert lines[0][4:] == ["2", "h", "best"]
    assert lines[1][-1] == "newest"
    assert lines[2][-1] == "'actor' is missing or incomplete"


def test_a_run_without_an_intact_step_sets_the_exit_status(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    storage.remove(tmp_path / "global_step_5" / "trainer")
    assert camshaft("checkpoints", str(tmp_path)).status == 1


@pytest.mark.parametrize(("folder", "says"), [("nowhere", "does not exist"), (".", "contains no checkpoints")])
def test_a_folder_that_is_no_run_is_an_error(folder: str, says: str, tmp_path: Path) -> None:
    run = camshaft("checkpoints", str(tmp_path / folder))
    assert run.status == 2
    assert says in run.err
    assert "trainer.default_local_dir" in run.err


def test_sizes_are_formatted_with_units() -> None:
    assert [format_size(count) for count in (0, 999, 1000, 1_234_567, 28e9, 5e15)] == [
        "0 B", "999 B", "1.0 kB", "1.2 MB", "28.0 GB", "5000.0 TB",
    ]  # fmt: skip
