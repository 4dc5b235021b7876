"""Record in which order a process flushes files and renames them.

    with recorded_flushes() as events:
        ...
    events      # [Flush("/run/metrics.jsonl", size=812), Rename("/run/global_step_1/trainer"), ...]

After a power failure, a file has at least the content of its last flush before the failure.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock


class Flush(NamedTuple):
    """A flush of a file, which has `size` bytes, or of the names in a folder."""

    path: str
    size: int


class Rename(NamedTuple):
    """The appearance of a file or a folder under its final name."""

    path: str


@contextmanager
def recorded_flushes() -> Iterator[list[Flush | Rename]]:
    """Record the flushes and renames in the block, of all threads."""
    events: list[Flush | Rename] = []
    fsync, replace = os.fsync, os.replace

    def record_flush(descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        fsync(descriptor)
        events.append(Flush(os.readlink(f"/proc/self/fd/{descriptor}"), size))

    def record_rename(source: Any, target: Any) -> None:
        events.append(Rename(os.fspath(target)))
        replace(source, target)

    with mock.patch.object(os, "fsync", record_flush), mock.patch.object(os, "replace", record_rename):
        yield events
