"""Files, folders, patterns and URLs become local parquet files in a stable order."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from camshaft.data import PromptOptions, data_files, load_prompts
from camshaft.data.tables import write_parquet
from camshaft.errors import BatchError, StorageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b", "a", "c"):
        write_parquet(tmp_path / "parts" / f"{name}.parquet", [{"data_source": "s", "prompt": name}])
    (tmp_path / "parts" / "notes.txt").touch()
    return tmp_path / "parts"


@pytest.fixture
def remote(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the same folder on another file system."""
    monkeypatch.setenv("CAMSHAFT_CACHE", str(tmp_path / "cache"))
    files = fsspec.filesystem("memory")
    for path in folder.iterdir():
        files.pipe_file(f"/bucket/parts/{path.name}", path.read_bytes())
    yield "memory://bucket/parts"
    files.rm("/bucket", recursive=True)


@pytest.mark.parametrize("where", ["here", "file url", "elsewhere"])
def test_folders_and_patterns_resolve_in_alphabetical_order(folder: Path, remote: str, where: str) -> None:
    root = {"here": str(folder), "file url": f"file://{folder}", "elsewhere": remote}[where]
    names = [path.name for path in data_files(root)]
    assert names == ["a.parquet", "b.parquet", "c.parquet"]
    assert [path.name for path in data_files(f"{root}/[bc].parquet")] == ["b.parquet", "c.parquet"]
    assert [path.name for path in data_files([f"{root}/c.parquet", f"{root}/a.parquet"])] == ["c.parquet", "a.parquet"]


def test_prompts_from_a_url_equal_local_ones(folder: Path, remote: str, tokenizer) -> None:
    local, fetched = (load_prompts(data_files(root), tokenizer, PromptOptions()).batch for root in (folder, remote))
    assert len(fetched) == 3
    assert fetched["prompts"].values.tolist() == local["prompts"].values.tolist()


def test_errors_of_remote_files_name_the_url(remote: str, tokenizer, tmp_path: Path) -> None:
    bad = write_parquet(tmp_path / "bad.parquet", [{"data_source": "s", "prompt": ""}])
    fsspec.filesystem("memory").pipe_file("/bucket/bad.parquet", bad.read_bytes())
    with pytest.raises(BatchError, match=r"memory/bucket/bad\.parquet, row 0: 'prompt' is empty"):
        load_prompts(data_files("memory://bucket/bad.parquet"), tokenizer, PromptOptions())


def test_brackets_in_a_file_name_are_not_a_pattern(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a[1].parquet", [{"prompt": "x"}])
    assert data_files(path) == [path]


@pytest.mark.parametrize("what", ["folder", "pattern", "folder elsewhere", "pattern elsewhere"])
def test_empty_folders_and_patterns_are_errors(tmp_path: Path, remote: str, what: str) -> None:
    (tmp_path / "empty").mkdir()
    fsspec.filesystem("memory").pipe_file("/bucket/empty/notes.txt", b"")
    path = {
        "folder": tmp_path / "empty",
        "pattern": f"{tmp_path}/*.parq",
        "folder elsewhere": "memory://bucket/empty",
        "pattern elsewhere": "memory://bucket/*.parq",
    }[what]
    with pytest.raises(BatchError, match=r"no file matches .*use data files|is a folder without data files"):
        data_files(path)


def test_a_missing_url_is_an_error() -> None:
    with pytest.raises(StorageError, match=r"memory://bucket/none\.parquet does not exist"):
        data_files("memory://bucket/none.parquet")
