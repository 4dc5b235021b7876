"""Read the folder of a run: its description, status, metrics and responses. Nothing in the folder is changed.

    run = RunFolder("checkpoints/demo/tiny")
    run.state()                                 # "running", "finished", "failed", "stopped", "killed" or "unknown"
    run.metrics.poll()                          # read the lines that the run has written since the last call
    run.metrics.series("critic/score/mean")     # (steps, values)
    run.sample_steps()                          # steps whose responses are stored
    run.samples(12)                             # the responses of step 12 as a pyarrow table

    for run in find_runs("checkpoints"): ...

docs/run-folder.md describes every file. The module reads runs that are still in progress, and runs of earlier versions,
which lack some of the files. It does not import torch, and it imports pyarrow only to read responses.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from camshaft.errors import CamshaftError

if TYPE_CHECKING:
    import pyarrow

INFO, STATUS, CONFIG, LOG = "run.json", "status.json", "config.yaml", "log.txt"
METRICS, SAMPLES, VALIDATION = "metrics.jsonl", "samples", "validation"
TIME = "timing/at"
"""Metric with the time at which the line of a step was written, in Unix seconds."""

State = Literal["running", "finished", "failed", "stopped", "killed", "unknown"]
"""State of a run. `killed` means that its process is gone without an ending; `unknown` that no file describes it."""

_STEP_FILE = re.compile(r"^step_(\d+)\.(parquet|jsonl)$")


class RunFolderError(CamshaftError):
    """A run folder, or a file in it, does not exist or cannot be read."""


class Status(NamedTuple):
    """Step and phase of a run: the content of `status.json`."""

    step: int
    phase: str
    since: float
    """Unix time at which the phase began."""
    at: float
    """Unix time at which the run wrote the file, at least every `tracking.status.BEAT_SECONDS` seconds."""
    pid: int
    host: str


class Metrics:
    """The metrics of a run as one column per name, read incrementally from `metrics.jsonl`."""

    def __init__(self, path: Path):
        self.path = path
        self._clear()

    def _clear(self) -> None:
        self.steps: list[int] = []
        self._columns: dict[str, array[float]] = {}
        self._offset, self._inode, self._head = 0, -1, b""

    def poll(self) -> bool:
        """Read the complete lines that were appended since the last call. Return True if there were any changes.

        A file that was replaced, as by a run that resumes, is read again from its start.
        """
        try:
            with open(self.path, "rb") as file:
                facts = os.fstat(file.fileno())
                head = file.read(len(self._head))
                was_replaced = facts.st_ino != self._inode or facts.st_size < self._offset or head != self._head
                if was_replaced:
                    self._clear()
                    self._inode = facts.st_ino
                if facts.st_size == self._offset:
                    return was_replaced
                file.seek(self._offset)
                text = file.read(facts.st_size - self._offset)
        except FileNotFoundError:
            existed = bool(self.steps)
            self._clear()
            return existed
        text = text[: text.rfind(b"\n") + 1]
        if not self._offset:
            self._head = text[:64]
        self._offset += len(text)
        for line in text.splitlines():
            self._add(line)
        return bool(text) or was_replaced

    def _add(self, line: bytes) -> None:
        """Add a line, unless a crash of the machine has damaged it."""
        try:
            values = json.loads(line)
            step = values.pop("step")
        except (ValueError, KeyError, AttributeError, TypeError):
            return
        if not isinstance(step, int):
            return
        for name, value in values.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = array("d")
            column.extend([math.nan] * (len(self.steps) - len(column)))
            with contextlib.suppress(TypeError, ValueError):
                column.append(float(value))
        self.steps.append(step)

    @property
    def names(self) -> list[str]:
        """Names of all metrics, in the order in which the run logged them first."""
        return list(self._columns)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps at which a metric was logged, and its values. Both are empty for an unknown name."""
        column = self._columns.get(name, array("d"))
        pairs = [(step, value) for step, value in zip(self.steps, column, strict=False) if not math.isnan(value)]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def column(self, name: str) -> array[float]:
        """Return one value per entry of `steps`. Values are nan where the metric was not logged."""
        column = self._columns.get(name, array("d"))
        column.extend([math.nan] * (len(self.steps) - len(column)))
        return column

    def last(self, name: str) -> float | None:
        """Return the last value of a metric, or None if it was never logged."""
        values = self.series(name)[1]
        return values[-1] if values else None

    def at(self, step: int) -> dict[str, float]:
        """Return all metrics of a step, or nothing if the step was not logged."""
        if step not in self.steps:
            return {}
        row = self.steps.index(step)
        columns = {name: column[row] for name, column in self._columns.items() if row < len(column)}
        return {name: value for name, value in columns.items() if not math.isnan(value)}


class RunFolder:
    """The folder of a run (`trainer.default_local_dir`), which may still be in progress."""

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        if not self.path.is_dir():
            raise RunFolderError(f"{self.path} is not a folder; pass the folder of a run (trainer.default_local_dir)")
        self.metrics = Metrics(self.path / METRICS)

    @property
    def name(self) -> str:
        """Name of the run, which is the name of its folder unless `run.json` contains another one."""
        return str(self.info().get("experiment") or self.path.resolve().name)

    def info(self) -> dict[str, Any]:
        """Return the content of `run.json`, or nothing if there is none."""
        return _read_json(self.path / INFO)

    def config(self) -> dict[str, Any]:
        """Return the config of the run, without secrets, as a dict of dotted keys."""
        config = self.info().get("config")
        return config if isinstance(config, dict) else {}

    def status(self) -> Status | None:
        """Return the step and the phase of the run, or None without a readable `status.json`."""
        values = _read_json(self.path / STATUS)
        try:
            return Status(**{name: values[name] for name in Status._fields})
        except KeyError:
            return None

    def state(self) -> State:
        """Return the state of the run. A run on another machine counts as killed if its status is a minute old."""
        info, status = self.info(), self.status()
        if info.get("status") in ("finished", "failed", "stopped"):
            return info["status"]
        if not info.get("pid"):
            return "unknown"
        if info.get("host") == socket.gethostname():
            return "running" if process_start(info["pid"]) == info.get("pid_start") else "killed"
        if status is None:
            return "unknown"
        return "running" if time.time() - status.at < 60 else "killed"

    def sample_steps(self) -> list[int]:
        """Return the steps whose responses are stored, in ascending order."""
        return sorted(_step_files(self.path / SAMPLES))

    def samples(self, step: int, columns: list[str] | None = None) -> pyarrow.Table:
        """Return the responses of a step, one row per response. docs/run-folder.md lists the columns.

        `columns` selects columns; those that the file does not have are left out.
        """
        files = _step_files(self.path / SAMPLES)
        if step not in files:
            stored = ", ".join(str(number) for number in sorted(files)[-10:]) or "none"
            raise RunFolderError(f"{self.path} has no responses of step {step}; the last stored steps are: {stored}")
        import pyarrow
        from pyarrow import parquet

        try:
            file = parquet.ParquetFile(files[step])
            names = None if columns is None else [name for name in columns if name in file.schema_arrow.names]
            return file.read(names)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise RunFolderError(f"{files[step]} cannot be read: {error}") from error

    def validation_steps(self) -> list[int]:
        """Return the steps whose validation responses are stored, in ascending order."""
        return sorted(_step_files(self.path / VALIDATION))

    def validation(self, step: int) -> list[dict[str, Any]]:
        """Return the validation responses of a step: prompt, response, ground truth and score of each."""
        files = _step_files(self.path / VALIDATION)
        if step not in files:
            raise RunFolderError(f"{self.path} has no validation responses of step {step}")
        rows = (_parse_json(line) for line in files[step].read_text(encoding="utf-8").splitlines())
        return [row for row in rows if row]


def find_runs(*folders: str | Path) -> list[RunFolder]:
    """Return the runs in these folders and below them, in the order of their paths. Checkpoints are not searched."""
    found: dict[Path, RunFolder] = {}
    for folder in folders:
        root = Path(folder).expanduser()
        if not root.is_dir():
            raise RunFolderError(f"{root} is not a folder; name the folder of a run, or a folder that contains runs")
        for parent, names, files in os.walk(root):
            names[:] = sorted(name for name in names if not name.startswith((".", "global_step_")))
            if {INFO, METRICS} & set(files):
                names[:] = [name for name in names if name not in (SAMPLES, "logs", "rewards")]
                found.setdefault(Path(parent).resolve(), RunFolder(parent))
    return list(found.values())


def process_start(pid: int) -> str | None:
    """Return a string that identifies a process together with its PID, or None if there is no such process.

    It is the start time of the process on systems with `/proc`, and an empty string elsewhere.
    """
    with contextlib.suppress(OSError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if stat[0] in ("Z", "X") else stat[19]
    if Path("/proc/self/stat").exists():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return ""
    return ""


def _step_files(folder: Path) -> dict[int, Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return {int(match[1]): path for path in folder.iterdir() if (match := _STEP_FILE.match(path.name))}
    return {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return _parse_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return {}


def _parse_json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
