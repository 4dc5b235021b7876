import contextlib
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from camshaft import storage, subprocesses
from camshaft.errors import CheckpointError, StorageError
from camshaft.plugins import install_command

INSTALL = re.escape(install_command("fsspec"))


def write(folder: Path, text: str = "hello", **facts: object) -> None:
    with storage.new_folder(folder, **facts) as work:
        (work / "sub").mkdir()
        (work / "a.txt").write_text(text)
        (work / "sub" / "b.txt").write_text("b")


@pytest.fixture
def remote() -> Iterator[str]:
    """Return the URL of an in-memory folder that no other test uses."""
    files = fsspec.filesystem("memory")
    yield "memory://bucket/run/actor"
    if files.exists("/bucket"):
        files.rm("/bucket", recursive=True)


def names_at(url: str) -> list[str]:
    files, root = fsspec.core.url_to_fs(url)
    return sorted(path.removeprefix(root + "/") for path in files.find(root))


def test_a_folder_round_trips_through_a_url(tmp_path: Path, remote: str) -> None:
    write(tmp_path / "x", step=7)
    assert not storage.exists(remote)
    storage.copy_folder(str(tmp_path / "x"), remote)
    assert storage.exists(remote)
    assert names_at(remote) == ["a.txt", "manifest.json", "sub/b.txt"]
    storage.copy_folder(remote, str(tmp_path / "back"))
    assert storage.verify(tmp_path / "back") == {"step": 7}
    assert (tmp_path / "back" / "sub" / "b.txt").read_text() == "b"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "x"]


def test_a_newer_copy_replaces_only_the_older_one(tmp_path: Path, remote: str) -> None:
    files = fsspec.filesystem("memory")
    write(tmp_path / "x", "old")
    storage.copy_folder(str(tmp_path / "x"), remote)
    files.pipe_file("/bucket/run/actor/notes.txt", b"mine")
    with storage.new_folder(tmp_path / "x") as work:
        (work / "c.txt").write_text("new")
    storage.copy_folder(str(tmp_path / "x"), remote + "/")
    assert names_at(remote) == ["c.txt", "manifest.json", "notes.txt"]
    storage.remove(remote)
    assert names_at(remote) == ["notes.txt"]
    assert not storage.exists(remote)


def test_removing_a_copy_leaves_no_empty_folders(tmp_path: Path, remote: str) -> None:
    write(tmp_path / "x")
    storage.copy_folder(str(tmp_path / "x"), remote)
    storage.remove(remote)
    assert not fsspec.filesystem("memory").exists("/bucket/run/actor")


@pytest.mark.parametrize("name", ["a.txt", "sub/b.txt", storage.MANIFEST])
def test_an_incomplete_copy_at_a_url_is_an_error(tmp_path: Path, remote: str, name: str) -> None:
    files = fsspec.filesystem("memory")
    write(tmp_path / "x")
    storage.copy_folder(str(tmp_path / "x"), remote)
    files.pipe_file(f"/bucket/run/actor/{name}", b"other")
    with pytest.raises(CheckpointError, match=f"damaged.*{name}"):
        storage.copy_folder(remote, str(tmp_path / "back"))
    files.rm_file(f"/bucket/run/actor/{name}")
    with pytest.raises(CheckpointError, match=rf"(incomplete|not a complete checkpoint).*{name}"):
        storage.copy_folder(remote, str(tmp_path / "back"))
    assert not (tmp_path / "back").exists()
    storage.copy_folder(str(tmp_path / "x"), remote)
    storage.copy_folder(remote, str(tmp_path / "back"))
    # Without the manifest, the files can be those of another program.
    assert files.exists("/bucket/run/actor/a.txt.1") == (name == storage.MANIFEST)


@pytest.mark.parametrize("name", ["a.txt", storage.MANIFEST])
def test_an_upload_keeps_the_files_of_others(tmp_path: Path, remote: str, name: str) -> None:
    files = fsspec.filesystem("memory")
    files.pipe_file(f"/bucket/run/actor/{name}", b"foreign")
    write(tmp_path / "x")
    storage.copy_folder(str(tmp_path / "x"), remote)
    storage.copy_folder(remote, str(tmp_path / "back"))
    storage.remove(remote)
    assert files.cat_file(f"/bucket/run/actor/{name}.1") == b"foreign"


@pytest.mark.parametrize("call", ["put_file", "rm_file", "pipe_file"])
def test_an_interrupted_upload_or_removal_is_continued(
    tmp_path: Path, remote: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = fsspec.filesystem("memory")
    write(tmp_path / "x")
    original = getattr(type(files), call)
    for survived in range(8):
        with monkeypatch.context() as patch:
            countdown = iter(range(survived))

            def failing(*args: Any, countdown: Iterator[int] = countdown, **kwargs: Any) -> Any:
                if next(countdown, None) is None:
                    raise ConnectionError
                return original(*args, **kwargs)

            patch.setattr(type(files), call, failing)
            with contextlib.suppress(ConnectionError):
                storage.copy_folder(str(tmp_path / "x"), remote)
                storage.copy_folder(str(tmp_path / "x"), remote)
        storage.copy_folder(str(tmp_path / "x"), remote)
        assert sorted(files.find("/bucket/run/actor")) == [
            f"/bucket/run/actor/{name}" for name in ("a.txt", storage.MANIFEST, "sub/b.txt")
        ]


def test_names_that_lead_out_of_the_folder_are_rejected(tmp_path: Path, remote: str) -> None:
    manifest = {"facts": {}, "files": {"../outside.txt": {"bytes": 1, "sha256": ""}}}
    checksum = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    contents = json.dumps({**manifest, "sha256": checksum}).encode()
    fsspec.filesystem("memory").pipe_file(f"/bucket/run/actor/{storage.MANIFEST}", contents)
    with pytest.raises(CheckpointError, match=r"\.\./outside\.txt.*outside the folder"):
        storage.copy_folder(remote, str(tmp_path / "back"))


class FailingFileSystem(MemoryFileSystem):
    """A file system that fails while it writes one file, or truncates its data."""

    protocol = "breaking"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    breaks_at = ""
    cuts = ""
    hangs_at = ""

    def put_file(self, lpath, rpath, *args, **kwargs):
        if self.hangs_at and rpath.endswith(self.hangs_at):
            time.sleep(60)
        if self.breaks_at and rpath.endswith(self.breaks_at):
            raise OSError("connection lost")
        super().put_file(lpath, rpath, *args, **kwargs)
        if self.cuts and rpath.endswith(self.cuts):
            self.pipe_file(rpath, self.cat_file(rpath)[:-1])

    def get_file(self, rpath, lpath, *args, **kwargs):
        if self.hangs_at and rpath.endswith(self.hangs_at):
            time.sleep(60)
        super().get_file(rpath, lpath, *args, **kwargs)


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> type[FailingFileSystem]:
    fsspec.register_implementation("breaking", FailingFileSystem, clobber=True)
    monkeypatch.setattr(FailingFileSystem, "store", {})
    monkeypatch.setattr(FailingFileSystem, "pseudo_dirs", [""])
    return FailingFileSystem


@pytest.mark.parametrize("name", ["a.txt", "sub/b.txt", storage.MANIFEST])
def test_an_interrupted_copy_is_not_a_checkpoint(
    tmp_path: Path, name: str, breaking: type[FailingFileSystem], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "breaking://host/actor"
    write(tmp_path / "x", "old")
    storage.copy_folder(str(tmp_path / "x"), url)
    write(tmp_path / "x", "newer")
    with monkeypatch.context() as patch:
        patch.setattr(breaking, "breaks_at", name)
        with pytest.raises(OSError, match="connection lost"):
            storage.copy_folder(str(tmp_path / "x"), url)
    assert not storage.exists(url)
    with pytest.raises(CheckpointError, match=r"not a complete checkpoint: it contains no manifest\.json"):
        storage.copy_folder(url, str(tmp_path / "back"))
    storage.copy_folder(str(tmp_path / "x"), url)
    storage.copy_folder(url, str(tmp_path / "back"))
    assert (tmp_path / "back" / "a.txt").read_text() == "newer"


def test_a_short_upload_is_detected_before_the_manifest(
    tmp_path: Path, breaking: type[FailingFileSystem], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "x", "hello")
    monkeypatch.setattr(breaking, "cuts", "a.txt")
    with pytest.raises(CheckpointError, match=r"'a\.txt' has 4 bytes after the upload, but 5 bytes in"):
        storage.copy_folder(str(tmp_path / "x"), "breaking://host/actor")
    assert not storage.exists("breaking://host/actor")


def test_an_upload_that_hangs_is_reported_and_ends(
    tmp_path: Path,
    breaking: type[FailingFileSystem],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write(tmp_path / "x")
    monkeypatch.setattr(breaking, "hangs_at", "a.txt")
    monkeypatch.setattr(subprocesses, "REPORT_SECONDS", 0.3)
    limit = subprocesses.Limit(1.0, "trainer.worker_timeouts.save=1")
    message = r"breaking.put_file: no answer from breaking://.*/a\.txt for 1.* limit trainer.worker_timeouts.save=1"
    with pytest.raises(StorageError, match=message), subprocesses.limit_waits(limit):
        storage.copy_folder(str(tmp_path / "x"), "breaking://host/actor")
    assert "breaking.put_file: no answer from breaking://" in caplog.records[0].getMessage()
    monkeypatch.setattr(breaking, "hangs_at", "")
    storage.copy_folder(str(tmp_path / "x"), "breaking://host/actor")
    monkeypatch.setattr(breaking, "hangs_at", "actor/a.txt")
    message = r"breaking.get_file: no answer from breaking://.*actor/a\.txt for 1"
    with pytest.raises(StorageError, match=message), subprocesses.limit_waits(limit):
        storage.copy_folder("breaking://host/actor", str(tmp_path / "back"))


def test_only_a_complete_folder_is_copied_to_a_url(tmp_path: Path, remote: str) -> None:
    write(tmp_path / "x")
    (tmp_path / "x" / "a.txt").write_text("damaged")
    with pytest.raises(CheckpointError, match=r"a\.txt"):
        storage.copy_folder(str(tmp_path / "x"), remote)
    assert not fsspec.filesystem("memory").exists("/bucket")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s4://bucket/x", "Protocol not known: s4; use a local path"),
        ("memory://", "contains no path"),
        ("needs-more://host/x", INSTALL + r".*needs-more:// \(Install morefs"),
    ],
)
def test_invalid_urls_report_the_fix(tmp_path: Path, url: str, message: str) -> None:
    fsspec.register_implementation(
        "needs-more", "morefs_that_nobody_has.core.MoreFS", clobber=True, errtxt="Install morefs"
    )
    write(tmp_path / "x")
    with pytest.raises(StorageError, match=message):
        storage.copy_folder(str(tmp_path / "x"), url)


def test_without_fsspec_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(StorageError, match=INSTALL):
        storage.copy_folder(str(tmp_path / "x"), "memory://bucket/x")


def test_from_one_url_to_another_is_rejected() -> None:
    with pytest.raises(CheckpointError, match="one of the two must be a local path"):
        storage.copy_folder("memory://a/x", "memory://b/x")
