"""Temporary files of killed processes are removed, and those of running processes are kept."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.processes import marked, none_left_behind, still_running

from camshaft.temporary import PREFIX, remove_leftovers, temporary_folder

RANKS = """
import os, time
from camshaft.controller import PoolSpec
from camshaft.controller.local import process_pool
from camshaft.stacks import dump_stacks_on_signal, stack_file
if __name__ == "__main__":
    dump_stacks_on_signal(stack_file(os.getpid()))
    pool = process_pool(PoolSpec(device="cpu", ranks_per_node=2))
    print("started", flush=True)
    time.sleep(600)
"""
FOLDER = """
import time
from camshaft.temporary import process_folder
(process_folder() / "file").write_text("")
print("started", flush=True)
time.sleep({seconds})
"""


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use an empty folder for temporary files. Its path is short, because it contains the names of sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


@contextmanager
def started(program: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    file = folder / "program.py"
    file.write_text(program)
    with subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        yield process
        process.kill()


def names(folder: Path) -> list[str]:
    """Return the names in the folder, without the program and the cache of torch."""
    return sorted({path.name for path in folder.iterdir()} - {"program.py", "torchinductor_root", "torchinductor"})


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_after_the_next_start(temporary: Path) -> None:
    """The driver, its ranks and its fork server are killed at the same time, so none of them can clean up."""
    with none_left_behind() as mark, started(RANKS, temporary):
        assert any(path.name.startswith("pymp-") for path in temporary.rglob("*"))
        for pid in (pids := marked(mark)):
            os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert not still_running(pids, seconds=10)
        assert len(names(temporary)) == 2  # the folder of the driver, and its file of stacks
    remove_leftovers()
    assert names(temporary) == []


def test_files_of_running_processes_are_kept(temporary: Path) -> None:
    with started(FOLDER.format(seconds=600), temporary) as process:
        before = sorted(temporary.rglob("*"))
        remove_leftovers()
        assert sorted(temporary.rglob("*")) == before
        process.kill()
        process.wait()
        remove_leftovers()
        assert names(temporary) == []


def test_an_exit_removes_the_folder(temporary: Path) -> None:
    with started(FOLDER.format(seconds=0), temporary) as process:
        assert process.wait(30) == 0
    assert names(temporary) == []


def test_other_files_are_kept(temporary: Path) -> None:
    (temporary / "camshaft-runs-of-mine").mkdir()
    (temporary / "pymp-of-another-program").mkdir()
    (temporary / "elsewhere" / "folder").mkdir(parents=True)
    (temporary / "elsewhere" / ".lock").write_text("")
    (temporary / f"{PREFIX}link").symlink_to(temporary / "elsewhere")
    before = names(temporary)
    remove_leftovers()
    assert names(temporary) == before
    assert (temporary / "elsewhere" / "folder").is_dir()


def test_a_temporary_folder_ends_with_its_block(temporary: Path) -> None:
    with temporary_folder() as folder:
        (folder / "file").write_text("")
        remove_leftovers()
        assert (folder / "file").exists()
    assert names(temporary) == []
