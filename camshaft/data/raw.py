"""Read data sets in the files that their authors publish, for the scripts in `examples/data`.

    splits = read_splits("downloads/gsm8k", ["question", "answer"])       # {"train": [...], "test": [...]}
    rows = splits["test"]                                                 # one dict per row

A split consists of all files in the folder and its subfolders that are named after it, such as `train.jsonl`,
`data/train-00000-of-00001.parquet` or `helpful-base/train.jsonl.gz`. This module never downloads files.
"""

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from camshaft.data.parquet import read_columns, read_parquet
from camshaft.errors import BatchError

SPLITS = ("train", "test")
_ENDING = r"(-\d+-of-\d+)?\.(parquet|jsonl|jsonl\.gz)"


def read_splits(folder: str | Path, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Read the rows of each split that the folder contains. Raise BatchError if it contains none."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise BatchError(f"the folder {folder} does not exist; use the folder that contains the raw files")
    files = {split: _files(folder, split) for split in SPLITS}
    if not any(files.values()):
        names = ", ".join(sorted(path.name for path in folder.rglob("*") if path.is_file())[:5]) or "nothing"
        raise BatchError(
            f"{folder} contains no files of a split, such as train.jsonl, train.jsonl.gz, test.parquet or "
            f"test-00000-of-00001.parquet (found: {names})"
        )
    rows_by_split = {
        split: [row for path in paths for row in _rows(path, required, optional)] for split, paths in files.items()
    }
    return {split: rows for split, rows in rows_by_split.items() if rows}


def _files(folder: Path, split: str) -> list[Path]:
    return [path for path in sorted(folder.rglob(f"{split}*")) if re.fullmatch(split + _ENDING, path.name)]


def _rows(path: Path, required: Sequence[str], optional: Sequence[str]) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        columns = read_columns(path)
        yield from read_parquet(path, required, [name for name in optional if name in columns]).rows
        return
    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _parse_row(line, f"{path}, line {number}", required)


def _parse_row(line: str, location: str, required: Sequence[str]) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BatchError(f"{location}: invalid JSON ({error}); check that the file is complete") from error
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in required):
        fields = ", ".join(row) if isinstance(row, dict) else f"a {type(row).__name__}"
        raise BatchError(
            f"{location}: the row contains {fields}; it must contain the string fields {', '.join(required)}"
        )
    return row
