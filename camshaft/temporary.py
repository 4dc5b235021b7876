"""Temporary files of this user, which the next run removes if their process is killed.

    folder = process_folder()                       # removed when this process exits
    with temporary_folder() as folder: ...
    path = temporary_file()
    remove_leftovers()                              # at the start of a run

Everything is in `.camshaft-tmp-<uid>`, a folder with mode 0700 in TMPDIR and in /dev/shm, where other users can create
files and links. An entry has a random name, and consists of a file `<name>.lock` and, for a temporary folder, a folder
`<name>`. The file begins with `MARKER`. Its process holds a lock on it, which the kernel releases when the process and
its forks have ended. `remove_leftovers` removes unlocked entries, including those of other containers that share the
folder, but no folder with a file that is not in `_OWN_PATHS`.
"""

import contextlib
import fcntl
import functools
import logging
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import IO, Any

from camshaft.errors import StorageError

SHARED_MEMORY = Path("/dev/shm")
MARKER = b"temporary file of camshaft\n"
MAX_SOCKET_LENGTH = 107
"""Maximum number of bytes in the path of a Unix socket."""
_LOCK = ".lock"
_ENTRY = re.compile(r"[0-9a-f]{8}\.lock")
_SOCKET = "/pymp-12345678/listener-12345678"
"""Longest path of a socket in the folder of a process: that of the fork server of `multiprocessing`."""
_OWN_PATHS = re.compile(
    r"pool-\w+(/(rank_\d+\.txt|rendezvous))?"  # controller/local.py
    r"|pymp-\w+(/listener-\w+)?"  # multiprocessing
    r"|adapter_(model\.safetensors|config\.json)"  # rollout/vllm/adapters.py
)
"""Relative paths of everything that this package writes to temporary folders."""

logger = logging.getLogger(__name__)
_locks: list[IO[bytes]] = []
"""Locks that this process holds until it ends."""


def private_folder(parent: Path | None = None) -> Path:
    """Return the folder of this user in `parent`, by default in the folder of temporary files. Create it if necessary.

    Raise StorageError if this is not possible, or if the folder is a link or belongs to another user.
    """
    fix = "" if parent is not None else ", or set TMPDIR to a folder of your own"
    folder = _private_path(_default_parent() if parent is None else parent)
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        problem = _find_intrusion(folder)
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be created ({error.strerror}); make {folder.parent} writable{fix}"
        ) from error
    if problem is not None:
        raise StorageError(f"{folder} {problem}; delete it, or have its owner delete it{fix}")
    return folder


def process_folder() -> Path:
    """Return the temporary folder of this process, which is removed when the process exits.

    The path is short enough for the sockets of `multiprocessing`. If that of TMPDIR is not, the folder is in /dev/shm.
    """
    return _process_folder(os.getpid())


@functools.cache
def _process_folder(pid: int) -> Path:
    parent = None
    if len(os.fsencode(_private_path(_default_parent()))) + len("/12345678" + _SOCKET) > MAX_SOCKET_LENGTH:
        parent = SHARED_MEMORY
    folder, lock = _new_folder(parent)
    _locks.append(lock)
    # `multiprocessing` removes its folder inside this one with priority -100.
    Finalize(None, remove, (folder,), exitpriority=-200)
    return folder


@contextlib.contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder in the private folder of `parent`, and remove it at the end."""
    folder, lock = _new_folder(parent)
    with lock:
        try:
            yield folder
        finally:
            remove(folder)


def temporary_file() -> Path:
    """Return the path of a new file, which is left behind when this process ends. Append to it only."""
    path, lock = _new_lock(private_folder())
    _locks.append(lock)
    return path


def _new_folder(parent: Path | None) -> tuple[Path, IO[bytes]]:
    path, lock = _new_lock(private_folder(parent))
    folder = path.with_suffix("")
    folder.mkdir(mode=0o700)
    return folder, lock


def _new_lock(private: Path) -> tuple[Path, IO[bytes]]:
    """Create and lock the file of a new entry."""
    while True:
        path = private / f"{secrets.token_hex(4)}{_LOCK}"
        if os.path.lexists(path.with_suffix("")):
            continue
        try:
            file = open(path, "xb", buffering=0)  # noqa: SIM115 - locked until it is closed
        except FileExistsError:
            continue
        file.write(MARKER)
        # `remove_leftovers` of another process can lock and remove the file before this process locks it.
        if _lock(file) and _is_at(file, path):
            return path, file
        file.close()


def lock_exclusively(path: Path) -> IO[Any] | None:
    """Lock a file until the returned file is closed or the process ends. Return None if it is locked already.

    Raise OSError if the file system does not support locks.
    """
    file = open(path, "ab")  # noqa: SIM115
    if _lock(file):
        return file
    file.close()
    return None


def _lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        file.close()
        raise
    return True


def remove(folder: Path) -> None:
    """Remove a temporary folder and the file of its entry. A folder with files of others is kept, with a warning."""
    with contextlib.suppress(OSError):  # the next run removes it
        if foreign := _remove_own_files(folder):
            logger.warning("%s is kept, because camshaft has not written %s in it", folder, foreign)
        else:
            folder.with_name(folder.name + _LOCK).unlink(missing_ok=True)


def remove_leftovers() -> None:
    """Remove the temporary files of this user's processes that have been killed."""
    parent = _default_parent()
    configured = os.environ.get("TMPDIR")
    if configured and os.path.abspath(configured) != str(parent):
        logger.warning("TMPDIR=%s cannot be written; temporary files are written to %s", configured, parent)
    for private in {_private_path(parent), _private_path(SHARED_MEMORY)}:
        # A run that needs the folder raises an error if it is not private.
        if os.path.lexists(private) and _find_intrusion(private) is None:
            for path in sorted(private.iterdir()):
                if _ENTRY.fullmatch(path.name):
                    with contextlib.suppress(OSError):  # another run removes it at the same time
                        _remove_without_owner(path)


def _remove_without_owner(path: Path) -> None:
    """Remove an entry, if its process has ended. `path` is that of its file.

    If a process is killed while it creates or removes an entry, the file can be empty, or it has no folder.
    """
    with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not _is_at(file, path) or not _lock(file):
            return
        start, folder = file.read(len(MARKER)), path.with_suffix("")
        is_own = start == MARKER or (not start and not os.path.lexists(folder))
        if not is_own or not _is_at(file, path) or (os.path.lexists(folder) and _remove_own_files(folder)):
            return
        path.unlink()
        logger.info("removed %s, which a killed process left behind", folder)


def _remove_own_files(folder: Path) -> str | None:
    """Remove a folder if it contains only what this package writes; otherwise return the path of another file."""
    folders, files = [folder], []
    for parent, names_of_folders, names in os.walk(folder):
        files += [Path(parent, name) for name in names]
        folders += [Path(parent, name) for name in names_of_folders]
    for path in (*files, *folders[1:]):
        if path.is_symlink() or not _OWN_PATHS.fullmatch(str(path.relative_to(folder))):
            return str(path.relative_to(folder))
    with contextlib.suppress(FileNotFoundError):  # another process removes it at the same time
        for path in files:
            path.unlink(missing_ok=True)
        for path in reversed(folders):
            path.rmdir()
    return None


def _default_parent() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise StorageError(
            f"no folder for temporary files is writable (TMPDIR={os.environ.get('TMPDIR', '')}, /tmp, /var/tmp); set "
            "TMPDIR to a folder of your own"
        ) from error


def _private_path(parent: Path) -> Path:
    return parent / f".camshaft-tmp-{os.geteuid()}"


def _find_intrusion(folder: Path) -> str | None:
    """Return the reason why other users could have access to the folder, or None if it is private."""
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        return "is not a folder" if not stat.S_ISLNK(facts.st_mode) else "is a link"
    if facts.st_uid != os.geteuid():
        return f"belongs to another user (uid {facts.st_uid})"
    if stat.S_IMODE(facts.st_mode) & 0o077:
        return f"is accessible to other users (mode {stat.S_IMODE(facts.st_mode):04o})"
    return None


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Return True if the open file is a regular file that is still at its path."""
    try:
        return path.is_file() and os.path.samestat(path.lstat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
