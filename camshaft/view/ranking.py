"""Responses of all steps of a run, ranked by score, by gap or by length.

    ranking = Ranking(run)
    ranking.rows("worst")[0]["response"]

An index holds three numbers of each response. Files of steps are read once, and again only if they have changed.
"""

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from camshaft.tracking.run_folder import TOKEN_COLUMNS, RunFolder, RunFolderError, read_samples
from camshaft.view.data import response

ORDERS = {"worst": ("score", 1), "best": ("score", -1), "gap": ("gap", -1), "long": ("response_tokens", -1)}
"""Name of an order -> column, and 1 if small values come first."""
COLUMNS = ("score", "gap", "response_tokens")
COUNT = 50
"""Number of responses of a ranking."""

Version = tuple[int, int, int]


class _File(NamedTuple):
    """The file of a step."""

    path: Path
    version: Version
    """Inode, size and time of the last change."""
    numbers: NDArray[np.float32]
    """`COLUMNS` of each response, (3, number of responses)."""


class Ranking:
    """Index of the responses of a run."""

    def __init__(self, run: RunFolder):
        self._run = run
        self._files: dict[int, _File] = {}
        self._rows: dict[tuple[int, int, Version], dict[str, Any]] = {}
        """Responses of earlier answers."""

    def rows(self, order: str, count: int = COUNT) -> list[dict[str, Any]]:
        """Return the first responses of an order, each with its step. Of equal ones, the newest come first."""
        self._update()
        if not self._files:
            return []
        column, sign = ORDERS[order]
        steps = sorted(self._files)
        numbers = [self._files[step].numbers[COLUMNS.index(column)] for step in steps]
        ends = np.cumsum([len(each) for each in numbers])
        places = []
        for index in first_indices(sign * np.concatenate(numbers), count).tolist():
            file = int(np.searchsorted(ends, index, side="right"))
            places.append((steps[file], index - int(ends[file]) + len(numbers[file])))
        return self._responses(places)

    def _update(self) -> None:
        """Read the files that have appeared or changed."""
        files: dict[int, _File] = {}
        for step, path in self._run.sample_files().items():
            try:
                facts = path.stat()
                version = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
                known = self._files.get(step)
                files[step] = known if known and known.version == version else _File(path, version, _numbers(path))
            except (FileNotFoundError, RunFolderError):
                continue  # deleted by the run, or damaged
        self._files = files

    def _responses(self, places: list[tuple[int, int]]) -> list[dict[str, Any]]:
        """Return the responses in some rows of some steps. Values per token are left out."""
        keys = [(step, row, self._files[step].version) for step, row in places]
        missing: dict[int, list[int]] = {}
        for key in keys:
            if key not in self._rows:
                missing.setdefault(key[0], []).append(key[1])
        for step, rows in missing.items():
            file = self._files[step]
            with contextlib.suppress(RunFolderError):  # deleted by the run in this moment
                table = read_samples(file.path, without=(*TOKEN_COLUMNS, "token_ends")).take(rows)
                for row, values in zip(rows, table.to_pylist(), strict=True):
                    self._rows[step, row, file.version] = {"step": step} | response(values)
        shown = {key: self._rows[key] for key in keys if key in self._rows}
        if len(self._rows) > 10 * COUNT:
            self._rows = shown
        return list(shown.values())


def _numbers(path: Path) -> NDArray[np.float32]:
    table = read_samples(path, list(COLUMNS))
    empty = np.full(table.num_rows, np.nan)
    columns = [table[name].to_numpy() if name in table.column_names else empty for name in COLUMNS]
    return np.stack(columns).astype(np.float32)


def first_indices(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return the indices of the smallest values in ascending order. Of equal values, the last come first."""
    values = np.where(np.isnan(values), np.inf, values)
    if len(values) > count:
        limit = np.partition(values, count - 1)[count - 1]
        below = np.flatnonzero(values < limit)
        chosen = np.concatenate([below, np.flatnonzero(values == limit)[len(below) - count :]])
    else:
        chosen = np.arange(len(values))
    chosen = chosen[np.isfinite(values[chosen])]
    return chosen[np.lexsort((-chosen, values[chosen]))]
