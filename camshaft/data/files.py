"""Resolve files, folders, glob patterns and URLs of the config to local parquet files.

    data_files(["train.parquet", "more/", "parts/*.parquet", "s3://bucket/train.parquet"])

A folder or pattern resolves to its parquet files in alphabetical order. Remote files are downloaded first
(`camshaft/fetch.py`). Used by the trainers at startup.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path

from camshaft import storage
from camshaft.data.parquet import Paths
from camshaft.errors import BatchError
from camshaft.fetch import fetch, readable

_ENDING = "*.parquet"


def data_files(paths: Paths) -> list[Path]:
    """Return the local files of `paths` in order. Missing files are kept; the reader reports them."""
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
    """Return the file URLs that a URL resolves to."""
    if url.startswith(("http://", "https://")):
        return [url]  # HTTP has no folders or patterns; a question mark starts the query
    with readable(url):
        files, root = storage.file_system(url)
        if glob.has_magic(root) and not files.exists(root):
            paths = _non_empty(sorted(files.glob(root)), f"no file matches {url}")
        elif files.isdir(root):
            paths = _non_empty(sorted(files.glob(f"{root}/{_ENDING}")), f"the folder {url} has no parquet files")
        else:
            return [url]
    # Paths of the file system lack the URL's prefix, which includes the host for some protocols.
    prefix = url.rstrip("/").removesuffix(root)
    return [f"{prefix}{path}" for path in paths]


def _non_empty(paths: list, problem: str) -> list:
    if not paths:
        raise BatchError(f"{problem}; name parquet files, a folder of them, or a pattern such as parts/{_ENDING}")
    return paths
