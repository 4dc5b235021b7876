"""Open data files of any supported format: parquet, JSON lines, JSON, CSV, and Arrow files of the `datasets` library.

    source = open_data_file(Path("train.jsonl"))
    source.columns                                  # ["prompt", "ground_truth"]
    for rows in source.batches(["prompt"]): ...     # lists of rows, each a dict
    source.location(7)                              # "train.jsonl, line 8"

The content of a file determines its format, except for CSV, which is recognized by the suffix `.csv` or `.tsv`. Values
of CSV files are strings; empty cells are None. JSON and CSV files may be compressed with gzip. A column or a key that
occurs twice is an error, because readers disagree about which value counts.
"""

import csv
import gzip
import io
import json
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import ipc, parquet

from camshaft.errors import BatchError
from camshaft.progress import track

FORMATS = "parquet, JSON lines (.jsonl), JSON, CSV (.csv, .tsv) and Arrow"
"""Supported formats, for error messages."""

MAX_NESTING = 100
"""Maximum number of nested brackets in a row. Copying and comparing deeper values exceeds the recursion limit."""
MAX_EXPANSION, MIN_LIMIT = 100, 256 << 20
"""Maximum size of an unpacked gzip file, as a multiple of its size and, for small files, in bytes."""
_CHUNK = 16 << 20

Row = dict[str, Any]


class DataFile(ABC):
    """Rows and columns of a data file."""

    def __init__(self, path: Path, columns: Sequence[str], num_rows: int):
        self.path, self.columns, self.num_rows = path, list(columns), num_rows
        _reject_repeated(path, self.columns)

    @property
    def schema(self) -> pyarrow.Schema:
        """Names and types of the columns. Raise BatchError if a column has values of different types."""
        return self.table().schema

    @abstractmethod
    def batches(self, columns: Sequence[str]) -> Iterator[list[Row]]:
        """Yield the given columns of all rows as Python objects, in order."""

    @abstractmethod
    def table(self) -> pyarrow.Table:
        """Return all rows and columns."""

    @abstractmethod
    def count_missing(self, column: str) -> int:
        """Return the number of rows without a value in a column."""

    def location(self, index: int) -> str:
        """Return the file and the position of a row (counted from 0) in it, for error messages."""
        return f"{self.path}, row {index}"


class ParquetData(DataFile):
    """A parquet file, of which only the requested columns are read."""

    def __init__(self, path: Path):
        with parquet.ParquetFile(path) as source:
            self._schema = source.schema_arrow
            super().__init__(path, self._schema.names, source.metadata.num_rows)

    @property
    def schema(self) -> pyarrow.Schema:
        return self._schema

    def batches(self, columns: Sequence[str]) -> Iterator[list[Row]]:
        with parquet.ParquetFile(self.path) as source:
            for record_batch in source.iter_batches(columns=list(columns)):
                yield record_batch.to_pylist()

    def table(self) -> pyarrow.Table:
        with parquet.ParquetFile(self.path) as source:
            return source.read()

    def count_missing(self, column: str) -> int:
        with parquet.ParquetFile(self.path) as source:
            return sum(batch.column(0).null_count for batch in source.iter_batches(columns=[column]))


class ArrowData(DataFile):
    """An Arrow file, mapped into memory. `Dataset.save_to_disk` writes such files."""

    def __init__(self, path: Path, is_stream: bool):
        source = pyarrow.memory_map(str(path))
        self._table = (ipc.open_stream(source) if is_stream else ipc.open_file(source)).read_all()
        super().__init__(path, self._table.column_names, self._table.num_rows)

    def batches(self, columns: Sequence[str]) -> Iterator[list[Row]]:
        for record_batch in self._table.select(list(columns)).to_batches(max_chunksize=1 << 16):
            yield record_batch.to_pylist()

    def table(self) -> pyarrow.Table:
        return self._table

    def count_missing(self, column: str) -> int:
        return self._table.column(column).null_count


class TextData(DataFile):
    """Rows of a JSON, JSON lines or CSV file, which is read as a whole."""

    def __init__(self, path: Path, rows: list[Row], lines: list[int] | None):
        """`lines` are the line numbers of the rows; None numbers the rows instead."""
        self._rows, self._lines = rows, lines
        super().__init__(path, list(dict.fromkeys(name for row in rows for name in row)), len(rows))

    def batches(self, columns: Sequence[str]) -> Iterator[list[Row]]:
        yield [{name: row.get(name) for name in columns} for row in self._rows]

    def table(self) -> pyarrow.Table:
        return pyarrow.table({name: self._array(name) for name in self.columns})

    def _array(self, name: str) -> pyarrow.Array:
        try:
            return pyarrow.array([row.get(name) for row in self._rows])
        except (pyarrow.ArrowException, OverflowError) as error:
            raise BatchError(
                f"{self.path}: column '{name}' has values of different types ({error}); use the same type in all rows"
            ) from error

    def count_missing(self, column: str) -> int:
        return sum(row.get(column) is None for row in self._rows)

    def location(self, index: int) -> str:
        return super().location(index) if self._lines is None else f"{self.path}, line {self._lines[index]}"


def open_data_file(path: Path) -> DataFile:
    """Open a file. Raise BatchError if it is damaged or has another format."""
    try:
        with open(path, "rb") as file:
            start = file.read(4096)
        if start[:4] == b"PAR1":
            return ParquetData(path)
        if start[:6] == b"ARROW1" or start[:4] == b"\xff\xff\xff\xff":
            return ArrowData(path, is_stream=start[:6] != b"ARROW1")
        return _open_text(path, is_compressed=start[:2] == b"\x1f\x8b")
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, EOFError, zlib.error, csv.Error) as error:
        raise BatchError(f"{path} cannot be read: {error}. Supported formats are {FORMATS}") from error


def _open_text(path: Path, is_compressed: bool) -> TextData:
    content = _unpack(path) if is_compressed else path.read_bytes()
    text = content.decode("utf-8-sig")
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"][-1:]
    if suffixes in ([".csv"], [".tsv"]):
        return _parse_csv(path, text, "," if suffixes == [".csv"] else "\t")
    if text.lstrip().startswith("["):
        return _parse_json(path, text)
    return _parse_json_lines(path, text)


def _unpack(path: Path) -> bytes:
    """Unpack a gzip file. Raise BatchError if it is so much larger than the file that it must be a mistake."""
    limit = max(MIN_LIMIT, MAX_EXPANSION * path.stat().st_size)
    content, size = io.BytesIO(), 0
    with gzip.open(path) as file:
        while size <= limit and (chunk := file.read(_CHUNK)):  # one read would reserve memory for the limit
            size += content.write(chunk)
    if size > limit:
        raise BatchError(
            f"{path} unpacks to more than {limit >> 20} MiB, {limit // path.stat().st_size} times its size; unpack it "
            "and check its content"
        )
    return content.getvalue()


def _reject_repeated(path: Path, columns: Sequence[str]) -> None:
    if len(set(columns)) < len(columns):
        repeated = next(name for name in columns if columns.count(name) > 1)
        raise BatchError(f"{path}: two columns have the name {repeated!r}; rename one of them")


def _parse_json(path: Path, text: str) -> TextData:
    try:
        rows = _DECODER.decode(text)
    except (_RepeatedKey, RecursionError) as error:
        raise _row_error(error, f"{path}, row {_failing_row(text)}") from error
    except ValueError as error:
        raise BatchError(f"{path}: invalid JSON ({error}); check that the file is complete") from error
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise BatchError(f"{path}, row {index}: the row is a {type(row).__name__}; each row must be an object")
        _check_values(row, f"{path}, row {index}")
    return TextData(path, rows, None)


def _parse_json_lines(path: Path, text: str) -> TextData:
    rows: list[Row] = []
    lines: list[int] = []
    texts = text.split("\n")
    for number, line in enumerate(track(texts, len(texts), f"lines of {path}"), start=1):
        if line.strip():
            lines.append(number)
            rows.append(_parse_line(path, number, line))
    return TextData(path, rows, lines)


def _parse_line(path: Path, number: int, line: str) -> Row:
    try:
        row = _DECODER.decode(line)
    except (_RepeatedKey, RecursionError) as error:
        raise _row_error(error, f"{path}, line {number}") from error
    except ValueError as error:
        fix = "check that the file is complete" if line[:1] == "{" else f"supported formats are {FORMATS}"
        raise BatchError(f"{path}, line {number}: invalid JSON ({error}); {fix}") from error
    if line.count("[") + line.count("{") > MAX_NESTING or ("\\u" in line and _SURROGATE.search(line)):
        _check_values(row, f"{path}, line {number}")
    if not isinstance(row, dict):
        raise BatchError(f"{path}, line {number}: the row is a {type(row).__name__}; each line must be an object")
    return row


class _RepeatedKey(ValueError):
    """A JSON object contains a key twice."""


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise _RepeatedKey(f"the key {repeated!r} occurs twice in an object")
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
_BETWEEN = re.compile(r"[\s,]+")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of a character outside of the basic plane. Only escape sequences can contain one without the other half."""


def _row_error(error: Exception, location: str) -> BatchError:
    """Return the error for a row that is valid JSON, but has a key twice or too many nested brackets."""
    if isinstance(error, RecursionError):
        return BatchError(f"{location}: more than {MAX_NESTING} brackets are nested; store the value as a string")
    return BatchError(f"{location}: {error}; keep one of them")


def _failing_row(text: str) -> int:
    """Return the index of the first row of a JSON array for which decoding raises an error."""
    index, position = 0, text.index("[") + 1
    while True:
        try:
            between = _BETWEEN.match(text, position)
            _, position = _DECODER.raw_decode(text, between.end() if between else position)
        except (ValueError, RecursionError):
            return index
        index += 1


def _check_values(row: Any, location: str) -> None:
    """Raise BatchError if a row has values that cannot be copied or encoded."""
    if _nesting(row) > MAX_NESTING:
        raise _row_error(RecursionError(), location)
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise BatchError(
            f"{location}: the text contains {half}, which is half of a character; write the row again"
        ) from error


def _nesting(value: Any) -> int:
    """Return the depth of nested lists and objects, but at most `MAX_NESTING + 1`."""
    depth, level = 0, [value] if isinstance(value, (dict, list)) else []
    while level and depth <= MAX_NESTING:
        depth += 1
        items = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
        level = [item for item in items if isinstance(item, (dict, list))]
    return depth


def _parse_csv(path: Path, text: str, delimiter: str) -> TextData:
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header = next(reader, [])
    _reject_repeated(path, [name for name in header if name])
    rows: list[Row] = []
    lines: list[int] = []
    first_line = reader.line_num + 1
    for cells in reader:
        if cells:
            if len(cells) != len(header):
                raise BatchError(
                    f"{path}, line {first_line}: the row has {len(cells)} cells, but the header has {len(header)}; "
                    "quote cells that contain the delimiter or line breaks"
                )
            rows.append({name: cell or None for name, cell in zip(header, cells, strict=True)})
            lines.append(first_line)
        first_line = reader.line_num + 1
    return TextData(path, rows, lines)
