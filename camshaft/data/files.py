"""Resolve the files, folders, glob patterns and URLs in the config to local parquet files.

    data_files(["train.parquet", "more/", "parts/*.parquet", "s3://bucket/train.parquet"])

A folder resolves to its parquet files, a pattern to the matching files, both in alphabetical order. Remote files are
downloaded first (`camshaft/fetch.py`). The trainers call `data_files` at startup.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path

from camshaft import storage
from camshaft.data.parquet import Paths
from camshaft.errors import BatchError
from camshaft.fetch import convert_errors, fetch

_ENDING = "*.parquet"


def data_files(paths: Paths) -> list[Path]:
    """Resolve `paths` to local files, in order. Include missing files, which `read_parquet` reports."""
    return [file for path in ([paths] if isinstance(paths, (str, Path)) else paths) for file in _files(path)]


def _files(path: str | Path) -> Iterator[Path]:
    if storage.is_url(path):
        yield from map(fetch, _urls(str(path)))
        return
    local = storage.local(path)
    if local.is_dir():
        yield from _non_empty(sorted(local.glob(_ENDING)), f"the folder {local} has no parquet files")
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
            paths = _non_empty(sorted(files.glob(f"{root}/{_ENDING}")), f"the folder {url} has no parquet files")
        else:
            return [url]
    # The file system returns paths without the prefix of the URL, which includes the host for some protocols.
    prefix = url.rstrip("/").removesuffix(root)
    return [f"{prefix}{path}" for path in paths]


def _non_empty(paths: list, problem: str) -> list:
    if not paths:
        raise BatchError(f"{problem}; use parquet files, a folder of them, or a pattern such as parts/{_ENDING}")
    return paths
