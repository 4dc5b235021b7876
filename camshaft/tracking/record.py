"""Write the description of a run to its folder, `run.json` and `config.yaml`, and its state, `status.json`.

    Tracking([*config.trainer.logger, RECORD], RunInfo(...))

    with RunStatus(folder) as status:
        status.step = 12
        status.enter("gen")

The record is a tracker, which gets the final state of the run. `run_folder.py` reads the files, and docs/run-folder.md
describes them. A full disk causes a warning, and the run continues.
"""

import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import yaml

from camshaft import storage
from camshaft.config.tree import flatten
from camshaft.errors import ConfigError
from camshaft.masking import PrintableFormatter, mask_arguments, printable
from camshaft.progress import PhaseReports
from camshaft.tracking.base import Ending, RunInfo, Tracker
from camshaft.tracking.run_folder import CONFIG, INFO, LOG, RESTARTS, STATUS, RunFolder, process_start
from camshaft.version import __version__

RECORD = "camshaft.tracking.record:RunRecord"
"""Import path of the tracker."""
LIBRARIES = ("torch", "transformers", "numpy", "pyarrow", "safetensors", "vllm", "sglang", "megatron-core", "ray")
"""Packages whose versions are recorded, if they are installed."""
CONFIG_HEADER = "# Written by camshaft. The next run in this folder replaces it.\n"
"""First line of `config.yaml`, by which it is recognized."""
POLL_SECONDS = 0.5
BEAT_SECONDS = 10.0

logger = logging.getLogger(__name__)
_console = logging.getLogger(f"{__name__}.console")
_console.propagate = False
_console.setLevel(logging.INFO)


class RunRecord(Tracker):
    """Write `config.yaml` and `run.json` before the first step, and replace `run.json` at the end."""

    synchronous = True

    def __init__(self, run: RunInfo):
        self._path = run.path(INFO)
        check_folder(self._path.parent)
        pid = os.getpid()
        self._facts: dict[str, Any] = {
            "status": "running",
            "command": run.command,
            "argv": mask_arguments(sys.argv),
            "version": __version__,
            "versions": {"python": platform.python_version(), **dict(_versions())},
            "host": socket.gethostname(),
            "pid": pid,
            "pid_start": process_start(pid),
            "started": time.time(),
            "ended": None,
            "error": None,
            "project": run.project,
            "experiment": run.experiment,
            "total_steps": run.total_steps,
            "resumed_step": run.resumed_step,
            RESTARTS: _earlier_restarts(self._path.parent, pid),
            "config": flatten(run.config, ()),
        }
        with _disk_errors_as_warnings(self._path):
            plain = json.loads(json.dumps(run.config, default=str))  # with the types of YAML only
            storage.write_text(self._path.parent, CONFIG, CONFIG_HEADER + yaml.safe_dump(plain, sort_keys=False))
            self._write()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        return

    def on_error(self, message: str) -> None:
        self._facts["error"] = printable(message)
        _console.error("%s", self._facts["error"])

    def on_run_end(self, ending: Ending) -> None:
        self._facts |= {"status": ending, "ended": time.time()}
        with _disk_errors_as_warnings(self._path):
            self._write()

    def finish(self) -> None:
        return

    def _write(self) -> None:
        storage.write_text(self._path.parent, INFO, json.dumps(self._facts, indent=1, default=str) + "\n")


class Phase(NamedTuple):
    """A phase of a run and the Unix time at which it began."""

    name: str
    since: float


class RunStatus:
    """Step and phase of the run in this process, which a thread writes to the folder within the `with` block.

    It writes at most twice per second, so that training does not wait for the disk, and at least every `BEAT_SECONDS`,
    so that a reader on another machine can tell a slow phase from a process that is gone. A phase that lasts long is
    logged.
    """

    def __init__(self, folder: str | Path):
        self.step = 0
        self.phase = Phase("start", time.time())
        self._path = Path(folder).expanduser() / STATUS
        self._facts = {"pid": os.getpid(), "host": socket.gethostname()}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._report, name="run-status", daemon=True)

    def enter(self, name: str) -> None:
        """Begin a phase, which ends when the next one begins."""
        self.phase = Phase(name, time.time())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.enter("end")
        self._write(self.step, self.phase, time.time())

    def _report(self) -> None:
        written, written_at, reports = None, 0.0, PhaseReports()
        while not self._stop.wait(POLL_SECONDS if written else 0.0):
            current, now = (self.step, self.phase), time.time()
            reports.check(*self.phase, f"step {self.step}, phase {self.phase.name}")
            if current != written or now - written_at >= BEAT_SECONDS:
                self._write(*current, now)
                written, written_at = current, now

    def _write(self, step: int, phase: Phase, now: float) -> None:
        facts = {"step": step, "phase": phase.name, "since": phase.since, "at": now, **self._facts}
        with contextlib.suppress(OSError):  # a full disk; the metrics report it
            replace_text(self._path, json.dumps(facts) + "\n")


def check_folder(folder: Path) -> None:
    """Raise ConfigError if the folder contains a config that is not that of a run, and rename such files of JSON.

    Otherwise the run would replace them. Damaged files of a run are also renamed.
    """
    foreign = [name for name in (INFO, STATUS) if os.path.lexists(folder / name) and not _is_record(folder / name)]
    config = folder / CONFIG
    is_own = not os.path.lexists(config) or _starts_with(config, CONFIG_HEADER) or _is_record(folder / INFO)
    if not is_own:
        raise ConfigError(
            f"trainer.default_local_dir={folder}: the folder contains a {CONFIG} that is not that of a run; use "
            f"another folder, for example out={folder / 'run'}"
        )
    for name in foreign:
        storage.rename_aside(folder / name)


def _is_record(path: Path) -> bool:
    """Return True if a file is `run.json` or `status.json` of a run, or empty, as after a power failure."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        text = path.read_text(encoding="utf-8").strip("\0 \n")
        return not text or {"argv", "phase"} & json.loads(text).keys() != set()
    return False


def _starts_with(path: Path, text: str) -> bool:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(len(text)).strip(b"\0") in (b"", text.encode())
    return False


@contextlib.contextmanager
def log_to_file(folder: Path) -> Iterator[None]:
    """Append the log of the run to `log.txt` in its folder within the block."""
    handler = _LogFile(folder / LOG)
    loggers = logging.getLogger("camshaft"), _console
    for source in loggers:
        source.addHandler(handler)
    try:
        yield
    finally:
        for source in loggers:
            source.removeHandler(handler)
        with contextlib.suppress(OSError):  # a disk that is full
            handler.close()


def record_failed_start(folder: Path, error: Exception) -> None:
    """Write the error of a run that failed before its first step to `log.txt`, and to `run.json` if there is none."""
    message = printable(f"{type(error).__name__}: {error}")
    log_text(message)
    path = folder / INFO
    if not path.exists():
        with _disk_errors_as_warnings(path):
            facts = {"status": "failed", "error": message, "argv": mask_arguments(sys.argv), "ended": time.time()}
            storage.write_text(folder, INFO, json.dumps(facts, indent=1) + "\n")


def log_text(text: str) -> None:
    """Write text that is printed elsewhere to `log.txt`."""
    _console.info("%s", text)


class _LogFile(logging.FileHandler):
    """Write log records to a file as long as this is possible, and ignore later errors of the disk."""

    def __init__(self, path: Path):
        super().__init__(path, encoding="utf-8", errors="backslashreplace", delay=True)
        self.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(message)s"))

    def handleError(self, record: logging.LogRecord) -> None:
        """Do not print the traceback of each record that cannot be written."""


def replace_text(path: Path, text: str) -> None:
    """Write a small file under a temporary name and rename it, so that a reader never sees half a file."""
    work = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(work, "x", encoding="utf-8") as file:
            file.write(text)
        os.replace(work, path)
    except OSError:
        work.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _disk_errors_as_warnings(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.warning("%s cannot be written: %s. The run continues", path, error.strerror or error)


def _earlier_restarts(folder: Path, pid: int) -> list[Any]:
    """Return the restarts of the run if this process has started it, and runs its command again."""
    record = RunFolder(folder).info()
    is_same = (record.get("pid"), record.get("pid_start")) == (pid, process_start(pid))
    return record.get(RESTARTS, []) if is_same else []


def _versions() -> Iterator[tuple[str, str]]:
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)
