"""JSON lines tracker: one object per step in `<folder>/metrics.jsonl`.

    {"step": 1, "critic/score/mean": 0.5, "actor/grad_norm": "nan"}

Floats round-trip bitwise. Non-finite values, which JSON numbers cannot represent, are the strings "nan", "inf" and
"-inf". A resumed run drops the lines after its checkpoint's step, so that each step occurs once. A new run renames an
existing file.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from camshaft.tracking.base import RunInfo, Tracker, back_up

FILE_NAME = "metrics.jsonl"


class JsonlTracker(Tracker):
    """Append a line per step without buffering; lines that failed on a full disk are written with the next step."""

    at_once = True

    def __init__(self, run: RunInfo):
        self.path = run.place(FILE_NAME)
        if self.path.exists():
            if run.resumed_step is None:
                back_up(self.path)
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
    """Read a metrics file with all values as numbers; an incomplete last line is ignored."""
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
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    os.replace(temporary, path)
