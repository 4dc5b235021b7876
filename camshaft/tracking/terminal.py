"""The output of a process: its log on the console, and its standard streams when their reader is gone.

with continue_without_reader(folder / "logs" / "driver.log"), log_to_console(shared_console(), seed=1):
    ...
"""

import contextlib
import errno
import io
import logging
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from camshaft.masking import PrintableFormatter
from camshaft.tracking.record import log_text


class _ConsoleHandler(logging.Handler):
    """Print log records to a console, each on one line. The terminal wraps long lines, so paths can be copied."""

    def __init__(self, console: Console):
        super().__init__()
        self.setFormatter(PrintableFormatter("%(asctime)s %(levelname)-8s %(message)s", "%H:%M:%S"))
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            style = _STYLES.get(record.levelno)
            self._console.print(self.format(record), style=style, markup=False, highlight=False, soft_wrap=True)
        except Exception:
            self.handleError(record)


_STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "red"}


@contextlib.contextmanager
def log_to_console(console: Console, seed: int) -> Iterator[None]:
    """Log to the console, and seed the global generator of torch, which libraries may use."""
    handler = _ConsoleHandler(console)
    root = logging.getLogger("camshaft")
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


class _Stream(io.FileIO):
    """The descriptor of a standard stream. If its reader is gone, it is replaced by the file `log`.

    Text is lost while the disk of a redirected stream is full.
    """

    def __init__(self, descriptor: int, log: Path):
        super().__init__(descriptor, "w", closefd=False)
        self._log = log
        self._name = "standard output" if descriptor == 1 else "standard error"
        self._has_lost_text = False

    def write(self, data: Any) -> int:
        try:
            return self._write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # a closed pipe, a closed terminal
                raise
        self._redirect()
        return self._write(data)

    def _write(self, data: Any) -> int:
        try:
            while (count := super().write(data)) is None:  # the pipe does not block, and it is full
                select.select([], [self], [])
            return count
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            if not self._has_lost_text:
                self._has_lost_text = True
                log_text(f"{self._name} cannot be written: {error.strerror}. The run continues, and its output is lost")
            return len(data)

    def _redirect(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._log, flags, 0o644)
        except OSError:
            file = os.open(os.devnull, flags)
        os.dup2(file, self.fileno())
        os.close(file)
        message = f"camshaft: {self._name} was closed; the run continues, and writes to {self._log}\n".encode()
        for descriptor in {self.fileno(), 2}:
            with contextlib.suppress(OSError):  # standard error may be closed too
                os.write(descriptor, message)


@contextlib.contextmanager
def continue_without_reader(log: Path) -> Iterator[None]:
    """Write standard output and standard error to `log` when their pipe is closed, as by `camshaft ppo ... | head`.

    rich would end the process without a message. Streams that a program has replaced are left as they are.
    """
    streams = sys.stdout, sys.stderr
    if streams != (sys.__stdout__, sys.__stderr__) or None in streams:
        yield
        return
    for stream in streams:
        with contextlib.suppress(OSError):
            stream.flush()
    out, err = (
        io.TextIOWrapper(
            io.BufferedWriter(_Stream(stream.fileno(), log)),
            encoding=stream.encoding,
            errors="backslashreplace",  # a locale may lack characters of a response
            line_buffering=bool(stream.line_buffering),
        )
        for stream in streams
    )
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):
                    stream.flush()
