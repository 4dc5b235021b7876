"""Read data sets in the files that their authors publish; used by `examples/data`.

    splits = read_splits("downloads/gsm8k", ["question", "answer"])       # {"train": [...], "test": [...]}
    rows = splits["test"]                                                 # dicts; row 7 is rows[7]

A split consists of all files below the folder with its name: `train.jsonl`, `data/train-00000-of-00001.parquet`,
`helpful-base/train.jsonl.gz`. Nothing is downloaded.
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
    """Read the rows of each existing split; raise BatchError if the folder has no split."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise BatchError(f"no folder {folder}; name the folder with the raw files")
    files = {split: _files(folder, split) for split in SPLITS}
    if not any(files.values()):
        names = ", ".join(sorted(path.name for path in folder.rglob("*") if path.is_file())[:5]) or "nothing"
        raise BatchError(
            f"{folder} has no files named train or test, such as train.jsonl, train.jsonl.gz, test.parquet or "
            f"test-00000-of-00001.parquet (found: {names})"
        )
    read = {split: [row for path in paths for row in _rows(path, required, optional)] for split, paths in files.items()}
    return {split: rows for split, rows in read.items() if rows}


def _files(folder: Path, split: str) -> list[Path]:
    return [path for path in sorted(folder.rglob(f"{split}*")) if re.fullmatch(split + _ENDING, path.name)]


def _rows(path: Path, required: Sequence[str], optional: Sequence[str]) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        columns = read_columns(path)
        yield from read_parquet(path, required, [name for name in optional if name in columns]).rows
        return
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _parse_row(line, f"{path}, line {number}", required)


def _parse_row(line: str, place: str, required: Sequence[str]) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BatchError(f"{place}: invalid JSON ({error}); check that the file is complete") from error
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in required):
        fields = ", ".join(row) if isinstance(row, dict) else f"a {type(row).__name__}"
        raise BatchError(f"{place}: a row must have the strings {', '.join(required)}; this one has {fields}")
    return row
