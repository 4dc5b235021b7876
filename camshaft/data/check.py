"""Facts about data files that a person wants to know before a run: what is in them, how long, how often.

    file_facts([Path("train.parquet")], ["prompt"])       # columns with their types, rows without a value
    length_facts(read.ids.lengths)                  # percentiles and a histogram
    num_shared(val.ids, train.ids)                  # prompts of the one that are in the other

Numbers only: `trainer/check_data.py` puts them into words. `read` is what `read_prompts` gives.
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
    """One column of a file."""

    name: str
    type: str
    missing: int | None
    """Rows without a value; None: nobody reads the column, and it was not counted."""


@dataclass(frozen=True)
class FileFacts:
    """One file."""

    path: Path
    num_rows: int
    columns: tuple[ColumnFacts, ...]


@dataclass(frozen=True)
class LengthFacts:
    """How the lengths of some rows are spread."""

    percentiles: dict[int, int]
    """The shortest length that so many percent of the rows do not exceed."""
    longest: int
    bars: tuple[tuple[int, int, int], ...]
    """First length, last length, how many rows."""


def file_facts(paths: Sequence[Path], read: Collection[str]) -> list[FileFacts]:
    """Schema of each file, and how often the columns that are `read` have no value."""
    found = []
    for path, source in zip(paths, open_all(paths), strict=True):
        with source, reading(path):
            columns = tuple(
                ColumnFacts(field.name, str(field.type), _missing(source, field.name) if field.name in read else None)
                for field in source.schema_arrow
            )
            found.append(FileFacts(path, source.metadata.num_rows, columns))
    return found


def _missing(source: ParquetFile, name: str) -> int:
    return sum(part.column(0).null_count for part in source.iter_batches(columns=[name]))


def length_facts(lengths: Tensor) -> LengthFacts:
    """`lengths` (B,) of at least one row."""
    ordered = lengths.sort().values
    count, shortest, longest = len(ordered), int(ordered[0]), int(ordered[-1])
    percentiles = {p: int(ordered[-(-p * count // 100) - 1]) for p in PERCENTILES}
    width = -(-(longest - shortest + 1) // _BARS)
    numbers = torch.bincount((lengths - shortest) // width).tolist()
    bars = tuple((shortest + i * width, shortest + (i + 1) * width - 1, number) for i, number in enumerate(numbers))
    return LengthFacts(percentiles, longest, bars)


def num_shared(rows: Ragged, others: Ragged) -> int:
    """How many of `rows` are among `others` too, token for token."""
    known = set(_keys(others))
    return sum(key in known for key in _keys(rows))


def num_repeated(rows: Ragged) -> int:
    """How many rows are there a second time, or a third."""
    return len(rows) - len(set(_keys(rows)))


def _keys(rows: Ragged) -> list[bytes]:
    return [row.numpy().tobytes() for row in rows.rows()]
