"""Read parquet files as rows of Python objects, with errors that describe the file.

    table = read_parquet(["a.parquet", "b.parquet"], required=["prompt"], optional=["extra_info"])
    table.rows[7]["prompt"]
    table.place(7)                        # "b.parquet, row 2", for error messages

Only requested columns are read. Used by `prompts.py`, `sft.py`, `preferences.py` and `answers.py`. Files must be
local; `files.py` downloads remote ones.
"""

import contextlib
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from camshaft.errors import BatchError

Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class Table:
    """Rows of one or more files, concatenated."""

    rows: list[dict[str, Any]]
    files: tuple[Path, ...]
    counts: tuple[int, ...]
    """Number of rows per file."""

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, index: int) -> str:
        """Return file and row number (from 0) of a row, for error messages."""
        for file, count in zip(self.files, self.counts, strict=True):
            if index < count:
                return f"{file}, row {index}"
            index -= count
        raise IndexError(index)


def read_parquet(
    paths: Paths, required: Sequence[str], optional: Sequence[str] = (), max_samples: int | None = None
) -> Table:
    """Read the rows of all files in order, at most `max_samples` of them (None or -1: all).

    `optional` columns are read if every file has them.
    """
    files = _as_list(paths)
    limit = None if max_samples is None or max_samples < 0 else max_samples
    if limit == 0:
        raise BatchError("max_samples=0 selects no rows; use -1 for all")
    opened = [_open(file) for file in files]
    shared = _shared_columns(opened)
    rows: list[dict[str, Any]] = []
    counts = []
    for file, source in zip(files, opened, strict=True):
        _check_columns(file, source.schema_arrow.names, required)
        before = len(rows)
        columns = list(dict.fromkeys([*required, *(name for name in optional if name in shared)]))
        with reading(file):
            for part in source.iter_batches(columns=columns):
                rows.extend(part.to_pylist())
                if limit is not None and len(rows) >= limit:
                    del rows[limit:]
                    break
        counts.append(len(rows) - before)
        source.close()
    return Table(rows, tuple(files), tuple(counts))


@contextlib.contextmanager
def reading(file: Path) -> Iterator[None]:
    """Convert errors of damaged files and of values without a Python equivalent to BatchError."""
    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise BatchError(f"{file} cannot be read: {error}. Rewrite the file without such values") from error


def read_columns(paths: Paths) -> frozenset[str]:
    """Return the columns that all files have."""
    opened = [_open(file) for file in _as_list(paths)]
    columns = _shared_columns(opened)
    for source in opened:
        source.close()
    return columns


def open_all(paths: Paths) -> list[parquet.ParquetFile]:
    """Open the files; raise BatchError if one is missing or empty. The caller closes them."""
    return [_open(file) for file in _as_list(paths)]


def write_parquet(path: str | Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows of Python objects to a parquet file; types are inferred from the values."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def _as_list(paths: Paths) -> list[Path]:
    files = [Path(p).expanduser() for p in ([paths] if isinstance(paths, (str, Path)) else paths)]
    if not files:
        raise BatchError("no data files; name at least one parquet file")
    return files


def _shared_columns(opened: Sequence[parquet.ParquetFile]) -> frozenset[str]:
    return frozenset.intersection(*(frozenset(source.schema_arrow.names) for source in opened))


def _open(file: Path) -> parquet.ParquetFile:
    if not file.exists():
        near = difflib.get_close_matches(file.name, _neighbours(file), n=1, cutoff=0.5)
        hint = f" Did you mean {file.parent / near[0]}?" if near else ""
        raise BatchError(f"no data file {file}.{hint}")
    if file.is_dir():
        names = ", ".join(_neighbours(file / "any")[:5]) or "none"
        raise BatchError(f"{file} is a folder; name its parquet files (found: {names})")
    try:
        source = parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise BatchError(
            f"{file} is not a parquet file ({error}). Convert JSON lines with "
            f"pyarrow.parquet.write_table(pyarrow.json.read_json('{file.name}'), '{file.stem}.parquet')"
        ) from error
    if source.metadata.num_rows == 0:
        raise BatchError(f"{file} has no rows")
    return source


def _neighbours(file: Path) -> list[str]:
    return sorted(p.name for p in file.parent.glob("*.parquet")) if file.parent.is_dir() else []


def _check_columns(file: Path, columns: Sequence[str], required: Sequence[str]) -> None:
    for name in required:
        if name not in columns:
            near = difflib.get_close_matches(name, columns, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise BatchError(f"{file} has no column '{name}'.{hint} Its columns: {', '.join(columns)}")
