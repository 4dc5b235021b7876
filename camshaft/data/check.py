"""Statistics of data files: columns, prompt lengths and duplicates.

    file_facts([Path("train.parquet")], ["prompt"])       # columns with types and missing values
    length_facts(prompts.ids.lengths)                     # percentiles and a histogram
    num_shared(val.ids, train.ids)                        # validation prompts that are also training prompts

`trainer/check_data.py` prints them. `prompts` is the result of `read_prompts`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pyarrow.parquet import ParquetFile
from torch import Tensor

from camshaft.data.parquet import open_all, reading
from camshaft.dataproto import Ragged

_BARS = 12
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class ColumnFacts:
    """Name, type and missing values of a column."""

    name: str
    type: str
    missing: int | None
    """Rows without a value; None if the column is not read and was not counted."""


@dataclass(frozen=True)
class FileFacts:
    """Rows and columns of a file."""

    path: Path
    num_rows: int
    columns: tuple[ColumnFacts, ...]


@dataclass(frozen=True)
class LengthFacts:
    """Distribution of row lengths."""

    percentiles: dict[int, int]
    """Percentile -> the smallest length that this percentage of the rows does not exceed."""
    longest: int
    bars: tuple[tuple[int, int, int], ...]
    """Histogram bars: first length, last length, number of rows."""


def file_facts(paths: Sequence[Path], read: Collection[str]) -> list[FileFacts]:
    """Return the schema of each file, with missing values counted in the columns of `read`."""
    files = []
    for path, source in zip(paths, open_all(paths), strict=True):
        with source, reading(path):
            columns = tuple(
                ColumnFacts(field.name, str(field.type), _missing(source, field.name) if field.name in read else None)
                for field in source.schema_arrow
            )
            files.append(FileFacts(path, source.metadata.num_rows, columns))
    return files


def _missing(source: ParquetFile, name: str) -> int:
    return sum(part.column(0).null_count for part in source.iter_batches(columns=[name]))


def length_facts(lengths: Tensor) -> LengthFacts:
    """Summarize `lengths` (B,), B >= 1."""
    ordered = lengths.sort().values
    count, shortest, longest = len(ordered), int(ordered[0]), int(ordered[-1])
    percentiles = {p: int(ordered[-(-p * count // 100) - 1]) for p in PERCENTILES}
    width = -(-(longest - shortest + 1) // _BARS)
    numbers = torch.bincount((lengths - shortest) // width).tolist()
    bars = tuple((shortest + i * width, shortest + (i + 1) * width - 1, number) for i, number in enumerate(numbers))
    return LengthFacts(percentiles, longest, bars)


def num_shared(rows: Ragged, others: Ragged) -> int:
    """Count the rows whose tokens match those of a row in `others`."""
    keys = set(_keys(others))
    return sum(key in keys for key in _keys(rows))


def num_repeated(rows: Ragged) -> int:
    """Count the rows whose tokens match those of an earlier row."""
    return len(rows) - len(set(_keys(rows)))


def _keys(rows: Ragged) -> list[bytes]:
    return [row.numpy().tobytes() for row in rows.rows()]
