"""Remote files are downloaded once, completely, by one process."""

import base64
import hashlib
import json
import multiprocessing
import os
import re
import sys
import time
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from camshaft.errors import StorageError
from camshaft.fetch import _target as fetch_target
from camshaft.fetch import cache_folder, fetch
from camshaft.plugins import install_command


class CountingFileSystem(MemoryFileSystem):
    """A memory file system that counts reads and can truncate, fail, change files or report checksums."""

    protocol = "counting"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    read: ClassVar[list[str]] = []
    fault = ""
    md5: ClassVar[dict[str, str]] = {}

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("counting:/"))

    def get_file(self, rpath, lpath, *args, **kwargs):
        self.read.append(rpath)
        super().get_file(rpath, lpath, *args, **kwargs)
        if self.fault == "short":
            os.truncate(lpath, os.path.getsize(lpath) - 1)
        elif self.fault == "broken":
            os.truncate(lpath, 1)
            raise ConnectionError("the line is dead")
        elif self.fault == "changed":
            self.pipe_file(rpath, self.cat_file(rpath))

    def info(self, path, **kwargs):
        details = super().info(path, **kwargs)
        name = self._strip_protocol(path)
        return {**details, "md5Hash": self.md5[name]} if name in self.md5 else details


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAMSHAFT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> CountingFileSystem:
    fsspec.register_implementation("counting", CountingFileSystem, clobber=True)
    for name, empty in {"store": {}, "pseudo_dirs": [""], "read": [], "md5": {}}.items():
        monkeypatch.setattr(CountingFileSystem, name, empty)
    return fsspec.filesystem("counting")


URL = "counting://bucket/data/train.parquet"
INSTALL = re.escape(install_command("fsspec"))


def test_a_file_is_copied_once_and_again_when_it_changed(remote: CountingFileSystem) -> None:
    remote.pipe_file("/bucket/data/train.parquet", b"one")
    assert fetch(URL).read_bytes() == b"one"
    assert fetch(URL) == cache_folder("files") / "counting" / "bucket" / "data" / "train.parquet"
    assert len(remote.read) == 1
    remote.pipe_file("/bucket/data/train.parquet", b"two")  # as many bytes
    assert fetch(URL).read_bytes() == b"two"
    assert len(remote.read) == 2


@pytest.mark.parametrize(
    "damage", ["shorter", "other bytes", "gone", "record gone", "record cut off", "record emptied"]
)
def test_a_modified_copy_is_downloaded_again(remote: CountingFileSystem, damage: str) -> None:
    remote.pipe_file("/bucket/data/train.parquet", b"hello")
    path = fetch(URL)
    record = path.with_name(path.name + ".origin.json")
    if damage == "gone":
        path.unlink()
    elif damage == "record gone":
        record.unlink()
    elif damage == "record cut off":
        record.write_text(record.read_text()[:20])
    elif damage == "record emptied":
        record.write_text("{}")
    else:
        path.write_bytes(b"hell" if damage == "shorter" else b"jello")
    assert fetch(URL).read_bytes() == b"hello"
    assert len(remote.read) == 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("short", "received 4 of the 5 bytes of /bucket/data/train.parquet"),
        ("broken", "ConnectionError: the line is dead"),
        ("changed", "changed during the download"),
    ],
)
def test_an_incomplete_download_is_never_used(
    remote: CountingFileSystem, monkeypatch, fault: str, message: str
) -> None:
    remote.pipe_file("/bucket/data/train.parquet", b"hello")
    with monkeypatch.context() as patch:
        patch.setattr(CountingFileSystem, "fault", fault)
        with pytest.raises(StorageError, match=message):
            fetch(URL)
        assert not (cache_folder("files") / "counting/bucket/data/train.parquet.unfinished").exists()
        with pytest.raises(StorageError, match=message):
            fetch(URL)
    assert fetch(URL).read_bytes() == b"hello"


def test_files_of_others_in_the_cache_are_kept(remote: CountingFileSystem) -> None:
    """A file in the place of a download is renamed; one beside it stays, also when the source becomes a single file."""
    folder = cache_folder("files") / "counting" / "bucket" / "model"
    folder.mkdir(parents=True)
    for name in ("config.json", "notes.txt"):
        (folder / name).write_text("foreign")
    remote.pipe_file("/bucket/model/config.json", b"one")
    assert (fetch("counting://bucket/model") / "config.json").read_bytes() == b"one"
    assert (folder / "config.json.1").read_text() == (folder / "notes.txt").read_text() == "foreign"
    (folder / "config.json").write_text("edited")
    assert (fetch("counting://bucket/model") / "config.json").read_bytes() == b"one"
    assert (folder / "config.json.2").read_text() == "edited"
    remote.rm("/bucket/model", recursive=True)
    remote.pipe_file("/bucket/model", b"file")
    assert fetch("counting://bucket/model").read_bytes() == b"file"
    assert sorted(path.name for path in folder.with_name("model.1").iterdir()) == [
        "config.json.1",
        "config.json.2",
        "notes.txt",
    ]


def test_the_md5_of_the_file_system_is_verified(remote: CountingFileSystem) -> None:
    remote.pipe_file("/bucket/data/train.parquet", b"hello")
    remote.md5["/bucket/data/train.parquet"] = base64.b64encode(hashlib.md5(b"other").digest()).decode()
    with pytest.raises(StorageError, match=r"the MD5 of .* differs"):
        fetch(URL)
    remote.md5["/bucket/data/train.parquet"] = base64.b64encode(hashlib.md5(b"hello").digest()).decode()
    assert fetch(URL).read_bytes() == b"hello"


def test_only_changed_files_of_a_folder_are_downloaded_again(remote: CountingFileSystem) -> None:
    for name in ("config.json", "model.safetensors", "sub/extra.txt"):
        remote.pipe_file(f"/bucket/model/{name}", name.encode())
    folder = fetch("counting://bucket/model/")
    assert (folder / "sub" / "extra.txt").read_text() == "sub/extra.txt"
    assert len(remote.read) == 3
    remote.pipe_file("/bucket/model/config.json", b"new")
    remote.rm_file("/bucket/model/sub/extra.txt")
    assert fetch("counting://bucket/model") == folder
    assert (folder / "config.json").read_text() == "new"
    assert remote.read[3:] == ["/bucket/model/config.json"]
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == ["config.json", "model.safetensors"]


def test_a_file_can_become_a_folder_and_back(remote: CountingFileSystem) -> None:
    remote.pipe_file("/bucket/x", b"file")
    assert fetch("counting://bucket/x").read_bytes() == b"file"
    remote.rm_file("/bucket/x")
    remote.pipe_file("/bucket/x/a", b"inside")
    assert (fetch("counting://bucket/x") / "a").read_bytes() == b"inside"
    remote.rm("/bucket/x", recursive=True)
    remote.pipe_file("/bucket/x", b"file")
    assert fetch("counting://bucket/x").read_bytes() == b"file"


def test_local_files_are_not_copied(tmp_path: Path) -> None:
    assert fetch(tmp_path / "a.parquet") == tmp_path / "a.parquet"
    assert fetch(f"file://{tmp_path}/a.parquet") == tmp_path / "a.parquet"


def test_no_url_leads_out_of_the_cache(remote: CountingFileSystem) -> None:
    remote.pipe_file("/bucket/x", b"x")
    with pytest.raises(StorageError):
        fetch("counting://bucket/../../../../x")
    assert {path.name for path in cache_folder("files").parent.iterdir()} == {"files"}


def _holding(path: str, begun, seconds: float) -> None:
    """Start another process that slowly copies to `path`."""
    import fcntl

    Path(path).parent.mkdir(parents=True)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        begun.set()
        time.sleep(seconds)


def test_a_process_waits_for_another_that_is_copying(
    remote: CountingFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    remote.pipe_file("/bucket/data/train.parquet", b"hello")
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    path = str(cache_folder("files") / "counting" / "bucket" / "data" / "train.parquet")
    other = context.Process(target=_holding, args=(path, begun, 1.0))
    other.start()
    assert begun.wait(60)
    start_time = time.monotonic()
    assert fetch(URL).read_bytes() == b"hello"
    assert time.monotonic() - start_time > 0.5
    other.join()
    assert caplog.text.count("waiting for another process") == 1


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("counting://bucket/none.parquet", "counting://bucket/none.parquet does not exist"),
        ("s4://bucket/x", "Protocol not known: s4"),
        ("needs-s3://host/x", f"{INSTALL} and the package for needs-s3:// \\(Install s3fs"),
        ("hdfs://nowhere:1/x", r"hdfs:// is unreachable.*Set JAVA_HOME, HADOOP_HOME and CLASSPATH"),
    ],
)
def test_unreachable_urls_report_the_reason(remote: CountingFileSystem, url: str, message: str) -> None:
    fsspec.register_implementation("needs-s3", "no_such_s3fs.core.FS", clobber=True, errtxt="Install s3fs")
    with pytest.raises(StorageError, match=message):
        fetch(url)


def test_the_package_of_a_supported_file_system_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(StorageError, match=f"{INSTALL} s3fs"):
        fetch("s3://bucket/train.parquet")


def test_a_cache_that_cannot_be_written_names_the_variable(
    remote: CountingFileSystem, tmp_path: Path, monkeypatch
) -> None:
    remote.pipe_file("/bucket/data/train.parquet", b"hello")
    (tmp_path / "file").touch()
    monkeypatch.setenv("CAMSHAFT_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="set CAMSHAFT_CACHE to a writable folder"):
        fetch(URL)


def test_the_record_contains_the_source_of_a_copy(remote: CountingFileSystem) -> None:
    remote.pipe_file("/bucket/data/train.parquet", b"hello")
    path = fetch(URL)
    record = json.loads(path.with_name(path.name + ".origin.json").read_text())
    assert record["url"] == URL
    assert record["files"][""]["bytes"] == 5


@pytest.mark.parametrize(
    "url",
    [
        "counting://me:pass-in-url@host/folder/a.txt",
        "counting://me:p@ss:in@host/folder/a.txt",
        "counting://host/folder/a.txt",
    ],
)
def test_a_copy_is_named_without_user_info(url: str, remote: CountingFileSystem, tmp_path: Path) -> None:
    path = fetch_target(url)
    assert path == cache_folder("files") / "counting" / "host" / "folder" / "a.txt"


def test_a_signed_url_is_named_by_a_checksum() -> None:
    first, second = (fetch_target(f"https://host/data/a.parquet?sig={value}") for value in ("first", "second"))
    assert first != second
    assert (first.name, first.parent.name, first.suffix) == ("a.parquet", "data", ".parquet")
    assert "first" not in str(first)
    assert fetch_target("s3://bucket/a?b.parquet").name == "a?b.parquet"


def test_errors_and_files_do_not_contain_passwords(remote: CountingFileSystem, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"counting://me:\*\*\*@host/nothing does not exist") as raised:
        fetch("counting://me:pass-in-url@host/nothing")
    assert "pass-in-url" not in str(raised.value)
    assert not [path for path in tmp_path.rglob("*") if "pass-in-url" in str(path)]
