"""Read parquet files as rows of Python objects.

    table = read_parquet(["a.parquet", "b.parquet"], required=["prompt"], optional=["extra_info"])
    table.rows[7]["prompt"]
    table.location(7)                     # "b.parquet, row 2", for error messages

Only the requested columns are read. Files must be local; `files.py` downloads remote ones. The other modules of this
package use these functions.
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
    """Concatenated rows of one or more files."""

    rows: list[dict[str, Any]]
    files: tuple[Path, ...]
    counts: tuple[int, ...]
    """Number of rows read from each file."""

    def __len__(self) -> int:
        return len(self.rows)

    def location(self, index: int) -> str:
        """Return the file and the row number within the file (from 0) of a row, for error messages."""
        for file, count in zip(self.files, self.counts, strict=True):
            if index < count:
                return f"{file}, row {index}"
            index -= count
        raise IndexError(index)


def read_parquet(
    paths: Paths, required: Sequence[str], optional: Sequence[str] = (), max_samples: int | None = None
) -> Table:
    """Read the rows of all files in order.

    `optional` columns are read if all files have them. At most `max_samples` rows are read; None or -1 reads all rows.
    """
    files = _file_list(paths)
    limit = None if max_samples is None or max_samples < 0 else max_samples
    if limit == 0:
        raise BatchError("max_samples=0 selects no rows; use -1 for all rows")
    sources = [_open(file) for file in files]
    shared_columns = _shared_columns(sources)
    rows: list[dict[str, Any]] = []
    counts = []
    for file, source in zip(files, sources, strict=True):
        _check_columns(file, source.schema_arrow.names, required)
        num_before = len(rows)
        columns = list(dict.fromkeys([*required, *(name for name in optional if name in shared_columns)]))
        with convert_read_errors(file):
            for record_batch in source.iter_batches(columns=columns):
                rows.extend(record_batch.to_pylist())
                if limit is not None and len(rows) >= limit:
                    del rows[limit:]
                    break
        counts.append(len(rows) - num_before)
        source.close()
    return Table(rows, tuple(files), tuple(counts))


@contextlib.contextmanager
def convert_read_errors(file: Path) -> Iterator[None]:
    """Raise BatchError for errors caused by damaged files and by values that Python cannot represent."""
    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise BatchError(
            f"{file} cannot be read: {error}. Rewrite the file, without values that Python cannot represent"
        ) from error


def read_columns(paths: Paths) -> frozenset[str]:
    """Return the names of the columns that all files contain."""
    sources = [_open(file) for file in _file_list(paths)]
    columns = _shared_columns(sources)
    for source in sources:
        source.close()
    return columns


def open_files(paths: Paths) -> list[parquet.ParquetFile]:
    """Open the files. Raise BatchError if a file is missing or empty. The caller must close the files."""
    return [_open(file) for file in _file_list(paths)]


def write_parquet(path: str | Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows of Python objects to a parquet file, with column types inferred from the values."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def _file_list(paths: Paths) -> list[Path]:
    files = [Path(p).expanduser() for p in ([paths] if isinstance(paths, (str, Path)) else paths)]
    if not files:
        raise BatchError("the list of data files is empty; add at least one parquet file")
    return files


def _shared_columns(sources: Sequence[parquet.ParquetFile]) -> frozenset[str]:
    return frozenset.intersection(*(frozenset(source.schema_arrow.names) for source in sources))


def _open(file: Path) -> parquet.ParquetFile:
    if not file.exists():
        matches = difflib.get_close_matches(file.name, _neighbours(file), n=1, cutoff=0.5)
        hint = f" Did you mean {file.parent / matches[0]}?" if matches else ""
        raise BatchError(f"the data file {file} does not exist.{hint}")
    if file.is_dir():
        names = ", ".join(_neighbours(file / "any")[:5]) or "none"
        raise BatchError(f"{file} is a folder; use the parquet files in it (found: {names})")
    try:
        source = parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise BatchError(
            f"{file} is not a parquet file ({error}). Convert JSON lines with "
            f"pyarrow.parquet.write_table(pyarrow.json.read_json('{file.name}'), '{file.stem}.parquet')"
        ) from error
    if source.metadata.num_rows == 0:
        raise BatchError(f"{file} has no rows; remove it from the data files")
    return source


def _neighbours(file: Path) -> list[str]:
    return sorted(p.name for p in file.parent.glob("*.parquet")) if file.parent.is_dir() else []


def _check_columns(file: Path, columns: Sequence[str], required: Sequence[str]) -> None:
    for name in required:
        if name not in columns:
            matches = difflib.get_close_matches(name, columns, n=1)
            hint = f" Did you mean '{matches[0]}'?" if matches else ""
            raise BatchError(f"{file} has no column '{name}'.{hint} Its columns: {', '.join(columns)}")
