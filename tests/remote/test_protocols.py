"""Data, models and checkpoints on remote file systems, through real clients and servers on this machine.

The client of WebHDFS is part of fsspec and needs only `requests`. S3 needs the packages of requirements-remote.txt; run
`make test-remote`.
"""

# pyright: reportMissingImports=false
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest
from support.ppo_runs import ppo_args, run_ppo
from support.webhdfs_server import WebHDFSServer

from camshaft import storage
from camshaft.errors import CheckpointError, StorageError
from camshaft.fetch import fetch


@dataclass(frozen=True)
class Remote:
    """A folder of a remote file system."""

    url: str

    def put(self, source: Path, name: str) -> str:
        """Upload a file or the files of a folder, and return the URL."""
        files, root = fsspec.core.url_to_fs(f"{self.url}/{name}")
        for path in [source] if source.is_file() else sorted(source.iterdir()):
            files.put_file(str(path), root if source.is_file() else f"{root}/{path.name}")
        files.invalidate_cache()
        return f"{self.url}/{name}"

    def write(self, name: str, content: bytes) -> str:
        files, root = fsspec.core.url_to_fs(f"{self.url}/{name}")
        files.pipe_file(root, content)
        return f"{self.url}/{name}"

    def names(self, name: str) -> list[str]:
        files, root = fsspec.core.url_to_fs(f"{self.url}/{name}")
        files.invalidate_cache()
        return sorted(path.removeprefix(f"{root}/") for path in files.find(root))


@pytest.fixture(scope="module")
def webhdfs() -> Iterator[str]:
    with WebHDFSServer() as server:
        yield server.url


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Start moto's S3 server and return the URL of a bucket."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    settings |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir("training")
        yield "s3://training"
    server.stop()


@pytest.fixture(params=["webhdfs", pytest.param("s3", marks=pytest.mark.remote)])
def remote(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remote:
    """Return an empty remote folder; files are cached below `tmp_path`."""
    monkeypatch.setenv("CAMSHAFT_CACHE", str(tmp_path / "cache"))
    return Remote(f"{request.getfixturevalue(request.param)}/{tmp_path.name}")


def write_checkpoint(folder: Path, **files: str) -> Path:
    with storage.new_folder(folder, step=7) as work:
        (work / "sub").mkdir()
        for name, text in files.items():
            (work / "sub" / name).write_text(text)
    return folder


def test_a_checkpoint_is_copied_replaced_and_removed(remote: Remote, tmp_path: Path) -> None:
    url = f"{remote.url}/run/global_step_7"
    storage.copy_folder(str(write_checkpoint(tmp_path / "first", a="x" * 100_000, b="")), url)
    assert storage.list_steps(f"{remote.url}/run") == [7]
    assert storage.read_manifest(url)["facts"] == {"step": 7}
    storage.copy_folder(str(write_checkpoint(tmp_path / "second", b="new")), url)
    assert remote.names("run/global_step_7") == ["manifest.json", "sub/b"]
    storage.copy_folder(url, str(tmp_path / "back"))
    assert (tmp_path / "back" / "sub" / "b").read_text() == "new"
    remote.write("run/global_step_7/sub/b", b"NEW")
    with pytest.raises(CheckpointError, match="damaged"):
        storage.copy_folder(url, str(tmp_path / "again"))
    storage.remove(url)
    assert not storage.exists(url)
    assert storage.list_steps(f"{remote.url}/run") == []


def test_small_files_are_written_and_read(remote: Remote) -> None:
    assert storage.read_text(remote.url, "latest.txt") is None
    for text in ("20", "40"):
        storage.write_text(remote.url, "latest.txt", text)
        assert storage.read_text(remote.url, "latest.txt") == text


def test_only_changed_files_are_downloaded_again(remote: Remote) -> None:
    url = remote.write("data/a.txt", b"old")
    remote.write("data/b.txt", b"same")
    folder = fetch(f"{remote.url}/data")
    times = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.txt")}
    assert fetch(f"{remote.url}/data") == folder
    remote.write("data/a.txt", b"new")
    assert (fetch(f"{remote.url}/data") / "a.txt").read_bytes() == b"new"
    assert (folder / "b.txt").stat().st_mtime_ns == times["b.txt"]
    assert (folder / "a.txt").stat().st_mtime_ns != times["a.txt"]
    assert fetch(url).read_bytes() == b"new"
    with pytest.raises(StorageError, match="does not exist"):
        fetch(f"{remote.url}/nothing")


@pytest.mark.slow
def test_a_run_reads_and_resumes_from_a_remote_folder(remote: Remote, tmp_path: Path) -> None:
    home = tmp_path / "home"
    ppo_args(home)  # writes models and data
    keys: dict[str, Any] = {
        "data.train_files": remote.put(home / "data" / "train.parquet", "data/train.parquet"),
        "data.val_files": "null",
        "actor_rollout_ref.model.path": remote.put(home / "actor", "models/actor"),
        "critic.model.path": remote.put(home / "critic", "models/critic"),
        "critic.model.tokenizer_path": f"{remote.url}/models/actor",
        "trainer.save_freq": 1,
        "trainer.resume_mode": "auto",
        "trainer.default_hdfs_dir": f"{remote.url}/run",
        "trainer.max_actor_ckpt_to_keep": 1,
    }
    expected = run_ppo(home, steps=3)
    first = run_ppo(home, {**keys, "trainer.default_local_dir": tmp_path / "first"}, steps=2)
    assert storage.list_steps(f"{remote.url}/run") == [1, 2]
    shutil.rmtree(tmp_path / "first")
    shutil.rmtree(os.environ["CAMSHAFT_CACHE"])  # as on another machine
    (last,) = run_ppo(home, {**keys, "trainer.default_local_dir": tmp_path / "second"}, steps=3)
    for step, result in zip(expected, [*first, last], strict=True):
        assert all(weight.equal(step.actor[name]) for name, weight in result.actor.items())
        assert all(weight.equal(step.critic[name]) for name, weight in result.critic.items())
