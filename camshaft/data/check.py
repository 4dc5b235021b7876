"""Statistics of data files: columns, prompt lengths and duplicates.

    summarize_files([Path("train.parquet")], ["prompt"])      # columns with types and missing values
    summarize_lengths(prompts.ids.lengths)                    # percentiles and a histogram
    count_shared(val.ids, train.ids)                          # validation prompts that are also training prompts

`trainer/check_data.py` prints these statistics. `prompts`, `val` and `train` are results of `read_prompts`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from camshaft.data.tables import convert_read_errors, open_files
from camshaft.dataproto import Ragged

_MAX_BARS = 12
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class ColumnSummary:
    name: str
    type: str
    missing: int | None
    """Number of rows without a value; None if it was not counted."""


@dataclass(frozen=True)
class FileSummary:
    path: Path
    num_rows: int
    columns: tuple[ColumnSummary, ...]


@dataclass(frozen=True)
class LengthSummary:
    percentiles: dict[int, int]
    """Percentile p -> smallest length L such that at least p percent of the rows have at most L tokens."""
    max_length: int
    bars: tuple[tuple[int, int, int], ...]
    """Histogram bars as (minimum length, maximum length, number of rows)."""


def summarize_files(paths: Sequence[Path], counted_columns: Collection[str] | None) -> list[FileSummary]:
    """Summarize the rows and columns of each file; count missing values in `counted_columns`, or in all if None."""
    files = []
    for path, source in zip(paths, open_files(paths), strict=True):
        with convert_read_errors(path):
            columns = []
            for field in source.schema:
                is_counted = counted_columns is None or field.name in counted_columns
                missing = source.count_missing(field.name) if is_counted else None
                columns.append(ColumnSummary(field.name, str(field.type), missing))
            files.append(FileSummary(path, source.num_rows, tuple(columns)))
    return files


def summarize_lengths(lengths: Tensor) -> LengthSummary:
    """Summarize the distribution of `lengths`, a non-empty tensor (B,)."""
    sorted_lengths = lengths.sort().values
    count, min_length, max_length = len(sorted_lengths), int(sorted_lengths[0]), int(sorted_lengths[-1])
    percentiles = {p: int(sorted_lengths[-(-p * count // 100) - 1]) for p in PERCENTILES}
    width = -(-(max_length - min_length + 1) // _MAX_BARS)
    counts = torch.bincount((lengths - min_length) // width).tolist()
    bars = tuple((min_length + i * width, min_length + (i + 1) * width - 1, n) for i, n in enumerate(counts))
    return LengthSummary(percentiles, max_length, bars)


def count_shared(rows: Ragged, other_rows: Ragged) -> int:
    """Count the rows that have the same tokens as a row of `other_rows`."""
    keys = set(_keys(other_rows))
    return sum(key in keys for key in _keys(rows))


def count_repeated(rows: Ragged) -> int:
    """Count the rows that have the same tokens as an earlier row."""
    return len(rows) - len(set(_keys(rows)))


def _keys(rows: Ragged) -> list[bytes]:
    return [row.numpy().tobytes() for row in rows.rows()]
