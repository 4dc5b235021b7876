"""Read data sets in the files that their authors publish, for the scripts in `examples/data`.

    splits = read_splits("downloads/gsm8k", ["question", "answer"])       # {"train": [...], "test": [...]}
    rows = splits["test"]                                                 # one dict per row

A split consists of all files in the folder and its subfolders that are named after it, such as `train.jsonl`,
`data/train-00000-of-00001.parquet` or `helpful-base/train.jsonl.gz`. This module never downloads files.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from camshaft.data.tables import read_rows
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
    rows = {split: [row for path in paths for row in _rows(path, required, optional)] for split, paths in files.items()}
    return {split: rows_of_split for split, rows_of_split in rows.items() if rows_of_split}


def _files(folder: Path, split: str) -> list[Path]:
    return [path for path in sorted(folder.rglob(f"{split}*")) if re.fullmatch(split + _ENDING, path.name)]


def _rows(path: Path, required: Sequence[str], optional: Sequence[str]) -> Iterator[dict[str, Any]]:
    table = read_rows(path, required, optional)
    for index, row in enumerate(table.rows):
        invalid = [name for name in required if not isinstance(row[name], str)]
        if invalid:
            raise BatchError(f"{table.location(index)}: '{invalid[0]}' is {row[invalid[0]]!r}; it must be a string")
        yield row
