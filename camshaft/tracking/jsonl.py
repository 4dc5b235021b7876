"""JSON lines tracker: writes one object per step to `<folder>/metrics.jsonl`.

    {"step": 1, "timing/at": 1770000000.0, "critic/score/mean": 0.5, "actor/grad_norm": "nan"}

`timing/at` is the time of the line in Unix seconds.
Finite floats can be read back bitwise. Non-finite values are written as the strings "nan", "inf" and "-inf", because
JSON numbers cannot represent them. A resumed run deletes the lines after the step of its checkpoint, so that each step
occurs once, moves damaged lines to `metrics.jsonl.damaged`, and names the steps whose lines have been lost. A new run
renames an existing file.
"""

import json
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from camshaft import storage
from camshaft.storage import rename_existing
from camshaft.tracking.base import RunInfo, Tracker
from camshaft.tracking.durable import format_steps, missing_steps
from camshaft.tracking.run_folder import METRICS as FILE_NAME
from camshaft.tracking.run_folder import TIME

DAMAGED = ".damaged"
"""Suffix of the file to which damaged lines are moved when a run resumes."""

logger = logging.getLogger(__name__)


class JsonlTracker(Tracker):
    """Append one line per step without buffering. A line that cannot be written is written with the next step."""

    synchronous = True

    def __init__(self, run: RunInfo):
        self.path = run.path(FILE_NAME)
        if run.resumed_step is not None:
            steps = _drop_lines_after(self.path, run.resumed_step) if self.path.exists() else []
            lost = missing_steps(run.recorded_steps, steps, run.resumed_step)
            if lost:
                message = "%s lacks the metrics of steps %s, which it contained when step %d was saved"
                logger.warning(message, self.path, format_steps(lost), run.resumed_step)
        elif self.path.exists():
            rename_existing(self.path)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  (closed by finish)
        self._unwritten = b""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        line = {"step": step, TIME: time.time()} | {name: _as_json(value) for name, value in metrics.items()}
        self._unwritten += (json.dumps(line, allow_nan=False) + "\n").encode()
        self._write()

    def finish(self) -> None:
        with self._file:
            self._write()

    def _write(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Read a metrics file and convert all values to numbers. An incomplete last line is ignored."""
    text = Path(path).read_text(encoding="utf-8")
    return [
        {name: float(value) if isinstance(value, str) else value for name, value in json.loads(line).items()}
        for line in text[: text.rfind("\n") + 1].splitlines()
    ]


def _as_json(value: Any) -> Any:
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _drop_lines_after(path: Path, step: int) -> list[int]:
    """Delete the lines after a step, and return the steps of the others.

    Lines that a crash of the machine has damaged are moved to another file.
    """
    lines = [(line, _step_of(line)) for line in path.read_bytes().split(b"\n")[:-1]]
    damaged = [line for line, number in lines if number is None]
    if damaged:
        other = path.with_name(path.name + DAMAGED)
        with open(other, "ab") as file:
            file.writelines(line + b"\n" for line in damaged)
        storage.flush(other)
        logger.warning("moved damaged lines of %s to %s: %d", path, other, len(damaged))
    kept = {number: line for line, number in lines if number is not None and number <= step}
    with storage.new_file(path) as work:
        work.write_bytes(b"".join(line + b"\n" for line in kept.values()))
    return list(kept)


def _step_of(line: bytes) -> int | None:
    """Return the step of a line, or None if the line is damaged."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None
