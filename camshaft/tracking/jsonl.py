"""Metrics as a file, one JSON object per step: `<folder>/metrics.jsonl`.

    {"step": 1, "critic/score/mean": 0.5, "actor/grad_norm": "nan"}

Floats are written so that reading gives the same bits back; those that are not finite, for which JSON has no
number, are the texts "nan", "inf" and "-inf" (`float` reads them). A run that resumes drops the lines after
the step it resumes from, so that each step is there once; a run from the start puts an older file aside.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from camshaft.tracking.base import RunInfo, Tracker, put_aside

FILE_NAME = "metrics.jsonl"


class JsonlTracker(Tracker):
    """Appends a line per step at once, so that a killed run has lost nothing; what a full disk did not take follows."""

    at_once = True

    def __init__(self, run: RunInfo):
        self.path = run.place(FILE_NAME)
        if self.path.exists():
            if run.resumed_step is None:
                put_aside(self.path)
            else:
                _drop_after(self.path, run.resumed_step)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  (closed by finish)
        self._unwritten = b""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        line = {"step": step} | {name: _as_json(value) for name, value in metrics.items()}
        self._unwritten += (json.dumps(line, allow_nan=False) + "\n").encode()
        self._write()

    def finish(self) -> None:
        with self._file:
            self._write()

    def _write(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """The lines of a metrics file, with all values as numbers again. A last line that was cut off is left out."""
    return [
        {name: float(value) if isinstance(value, str) else value for name, value in line.items()}
        for line in _lines(Path(path))
    ]


def _as_json(value: Any) -> Any:
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    for line in text[: text.rfind("\n") + 1].splitlines():
        yield json.loads(line)


def _drop_after(path: Path, step: int) -> None:
    kept = [line for line in _lines(path) if line["step"] <= step]
    beside = path.with_suffix(".tmp")
    beside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    os.replace(beside, path)
