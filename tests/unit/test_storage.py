import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from camshaft import storage
from camshaft.errors import CheckpointError


def write(folder: Path, text: str = "hello", **facts: object) -> None:
    with storage.new_folder(folder, **facts) as work:
        (work / "sub").mkdir()
        (work / "a.txt").write_text(text)
        (work / "sub" / "b.txt").write_text("b")


def test_a_folder_appears_when_the_block_ends(tmp_path: Path) -> None:
    with storage.new_folder(tmp_path / "x", step=3) as work:
        (work / "a").write_text("1")
        assert not (tmp_path / "x").exists()
    assert storage.verify(tmp_path / "x") == {"step": 3}
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_an_error_in_the_block_keeps_the_old_folder(tmp_path: Path) -> None:
    write(tmp_path / "x", "old")

    def fail() -> None:
        with storage.new_folder(tmp_path / "x") as work:
            (work / "a.txt").write_text("new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    storage.verify(tmp_path / "x")
    assert (tmp_path / "x" / "a.txt").read_text() == "old"
    write(tmp_path / "x", "newer")
    assert (tmp_path / "x" / "a.txt").read_text() == "newer"


@pytest.mark.parametrize("name", ["a.txt", "sub/b.txt"])
def test_a_missing_or_changed_file_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path / "x")
    (tmp_path / "x" / name).write_text("other")
    with pytest.raises(CheckpointError, match=name):
        storage.verify(tmp_path / "x")
    (tmp_path / "x" / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}' is missing"):
        storage.verify(tmp_path / "x")


def test_a_folder_without_manifest_is_not_complete(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    assert not storage.is_complete(tmp_path / "x")
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        storage.verify(tmp_path / "x")


def test_a_folder_is_complete_while_every_file_has_its_length(tmp_path: Path) -> None:
    write(tmp_path / "x")
    assert storage.is_complete(tmp_path / "x")
    (tmp_path / "x" / "more.txt").write_text("not of ours")
    assert storage.is_complete(tmp_path / "x")
    (tmp_path / "x" / "a.txt").write_text("hell")
    assert not storage.is_complete(tmp_path / "x")
    (tmp_path / "x" / "a.txt").unlink()
    assert not storage.is_complete(tmp_path / "x")


def test_a_truncated_manifest_is_reported_as_damage(tmp_path: Path) -> None:
    write(tmp_path / "x")
    manifest = tmp_path / "x" / storage.MANIFEST
    manifest.write_text(manifest.read_text()[:10])
    assert not storage.is_complete(tmp_path / "x")
    with pytest.raises(CheckpointError, match="damaged"):
        storage.verify(tmp_path / "x")


def test_only_a_folder_of_the_same_kind_may_be_replaced(tmp_path: Path) -> None:
    write(tmp_path / "ours", kind="huggingface")
    write(tmp_path / "engine", kind="engine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("ours", "empty", "nothing"):
        storage.check_replaceable(tmp_path / name, "huggingface")
    for path in (tmp_path / "engine", tmp_path / "file", tmp_path):
        with pytest.raises(CheckpointError, match="already exists"):
            storage.check_replaceable(path, "huggingface")


def test_prune_keeps_the_newest_and_touches_no_other_role(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        write(tmp_path / f"global_step_{step}" / "actor")
    write(tmp_path / "global_step_1" / "critic")
    removed = storage.prune(tmp_path / "global_step_10" / "actor", 2)
    assert removed == [tmp_path / "global_step_1" / "actor"]
    assert (tmp_path / "global_step_1" / "critic").exists()
    assert [step for step, _ in storage.step_folders(tmp_path)] == [1, 2, 10]


def test_prune_removes_a_step_that_became_empty(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path / f"global_step_{step}" / "actor")
    storage.prune(tmp_path / "global_step_2" / "actor", 1)
    assert [step for step, _ in storage.step_folders(tmp_path)] == [2]


def test_prune_keeps_the_newest_of_a_series_under_any_name(tmp_path: Path) -> None:
    steps = {"z": 1, "a": 2, "same_age": 2, "newest": 3}
    for name, step in steps.items():
        write(tmp_path / name, series="one", global_step=step)
    write(tmp_path / "other", series="two", global_step=0)
    write(tmp_path / "unknown")
    (tmp_path / "notes").mkdir()
    assert storage.prune(tmp_path / "newest", 3) == [tmp_path / "z"]
    assert storage.prune(tmp_path / "newest", 2) == [tmp_path / "a"]
    assert storage.prune(tmp_path / "same_age", 1) == [tmp_path / "newest"]  # never the given folder
    assert storage.prune(tmp_path / "unknown", 1) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "other", "same_age", "unknown"]


def test_copies_are_verified_and_complete(tmp_path: Path) -> None:
    write(tmp_path / "x", step=7)
    storage.copy_folder(str(tmp_path / "x"), f"file://{tmp_path / 'y'}")
    assert storage.verify(tmp_path / "y") == {"step": 7}
    (tmp_path / "x" / "a.txt").write_text("damaged")
    with pytest.raises(CheckpointError, match=r"a\.txt"):
        storage.copy_folder(str(tmp_path / "x"), str(tmp_path / "z"))


# -- a folder that replaces another, or has many writers ------------------------------------------


def reads(name: str) -> Callable[[Path], Any]:
    return {"verify": storage.verify, "is_complete": storage.is_complete, "read_manifest": storage.read_manifest}[name]


class Killed(BaseException):
    """An exception that, like a kill, no error handler catches."""


@pytest.mark.parametrize("reader", ["verify", "is_complete", "read_manifest"])
def test_a_kill_while_replacing_leaves_old_or_new(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [(os, "replace"), (os, "unlink"), (os, "rmdir")]
    states = []
    for survived in range(16):
        folder = tmp_path / str(survived)
        write(folder, "old")
        with monkeypatch.context() as patch:
            countdown = [survived]

            def killing(original: Callable[..., None], countdown: list[int] = countdown) -> Callable[..., None]:
                def step(*args: Any, **kwargs: Any) -> None:
                    if not countdown[0]:
                        raise Killed
                    countdown[0] -= 1
                    original(*args, **kwargs)

                return step

            for module, name in steps:
                patch.setattr(module, name, killing(getattr(module, name)))
            try:
                write(folder, "new")
            except Killed:
                killed = True
            else:
                killed = False
        assert reads(reader)(folder) is not False
        storage.verify(folder)
        states.append((killed, (folder / "a.txt").read_text()))
        write(folder, "newest")
        assert (folder / "a.txt").read_text() == "newest"
        assert not list(tmp_path.glob(f"{survived}.*"))
    # The new manifest, the old and the new folder are renamed; then the old folder is deleted.
    assert [text for _, text in states] == ["old"] * 3 + ["new"] * 13
    assert not states[-1][0]


def test_folders_moved_aside_count_as_existing(tmp_path: Path) -> None:
    write(tmp_path / "x", kind="huggingface")
    os.replace(tmp_path / "x", tmp_path / "x.replaced")
    with pytest.raises(CheckpointError, match="already exists"):
        storage.check_replaceable(tmp_path / "x", "engine")
    assert storage.verify(tmp_path / "x") == {"kind": "huggingface"}
    assert storage.is_unfinished(tmp_path / "x.replaced")
    assert not storage.is_unfinished(tmp_path / "x")


def test_a_folder_that_many_write_appears_when_the_last_finishes(tmp_path: Path) -> None:
    work = storage.begin(tmp_path / "x")
    files = {}
    for rank in range(3):
        (work / f"rank_{rank}").write_text(str(rank))
        files |= storage.fingerprints(work, [work / f"rank_{rank}"])
        assert not storage.is_complete(tmp_path / "x")
    storage.finish(tmp_path / "x", files, {"step": 5})
    assert storage.verify(tmp_path / "x") == {"step": 5}
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert list(storage.read_manifest(tmp_path / "x")["files"]) == ["rank_0", "rank_1", "rank_2"]


def test_a_subset_of_the_checks_finds_its_faults(tmp_path: Path) -> None:
    write(tmp_path / "x", step=1)
    (tmp_path / "x" / "sub" / "b.txt").write_text("damaged")
    assert storage.verify(tmp_path / "x", share=(0, 2)) == {"step": 1}
    with pytest.raises(CheckpointError, match=r"b\.txt"):
        storage.verify(tmp_path / "x", share=(1, 2))


def test_a_file_is_replaced_when_the_block_succeeds(tmp_path: Path) -> None:
    target = tmp_path / "out.txt"
    target.write_text("old")
    with storage.new_file(target) as path:
        path.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    with pytest.raises(FileNotFoundError), storage.new_file(target) as path:
        path.with_name("no such folder").joinpath("file").write_text("half")
    assert target.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt"]


def test_a_folder_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    lock = storage.lock_folder(tmp_path)
    assert lock is not None
    assert storage.lock_folder(tmp_path) is None
    lock.close()
    again = storage.lock_folder(tmp_path)
    assert again is not None
    again.close()


def test_a_file_system_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    file = storage.lock_folder(tmp_path)
    assert file is not None
    file.close()
    assert f"{tmp_path} cannot be locked (Function not implemented)" in caplog.text


def test_files_folders_and_renames_are_flushed_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder has reached the disk before it appears, and its appearance before an older folder is deleted."""
    events: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def record_sync(descriptor: int) -> None:
        events.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record_replace(source: Any, target: Any) -> None:
        replace(source, target)
        events.append(("rename", str(target)))

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_replace)
    target = tmp_path / "run" / "step"
    with storage.new_folder(target, kind="test") as work:
        (work / "part").mkdir()
        (work / "part" / "data").write_text("x")
    renamed = events.index(("rename", str(target)))
    flushed = {path for event, path in events[:renamed] if event == "sync"}
    written = {str(path).replace(str(target), str(work)) for path in (target, *target.rglob("*"))}
    assert written <= flushed
    assert str(tmp_path) in flushed, "the entry of the new folder 'run'"
    assert ("sync", str(target.parent)) in events[renamed:]
