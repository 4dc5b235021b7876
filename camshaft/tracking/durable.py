"""Flush the files of a run to the disk before a checkpoint covers them, and find out later which steps they lost.

    files = RunFiles("checkpoints/demo/tiny")
    files.add(path)                     # a file of the current step
    steps = files.flush()               # [[1, 20]]: the steps in metrics.jsonl, which the checkpoint records
    ...
    missing_steps([[1, 20]], present, 20)   # after a resume, for example [3, 4, 5, 6, 9]
    format_steps([3, 4, 5, 6, 9])       # "3-6, 9"

The kernel keeps written data in memory for many seconds, and a power failure loses what is not flushed. Only steps that
save a checkpoint wait for the disk.
"""

import contextlib
import logging
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from camshaft import storage
from camshaft.tracking.run_folder import LOG, METRICS, REWARDS

Ranges = Sequence[Sequence[int]]
"""Steps as pairs of the first and the last one of each range, in ascending order."""

NUM_THREADS = 8
"""Number of files that are flushed at the same time. A file system writes them together, in a tenth of the time."""

_STEP = re.compile(rb'\{"step": (\d+),')

logger = logging.getLogger(__name__)


class RunFiles:
    """Files of a run folder that a checkpoint covers: the metrics, the log, those in `rewards`, and added ones."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()
        self._added: set[Path] = set()
        self._steps: list[list[int]] = []
        self._offset = 0
        """Size of the part of `metrics.jsonl` whose steps are in `_steps`."""

    def add(self, path: Path) -> None:
        """Add a file that has been written since the last flush."""
        self._added.add(path)

    def flush(self) -> Ranges:
        """Flush the files and the names in their folders. Return the steps in `metrics.jsonl`."""
        files = {self.folder / METRICS, self.folder / LOG, *(self.folder / REWARDS).glob("*"), *self._added}
        folders = {self.folder, *(path.parent for path in files)}
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(_flush, (*files, *folders)))
        self._added.clear()
        return self._logged_steps()

    def _logged_steps(self) -> Ranges:
        """Read the complete lines that were appended since the last call, and return the steps of all lines."""
        with contextlib.suppress(FileNotFoundError), open(self.folder / METRICS, "rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                if match := _STEP.match(line):
                    _append(self._steps, int(match[1]))
        return [list(bounds) for bounds in self._steps]


def _flush(path: Path) -> None:
    """Flush a file or folder. An error of the disk causes a warning: the checkpoint is worth more than these files."""
    try:
        storage.flush(path)
    except FileNotFoundError:
        pass  # optional, or deleted because of a limit on their size
    except OSError as error:
        message = "%s cannot be flushed to the disk: %s. A power failure can damage it"
        logger.warning(message, path, error.strerror or error)


def step_ranges(steps: Iterable[int]) -> Ranges:
    """Return ascending steps as ranges."""
    ranges: list[list[int]] = []
    for step in steps:
        _append(ranges, step)
    return ranges


def _append(ranges: list[list[int]], step: int) -> None:
    if ranges and step == ranges[-1][1] + 1:
        ranges[-1][1] = step
    else:
        ranges.append([step, step])


def missing_steps(recorded: Ranges, present: Iterable[int], last_step: int) -> list[int]:
    """Return the steps in the ranges, up to `last_step`, that are not among `present`."""
    found = set(present)
    ranges = (range(first, min(last, last_step) + 1) for first, last in recorded)
    return [step for steps in ranges for step in steps if step not in found]


def format_steps(steps: Iterable[int]) -> str:
    """Format ascending steps, for example [3, 4, 5, 6, 9] as "3-6, 9"."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in step_ranges(steps))
