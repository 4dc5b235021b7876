"""Temporary files of killed processes are removed; those of running processes and all other files are kept."""

import logging
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.processes import marked, none_left_behind, still_running

from camshaft import temporary
from camshaft.errors import StorageError
from camshaft.temporary import (
    MARKER,
    private_folder,
    process_folder,
    remove_leftovers,
    temporary_file,
    temporary_folder,
)

RANKS = """
import os, time
from camshaft.controller import PoolSpec
from camshaft.controller.local import process_pool
from camshaft.temporary import temporary_file
if __name__ == "__main__":
    temporary_file()
    pool = process_pool(PoolSpec(device="cpu", ranks_per_node=2))
    print("started", flush=True)
    time.sleep(600)
"""
FOLDER = """
import time
from camshaft.temporary import process_folder
(process_folder() / "adapter_config.json").write_text("")
print("started", flush=True)
time.sleep({seconds})
"""
POOL = """
from camshaft.controller import PoolSpec
from camshaft.controller.local import process_pool
from camshaft.temporary import process_folder
if __name__ == "__main__":
    pool = process_pool(PoolSpec(device="cpu", ranks_per_node=1))
    pool.shutdown()
    print(process_folder())
"""
NOBODY = 65534


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use an empty folder for temporary files, and one for shared memory."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name, tempfile.TemporaryDirectory(dir="/tmp") as memory:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setattr(temporary, "SHARED_MEMORY", Path(memory))
        temporary._process_folder.cache_clear()
        yield Path(name)
        temporary._process_folder.cache_clear()


@contextmanager
def started(program: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    file = folder / "program.py"
    file.write_text(program)
    with subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        yield process
        process.kill()


def entries() -> list[str]:
    return sorted(path.name for path in private_folder().iterdir())


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_after_the_next_start(folder: Path) -> None:
    """The driver, its ranks and its fork server are killed at the same time, so none of them can clean up."""
    with none_left_behind() as mark, started(RANKS, folder):
        assert any(path.name.startswith("pymp-") for path in private_folder().rglob("*"))
        for pid in (pids := marked(mark)):
            os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert not still_running(pids, seconds=60)
        assert len(entries()) == 3  # the folder of the driver with its lock, and another file
    remove_leftovers()
    assert entries() == []


def test_files_of_running_processes_are_kept(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with started(FOLDER.format(seconds=600), folder) as process:
        before = sorted(folder.rglob("*"))
        remove_leftovers()
        assert sorted(folder.rglob("*")) == before
        process.kill()
        process.wait()
        assert not caplog.messages
        remove_leftovers()
        assert entries() == []
        (message,) = caplog.messages
        assert message.startswith(f"removed {private_folder()}/")


def test_an_exit_removes_the_folder(folder: Path) -> None:
    with started(FOLDER.format(seconds=0), folder) as process:
        assert process.wait(60) == 0
    assert entries() == []


def write(path: Path, content: bytes = b"") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_finished_runs_and_notes_are_kept(folder: Path) -> None:
    for name in ("camshaft-mine/.lock", "camshaft-mine/run.json", "camshaft-mine/global_step_1/actor/a.bin"):
        write(folder / name)
    for name in ("camshaft-notes.txt", "camshaft-stacks-1.txt", ".new-camshaft-x/.lock", "camshaft-runs/empty"):
        write(folder / name)
    (folder / "camshaft-link").symlink_to(folder / "camshaft-mine")
    before = sorted(folder.rglob("*"))
    remove_leftovers()
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("name", ["run.json", "global_step_1/actor/a.bin", "notes.txt", "pool-x/notes.txt", ".lock"])
def test_a_folder_with_an_unknown_file_is_kept(name: str) -> None:
    private = private_folder()
    write(private / "0a1b2c3d.lock", MARKER)
    write(private / "0a1b2c3d" / "pool-x" / "rank_0.txt")
    remove_leftovers()
    assert entries() == []
    write(private / "0a1b2c3d.lock", MARKER)
    write(private / "0a1b2c3d" / "pool-x" / "rank_0.txt")
    write(private / "0a1b2c3d" / name)
    before = sorted(private.rglob("*"))
    remove_leftovers()
    assert sorted(private.rglob("*")) == before


def test_entries_without_the_marker_are_kept() -> None:
    private = private_folder()
    write(private / "00000001.lock", b"notes")
    write(private / "00000002.lock")  # empty, but beside a folder
    write(private / "00000002" / "pool-x" / "rank_0.txt")
    write(private / "00000003" / "pool-x" / "rank_0.txt")
    write(private / "notes.lock", MARKER)
    (private / "00000004.lock").symlink_to(private / "notes.lock")
    before = sorted(private.rglob("*"))
    remove_leftovers()
    assert sorted(private.rglob("*")) == before


@pytest.mark.parametrize("content", [b"", MARKER], ids=["before the marker", "before the folder"])
def test_entries_that_were_never_completed_are_removed(content: bytes) -> None:
    write(private_folder() / "0a1b2c3d.lock", content)
    remove_leftovers()
    assert entries() == []


def test_a_temporary_folder_ends_with_its_block() -> None:
    with temporary_folder() as folder:
        (folder / "adapter_config.json").write_text("")
        remove_leftovers()
        assert (folder / "adapter_config.json").exists()
        assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(private_folder().stat().st_mode) == 0o700
    assert entries() == []


def test_a_foreign_file_survives_the_end_of_the_block(caplog: pytest.LogCaptureFixture) -> None:
    with temporary_folder() as folder:
        (folder / "notes.txt").write_text("foreign")
    assert (folder / "notes.txt").read_text() == "foreign"
    assert f"{folder} is kept, because camshaft has not written notes.txt in it" in caplog.messages


INTRUSIONS = {
    "is a link": lambda path: path.symlink_to("/tmp"),
    "is not a folder": lambda path: path.write_text("foreign"),
    "is accessible to other users (mode 0755)": lambda path: (path.mkdir(), path.chmod(0o755)),
}


@pytest.mark.parametrize("problem", INTRUSIONS)
def test_a_folder_of_others_is_a_sentence(problem: str, folder: Path) -> None:
    path = folder / f".camshaft-tmp-{os.geteuid()}"
    INTRUSIONS[problem](path)
    with pytest.raises(StorageError) as error:
        temporary_file()
    assert f"{path} {problem}; delete it, or have its owner delete it, or set TMPDIR" in str(error.value)
    remove_leftovers()
    assert os.path.lexists(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can create files of another user")
def test_a_folder_of_another_user_is_a_sentence(folder: Path) -> None:
    path = private_folder()
    write(path / "0a1b2c3d.lock", MARKER)
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(StorageError, match=rf"belongs to another user \(uid {NOBODY}\)"):
        temporary_file()
    remove_leftovers()
    assert (path / "0a1b2c3d.lock").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")
def test_users_share_a_folder_for_temporary_files(folder: Path) -> None:
    folder.chmod(0o1777)
    own = temporary_file()
    pid = os.fork()
    if pid == 0:  # a process of another user, who can read the modules that are already imported
        status = 1
        try:
            os.setresuid(NOBODY, NOBODY, NOBODY)
            other = temporary_file()
            remove_leftovers()
            status = 0 if other.parent != own.parent and other.exists() else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert own.exists()
    assert sorted(path.name for path in folder.iterdir()) == [".camshaft-tmp-0", f".camshaft-tmp-{NOBODY}"]


def test_a_long_folder_is_not_used_for_sockets(folder: Path) -> None:
    """`multiprocessing` starts in a folder whose path leaves no room for the name of a socket."""
    long = folder / ("x" * 120)
    long.mkdir()
    program = folder / "program.py"
    program.write_text(POOL)
    run = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "TMPDIR": str(long)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("/dev/shm/.camshaft-tmp-")
    assert list(long.rglob("*.lock")) == []


def test_a_short_folder_is_used_for_sockets(folder: Path) -> None:
    assert process_folder().parent.parent == folder


def test_a_missing_tmpdir_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere")
    remove_leftovers()
    (message,) = caplog.messages
    assert message.startswith("TMPDIR=/nowhere cannot be written; temporary files are written to /tmp")


def test_no_folder_for_temporary_files_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    with pytest.raises(StorageError, match=r"no folder for temporary files is writable.*set TMPDIR to a folder"):
        remove_leftovers()


def test_a_read_only_folder_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    with pytest.raises(StorageError, match=r"/proc/.camshaft-tmp-\d+ cannot be created .*; make /proc writable, or"):
        temporary_file()
