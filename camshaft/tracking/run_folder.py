"""Read the folder of a run: its description, status, metrics and responses. Nothing in the folder is changed.

    run = RunFolder("checkpoints/demo/tiny")
    run.state()                                 # "running", "finished", "failed", "stopped", "killed" or "unknown"
    run.metrics.poll()                          # read the lines that the run has written since the last call
    run.metrics.series("critic/score/mean")     # (steps, values)
    run.sample_steps()                          # steps whose responses are stored
    run.samples(12)                             # the responses of step 12 as a pyarrow table

    for run in find_runs("checkpoints"): ...

docs/run-folder.md describes every file. The module reads runs that are still in progress, and runs of earlier versions,
which lack some of the files. It does not import torch, and it imports numpy and pyarrow only when they are needed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import stat
import time
from array import array
from collections.abc import Collection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

from camshaft.errors import CamshaftError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow
    from numpy.typing import NDArray

INFO, STATUS, CONFIG, LOG = "run.json", "status.json", "config.yaml", "log.txt"
RESTARTS = "restarts"
"""Key in `run.json` of the restarts of a run: time, cause, pause, and the step that was saved last."""
METRICS, SAMPLES, VALIDATION, REWARDS = "metrics.jsonl", "samples", "validation", "rewards"
TIME = "timing/at"
"""Metric with the time at which the line of a step was written, in Unix seconds."""
TOKEN_COLUMNS = ("old_log_probs", "rollout_log_probs", "ref_log_prob", "entropy", "advantages", "values", "returns")
"""Columns of a file of responses with one value per token, as far as the step has computed them."""

State = Literal["running", "finished", "failed", "stopped", "killed", "unknown"]
"""State of a run. `killed` means that its process is gone without an ending; `unknown` that no file describes it."""

BLOCK_BYTES = 8 << 20
"""Largest part of `metrics.jsonl` that is read at once."""
MANY_BYTES = 1 << 20
"""Size of a text from which the import of pyarrow pays off."""
THREAD_BYTES = 1 << 20
"""Size of the parts of a text that threads of pyarrow parse at the same time."""
TAIL_BYTES = 256
"""Number of bytes before the last read position. If they differ at the next read, the file was replaced."""

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
    """Unix time at which the run wrote the file, at least every `tracking.record.BEAT_SECONDS` seconds."""
    pid: int
    host: str


class Metrics:
    """The metrics of a run as one column per name, read incrementally from `metrics.jsonl`."""

    def __init__(self, path: Path):
        self.path = path
        self._clear()

    def _clear(self) -> None:
        self._steps = array("q")
        self._steps_array: NDArray[np.int64] | None = None
        self._columns: dict[str, array[float]] = {}
        self._offset, self._inode, self._tail = 0, -1, b""

    def poll(self) -> bool:
        """Read the complete lines that were appended since the last call. Return True if there were any changes.

        A file that was replaced, as by a run that resumes, is read again from its start.
        """
        try:
            if self.path.is_fifo():  # to open it would wait for its other end
                raise FileNotFoundError(self.path)
            with open(self.path, "rb") as file:
                facts = os.fstat(file.fileno())
                file.seek(max(0, self._offset - len(self._tail)))
                was_replaced = facts.st_ino != self._inode or file.read(len(self._tail)) != self._tail
                if was_replaced:
                    self._clear()
                    self._inode = facts.st_ino
                return self._read(file, facts.st_size) or was_replaced
        except (FileNotFoundError, PermissionError):
            existed = bool(self._steps)
            self._clear()
            return existed

    def _read(self, file: IO[bytes], size: int) -> bool:
        """Read the complete lines up to `size`. Blocks bound the memory for the text of a long run."""
        start, block = self._offset, BLOCK_BYTES
        while self._offset < size:
            file.seek(self._offset)
            text = file.read(min(block, size - self._offset))
            end = text.rfind(b"\n") + 1
            if end:
                text = text[:end]
                self._offset += end
                self._tail = text[-TAIL_BYTES:]
                if len(text) < MANY_BYTES or not self._add_many(text):
                    for line in text.splitlines():
                        self._add(line)
            elif len(text) == block:
                block *= 2  # a line that is longer than a block
            else:
                break
        return self._offset > start

    def _add_many(self, text: bytes) -> bool:
        """Add lines with pyarrow, in a third of the time that `json` takes.

        Return False, without adding any, if the lines are damaged or a value is not a number.
        """
        if b"[" in text or text.count(b"{") > text.count(b"\n"):
            return False  # pyarrow crashes if values are nested deeply
        import pyarrow
        from pyarrow import json as arrow_json

        try:
            source = pyarrow.BufferReader(text.replace(b'"nan"', b"null"))
            table = arrow_json.read_json(source, arrow_json.ReadOptions(block_size=THREAD_BYTES))
            steps = table["step"]
            if steps.type != pyarrow.int64() or steps.null_count:
                return False
            columns = {name: table[name].cast(pyarrow.float64()) for name in table.column_names if name != "step"}
        except (pyarrow.ArrowException, KeyError):
            return False
        for name, values in columns.items():
            self._padded(name).frombytes(values.to_numpy().tobytes())
        self._steps.frombytes(steps.to_numpy().tobytes())
        return True

    def _add(self, line: bytes) -> None:
        """Add a line, unless a crash of the machine has damaged it."""
        try:
            values = json.loads(line)
            step = values.pop("step")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            return
        if not isinstance(step, int):
            return
        for name, value in values.items():
            with contextlib.suppress(TypeError, ValueError):
                self._padded(name).append(float(value))
        self._steps.append(step)

    @property
    def steps(self) -> list[int]:
        """Steps of all lines."""
        return self._steps.tolist()

    @property
    def last_step(self) -> int:
        """Step of the last line, or 0."""
        return self._steps[-1] if self._steps else 0

    @property
    def names(self) -> list[str]:
        """Names of all metrics, in the order in which the run logged them first."""
        return list(self._columns)

    def arrays(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the steps at which a metric was logged, and its values. Both are empty for an unknown name."""
        import numpy as np

        # Copies, because an array cannot grow as long as a view of it exists.
        values = np.array(self._columns.get(name, ()), dtype=np.float64)
        if self._steps_array is None or len(self._steps_array) != len(self._steps):
            self._steps_array = np.array(self._steps, dtype=np.int64)
        steps, is_missing = self._steps_array[: len(values)], np.isnan(values)
        return (steps[~is_missing], values[~is_missing]) if is_missing.any() else (steps, values)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return the same as `arrays`, as lists."""
        steps, values = self.arrays(name)
        return steps.tolist(), values.tolist()

    def column(self, name: str) -> array[float]:
        """Return one value per entry of `steps`. Values are nan where the metric was not logged."""
        return self._padded(name) if name in self._columns else array("d", [math.nan]) * len(self._steps)

    def _padded(self, name: str) -> array[float]:
        column = self._columns.setdefault(name, array("d"))
        if missing := len(self._steps) - len(column):
            column.extend(array("d", [math.nan]) * missing)
        return column

    def last(self, name: str) -> float | None:
        """Return the last value of a metric, or None if it was never logged."""
        return next((value for value in reversed(self._columns.get(name, ())) if not math.isnan(value)), None)

    def at(self, step: int) -> dict[str, float]:
        """Return all metrics of a step, or nothing if the step was not logged."""
        if step not in self._steps:
            return {}
        row = self._steps.index(step)
        columns = {name: column[row] for name, column in self._columns.items() if row < len(column)}
        return {name: value for name, value in columns.items() if not math.isnan(value)}


class RunFolder:
    """The folder of a run (`trainer.default_local_dir`), which may still be in progress."""

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        if not self.path.is_dir():
            raise RunFolderError(f"{self.path} is not a folder; pass the folder of a run (trainer.default_local_dir)")
        self.metrics = Metrics(self.path / METRICS)
        self._read: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}

    @property
    def name(self) -> str:
        """Name of the run, which is the name of its folder unless `run.json` contains another one."""
        return str(self.info().get("experiment") or self.path.resolve().name)

    def info(self) -> dict[str, Any]:
        """Return the content of `run.json`, or nothing if there is none."""
        return dict(self._json(INFO))

    def config(self) -> dict[str, Any]:
        """Return the config of the run, without secrets, as a dict of dotted keys."""
        config = self.info().get("config")
        return config if isinstance(config, dict) else {}

    def status(self) -> Status | None:
        """Return the step and the phase of the run, or None without a readable `status.json`."""
        values = self._json(STATUS)
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

    def _json(self, name: str) -> dict[str, Any]:
        """Return the object in a file, which is read again if it has changed, or nothing without a readable file."""
        path = self.path / name
        try:
            facts = path.stat()
            if not stat.S_ISREG(facts.st_mode):  # to open a pipe would wait for its other end
                return {}
            version = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
            if name not in self._read or self._read[name][0] != version:
                self._read[name] = version, _parse_json(path.read_text(encoding="utf-8"))
            return self._read[name][1]
        except (OSError, UnicodeDecodeError):
            return {}

    def sample_steps(self) -> list[int]:
        """Return the steps whose responses are stored, in ascending order."""
        return sorted(self.sample_files())

    def sample_files(self) -> dict[int, Path]:
        """Return the steps whose responses are stored, with their files."""
        return _step_files(self.path / SAMPLES)

    def samples(self, step: int, columns: list[str] | None = None) -> pyarrow.Table:
        """Return the responses of a step, one row per response. docs/run-folder.md lists the columns.

        `columns` selects columns; those that the file does not have are left out.
        """
        files = self.sample_files()
        if step not in files:
            stored = ", ".join(str(number) for number in sorted(files)[-10:]) or "none"
            raise RunFolderError(f"{self.path} has no responses of step {step}; the last stored steps are: {stored}")
        return read_samples(files[step], columns)

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
            names[:] = sorted(
                name
                for name in names
                if not name.startswith((".", "global_step_")) and not name.endswith((".unfinished", ".replaced"))
            )
            if {INFO, METRICS} & set(files):
                names[:] = [name for name in names if name not in (SAMPLES, "logs", REWARDS)]
                found.setdefault(Path(parent).resolve(), RunFolder(parent))
    return list(found.values())


def read_samples(path: Path, columns: Collection[str] | None = None, without: Collection[str] = ()) -> pyarrow.Table:
    """Read a file of responses. `columns` selects columns, as far as the file has them, and `without` excludes some."""
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        names = [name for name in file.schema_arrow.names if name not in without]
        return file.read([name for name in names if columns is None or name in columns])
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}") from error


def process_start(pid: int) -> str | None:
    """Return a string that identifies a process together with its PID, or None if there is no such process.

    It is the start time of the process on systems with `/proc`, and an empty string elsewhere.
    """
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else fields[19]
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
        return {int(match[1]): folder / name for name in os.listdir(folder) if (match := _STEP_FILE.match(name))}
    return {}


def _parse_json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
