"""Read data files as rows of Python objects.

    table = read_rows(["a.parquet", "b.jsonl"], required=["prompt"], optional=["extra_info"])
    table.rows[7]["prompt"]
    table.location(7)                     # "b.jsonl, line 3", for error messages

Only the requested columns are read. Files must be local; `files.py` downloads remote ones, and `formats.py` opens the
supported formats. The other modules of this package use these functions.
"""

import contextlib
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from camshaft import storage
from camshaft.config.files import select_data_files
from camshaft.data.formats import DataFile, open_data_file
from camshaft.errors import BatchError

Paths = str | Path | Sequence[str | Path]

MARK = b"camshaft.content"
"""Entry in the metadata of a parquet file by which files of camshaft are recognized."""


@dataclass(frozen=True)
class Table:
    """Concatenated rows of one or more files."""

    rows: list[dict[str, Any]]
    sources: tuple[DataFile, ...]
    counts: tuple[int, ...]
    """Number of rows read from each file."""

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(source.path for source in self.sources)

    def __len__(self) -> int:
        return len(self.rows)

    def location(self, index: int) -> str:
        """Return the file and the position of a row in it, for error messages."""
        for source, count in zip(self.sources, self.counts, strict=True):
            if index < count:
                return source.location(index)
            index -= count
        raise IndexError(index)


def read_rows(
    paths: Paths, required: Sequence[str], optional: Sequence[str] | None = (), max_samples: int | None = None
) -> Table:
    """Read the rows of all files in order.

    `optional` columns are read from the files that have them; None reads all columns. At most `max_samples` rows are
    read; None or -1 reads all rows.
    """
    limit = None if max_samples is None or max_samples < 0 else max_samples
    if limit == 0:
        raise BatchError("max_samples=0 selects no rows; use -1 for all rows")
    sources = open_files(paths)
    rows: list[dict[str, Any]] = []
    counts = []
    for source in sources:
        _check_columns(source, required)
        num_before = len(rows)
        names = source.columns if optional is None else [name for name in optional if name in source.columns]
        columns = list(dict.fromkeys([*required, *names]))
        with convert_read_errors(source.path):
            for batch in source.batches(columns):
                rows.extend(batch)
                if limit is not None and len(rows) >= limit:
                    del rows[limit:]
                    break
        counts.append(len(rows) - num_before)
    return Table(rows, tuple(sources), tuple(counts))


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
    return frozenset.intersection(*(frozenset(source.columns) for source in open_files(paths)))


def open_files(paths: Paths) -> list[DataFile]:
    """Open the files. Raise BatchError if a file is missing or empty."""
    files = [Path(path).expanduser() for path in ([paths] if isinstance(paths, (str, Path)) else paths)]
    if not files:
        raise BatchError("the list of data files is empty; add at least one file")
    return [_open(file) for file in files]


def write_parquet(path: str | Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows of Python objects to a parquet file, with column types inferred from the values.

    Raise BatchError if another program wrote an existing file.
    """
    path = Path(path)
    if path.exists() and read_metadata(path).get(MARK) != b"data":
        raise BatchError(
            f"{path} already exists and was not written by this version of camshaft; use another folder, or delete it"
        )
    table = pyarrow.Table.from_pylist(list(rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    with storage.new_file(path) as work:
        parquet.write_table(table.replace_schema_metadata({MARK: b"data"}), work)
    return path


def read_metadata(path: str | Path) -> Mapping[bytes, bytes]:
    """Return the metadata of a parquet file. Empty if it cannot be read, or if it is another kind of file."""
    try:
        return parquet.read_metadata(Path(path).expanduser()).metadata or {}
    except (pyarrow.ArrowInvalid, OSError):
        return {}


def _open(file: Path) -> DataFile:
    if not file.exists():
        matches = difflib.get_close_matches(file.name, _sibling_names(file), n=1, cutoff=0.5)
        hint = f" Did you mean {file.parent / matches[0]}?" if matches else ""
        raise BatchError(f"the data file {file} does not exist.{hint}")
    if file.is_dir():
        names = ", ".join(_sibling_names(file / "any")[:5]) or "none"
        raise BatchError(f"{file} is a folder; use the data files in it (found: {names})")
    source = open_data_file(file)
    if source.num_rows == 0:
        raise BatchError(f"{file} has no rows; remove it from the data files")
    return source


def _sibling_names(file: Path) -> list[str]:
    names = [path.name for path in file.parent.iterdir()] if file.parent.is_dir() else []
    return select_data_files(names)


def _check_columns(source: DataFile, required: Sequence[str]) -> None:
    for name in required:
        if name not in source.columns:
            matches = difflib.get_close_matches(name, source.columns, n=1)
            hint = f" Did you mean '{matches[0]}'?" if matches else ""
            raise BatchError(f"{source.path} has no column '{name}'.{hint} Its columns: {', '.join(source.columns)}")
