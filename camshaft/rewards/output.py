"""Files of bounded size for the output of user code and for failed samples.

    output = Output(Path("run/rewards/output.log"))
    stream = OutputStream(output)    # one for each process that prints
    stream.write(b"...")             # the first line creates the file and logs its path
    stream.write(b"")                # at the end: writes an incomplete last line

Secrets are masked. A file that reaches `MAX_BYTES` is renamed, and a new one is started. Of the renamed files, this
process keeps the last.
"""

import contextlib
import logging
import os
from pathlib import Path

from camshaft.masking import mask_text
from camshaft.storage import rename_existing

MAX_BYTES = 8 * 1024 * 1024
"""Size in bytes at which a file is renamed, for example to `output.1.log`."""
MAX_STDERR_BYTES = 1024 * 1024
"""Maximum number of bytes that are written to stderr if there is no file."""
MAX_LINE_BYTES = 64 * 1024
"""Length of an incomplete line from which its start is written."""
MAX_SECRET_BYTES = 8 * 1024
"""Length of the end of such a line that is kept, because it may contain the start of a secret or a URL."""

logger = logging.getLogger(__name__)
_started: dict[Path, Path | None] = {}
"""Maps the path of each file that this process has started to that of the previous one, which was full."""


class Output:
    """Destination of the output of user code: a file, or stderr if `path` is None."""

    def __init__(self, path: Path | None = None, source: str = "the reward function"):
        """`source` is what prints, for messages."""
        self._source = source
        self.path = None if path is None else path.expanduser()
        self._num_bytes = 0

    def write(self, data: bytes) -> None:
        """Append to the file. A full disk does not end the run."""
        if self.path is None:
            self._write_to_stderr(data)
            return
        with contextlib.suppress(OSError):
            if not self._num_bytes:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                logger.info("%s prints; its output is in %s", self._source, self.path)
            append_rotated(self.path, data)
        self._num_bytes += len(data)

    def _write_to_stderr(self, data: bytes) -> None:
        remaining = MAX_STDERR_BYTES - self._num_bytes
        self._num_bytes += len(data)
        with contextlib.suppress(OSError):
            if remaining > 0:
                os.write(2, data[:remaining])
            if 0 < remaining < len(data):
                os.write(2, f"\ncamshaft: further output of {self._source} is discarded\n".encode())


class OutputStream:
    """Output of one process, which arrives in chunks. Its lines are written with secrets masked."""

    def __init__(self, output: Output):
        self._output = output
        self._line = b""

    def write(self, data: bytes) -> None:
        """Write all complete lines. An empty value is the end of the output, and writes an incomplete last line."""
        if not data and self._line:
            self._output.write(_masked(self._line))
            self._line = b""
        lines, newline, self._line = (self._line + data).rpartition(b"\n")
        if newline:
            self._output.write(_masked(lines + newline))
        if len(self._line) > MAX_LINE_BYTES:
            line = _masked(self._line)  # a secret at the end, of which only the start has arrived, remains as it is
            self._output.write(line[:-MAX_SECRET_BYTES])
            self._line = line[-MAX_SECRET_BYTES:]


def _masked(data: bytes) -> bytes:
    return mask_text(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def append_rotated(path: Path, data: bytes) -> None:
    """Append to a file. If it would exceed `MAX_BYTES`, rename it first, and start a new one.

    The previous file of this process is then deleted. Files that earlier processes have started remain.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    size = path.stat().st_size if path.exists() else 0
    if size and size + len(data) > MAX_BYTES:
        full, size = rename_existing(path), 0
        if path in _started:
            if previous := _started[path]:
                previous.unlink(missing_ok=True)
            _started[path] = full
    if not size:
        _started.setdefault(path)
    with open(path, "ab") as file:
        file.write(data)
