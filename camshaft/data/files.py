"""Which parquet files a config means: files, folders, patterns and URLs become local files.

    data_files(["train.parquet", "more/", "parts/*.parquet", "s3://bucket/train.parquet"])

A folder stands for the parquet files in it, in the order of their names; so does a pattern. What is on another file
system is copied near first (`camshaft/fetch.py`). Used by the trainers, once, before they read.
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
    """The local files that `paths` name, in order; a file that is not there stays, for the reader to say so."""
    return [file for path in ([paths] if isinstance(paths, (str, Path)) else paths) for file in _files(path)]


def _files(path: str | Path) -> Iterator[Path]:
    if storage.is_url(path):
        yield from map(fetch, _urls(str(path)))
        return
    here = storage.local(path)
    if here.is_dir():
        yield from _some(sorted(here.glob(_ENDING)), f"the folder {here} has no parquet files")
    elif glob.has_magic(str(here)) and not here.exists():
        yield from _some([Path(found) for found in sorted(glob.glob(str(here)))], f"no file is called {here}")
    else:
        yield here


def _urls(url: str) -> list[str]:
    """The URLs of the files that one URL stands for."""
    if url.startswith(("http://", "https://")):
        return [url]  # has neither folders nor patterns, and a question mark begins something else
    with readable(url):
        files, root = storage.file_system(url)
        if glob.has_magic(root) and not files.exists(root):
            found = _some(sorted(files.glob(root)), f"no file is called {url}")
        elif files.isdir(root):
            found = _some(sorted(files.glob(f"{root}/{_ENDING}")), f"the folder {url} has no parquet files")
        else:
            return [url]
    # A path of the file system lacks what stands before it in the URL, which names the host for some of them.
    before = url.rstrip("/").removesuffix(root)
    return [f"{before}{path}" for path in found]


def _some(found: list, otherwise: str) -> list:
    if not found:
        raise BatchError(f"{otherwise}; name parquet files, a folder of them, or a pattern such as parts/{_ENDING}")
    return found
