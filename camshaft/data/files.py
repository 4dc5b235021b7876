"""Resolve the files, folders, glob patterns and URLs in the config to local data files.

    data_files(["train.jsonl", "more/", "parts/*.parquet", "s3://bucket/train.parquet", "openai/gsm8k:test"])

A folder resolves to its data files, a pattern to the matching files, both in alphabetical order. A folder may also be a
split that the `datasets` library saved. Remote files are downloaded first (`camshaft/fetch.py`), and data sets of the
Hugging Face Hub (`hub_datasets.py`).
"""

import glob
import posixpath
from collections.abc import Iterator
from pathlib import Path

from camshaft import storage
from camshaft.config.files import data_folder_error, dataset_name, select_data_files
from camshaft.data.hub_datasets import dataset_file
from camshaft.data.tables import Paths
from camshaft.errors import BatchError
from camshaft.fetch import convert_errors, fetch


def data_files(paths: Paths) -> list[Path]:
    """Resolve `paths` to local files, in order. Include missing files, which `read_rows` reports."""
    return [file for path in ([paths] if isinstance(paths, (str, Path)) else paths) for file in _files(path)]


def _files(path: str | Path) -> Iterator[Path]:
    if (name := dataset_name(path)) is not None:
        yield dataset_file(name)
        return
    if storage.is_url(path):
        yield from map(fetch, _urls(str(path)))
        return
    local = storage.local(path)
    if local.is_dir():
        yield from (local / name for name in _select(str(local), [entry.name for entry in local.iterdir()]))
    elif glob.has_magic(str(local)) and not local.exists():
        yield from _non_empty([Path(match) for match in sorted(glob.glob(str(local)))], f"no file matches {local}")
    else:
        yield local


def _urls(url: str) -> list[str]:
    """Resolve a URL of a file, folder or pattern to URLs of files."""
    if url.startswith(("http://", "https://")):
        return [url]  # HTTP has no folders or patterns; a question mark in the URL starts the query string
    with convert_errors(url):
        files, root = storage.file_system(url)
        if glob.has_magic(root) and not files.exists(root):
            paths = _non_empty(sorted(files.glob(root)), f"no file matches {url}")
        elif files.isdir(root):
            names = [posixpath.basename(entry.rstrip("/")) for entry in files.ls(root, detail=False)]
            paths = [f"{root.rstrip('/')}/{name}" for name in _select(url, names)]
        else:
            return [url]
    # The file system returns paths without the prefix of the URL, which includes the host for some protocols.
    prefix = url.rstrip("/").removesuffix(root)
    return [f"{prefix}{path}" for path in paths]


def _select(folder: str, names: list[str]) -> list[str]:
    if error := data_folder_error(names):
        raise BatchError(f"{folder}: {error}")
    return select_data_files(names)


def _non_empty(paths: list, problem: str) -> list:
    if not paths:
        raise BatchError(f"{problem}; use data files, a folder of them, or a pattern such as parts/*.parquet")
    return paths
