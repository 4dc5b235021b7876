"""Temporary files that the next run removes if this process is killed.

    folder = process_folder()                       # removed when this process exits
    with temporary_folder() as folder: ...
    lock_file(descriptor)                           # a temporary file named `file_name(...)`
    remove_leftovers()                              # at the start of a run

A process holds a lock on each of its temporary files and folders. The kernel releases it when the process and its forks
have ended, so `remove_leftovers` removes unlocked files, including those of other containers on this machine.
"""

import contextlib
import fcntl
import functools
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import IO

PREFIX = "camshaft-"
SHARED_MEMORY = Path("/dev/shm")
_LOCK = ".lock"
_NEW = ".new-" + PREFIX
"""Prefix of a folder that is not locked yet."""

logger = logging.getLogger(__name__)
_locks: list[IO[str]] = []
"""Locks that this process holds until it ends."""


@contextlib.contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder in `parent`, by default the folder of temporary files, and remove it at the end."""
    folder, lock = _new_folder(parent)
    with lock:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def process_folder() -> Path:
    """Return the temporary folder of this process, which is removed when the process exits."""
    return _process_folder(os.getpid())


@functools.cache
def _process_folder(pid: int) -> Path:
    folder, lock = _new_folder(None)
    _locks.append(lock)
    # `multiprocessing` removes its folder inside this one with priority -100.
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)
    return folder


def _new_folder(parent: Path | None) -> tuple[Path, IO[str]]:
    new = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
    lock = lock_exclusively(new / _LOCK)
    assert lock is not None
    folder = new.with_name(new.name.replace(_NEW, PREFIX, 1))
    new.rename(folder)
    return folder, lock


def file_name(name: str) -> Path:
    """Return the path of a temporary file that all processes of this machine can compute."""
    return Path(tempfile.gettempdir()) / f"{PREFIX}{name}"


def lock_file(descriptor: int) -> None:
    """Take a shared lock on an open temporary file, so that `remove_leftovers` does not remove it."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def lock_exclusively(path: Path) -> IO[str] | None:
    """Lock a file until the returned file is closed or the process ends. Return None if it is locked already.

    Raise OSError if the file system does not support locks.
    """
    file = open(path, "a", encoding="utf-8")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if not isinstance(error, BlockingIOError):
            raise
        return None
    return file


def remove_leftovers() -> None:
    """Remove the temporary files of this user's processes that have been killed."""
    for parent in {Path(tempfile.gettempdir()), SHARED_MEMORY}:
        for path in parent.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):  # another run removes it at the same time
                _remove_without_owner(path)


def _remove_without_owner(path: Path) -> None:
    is_folder = path.is_dir()
    lock_path = path / _LOCK if is_folder else path
    if path.is_symlink() or path.lstat().st_uid != os.getuid() or not lock_path.is_file():
        return
    lock = lock_exclusively(lock_path)
    if lock is None:
        return
    with lock:
        logger.debug("removing %s, left by a killed run", path)
        shutil.rmtree(path) if is_folder else path.unlink()
