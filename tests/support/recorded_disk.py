"""A folder whose changes are recorded, with kills and power failures at any of them.

    with recording(folder) as disk:
        disk.kill_at = 17                   # the 17th change raises Killed, and so does each later one
        ...
    disk.lose_power(random.Random(0))       # the folder is what a disk holds after a power failure

Changes of names (creation, renaming, removal) reach the disk in their order, as in a journal. A flush (`os.fsync`) of
anything writes all earlier ones, and the content of the flushed file. Of later changes, the disk has some. A file that
was not flushed has some of its first bytes.
"""

import builtins
import contextlib
import io
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch


class Killed(BaseException):
    """The process ends here. Its error handlers run, but they change nothing."""


@dataclass
class Entry:
    """A file or folder as the disk holds it."""

    is_folder: bool
    content: bytes = b""
    """Flushed content, or the target of a link."""
    is_link: bool = False
    is_flushed: bool = True
    inode: int = 0


Change = Callable[[dict[str, Entry]], object]


@dataclass
class Disk:
    """The recorded changes of the folder `root`."""

    root: str
    kill_at: int | None = None
    count: int = 0
    """Number of changes of this process."""
    entries: dict[str, Entry] = field(default_factory=dict)
    """Files and folders on the disk by their paths, after the last flush."""
    _records: bool = False
    _changes: list[Change] = field(default_factory=list)
    """Changes of names since the last flush."""
    _live: dict[int, Entry] = field(default_factory=dict)
    """Entries by inode. On a memory file system, a new file does not get the inode of a removed one."""

    def start(self) -> None:
        """Regard all that exists as flushed, and record from here on."""
        self._records = True
        self.entries, self._changes, self._live = {}, [], {}
        for parent, folders, files in os.walk(self.root):
            for path in (os.path.join(parent, name) for name in folders + files):
                self.entries[path] = self._entry(path, is_flushed=True)

    def _entry(self, path: str, is_flushed: bool) -> Entry:
        inode = os.lstat(path).st_ino
        if os.path.islink(path):
            entry = Entry(False, os.readlink(path).encode(), is_link=True, inode=inode)
        elif os.path.isdir(path):
            entry = Entry(True, inode=inode)
        else:
            entry = Entry(False, _read(path) if is_flushed else b"", is_flushed=is_flushed, inode=inode)
        self._live[inode] = entry
        return entry

    def contains(self, path: Any) -> bool:
        return self._records and isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.root + os.sep)

    def step(self) -> None:
        self.count += 1
        if self.kill_at is not None and self.count >= self.kill_at:
            raise Killed

    # -- changes, after they have happened ----------------------------------------------------------

    def created(self, path: str) -> None:
        entry = self._entry(path, is_flushed=False)
        self._changes.append(lambda entries: entries.__setitem__(path, entry))

    def removed(self, path: str) -> None:
        self._changes.append(lambda entries: entries.pop(path, None))

    def renamed(self, source: str, target: str) -> None:
        if os.lstat(target).st_ino not in self._live:  # written by a library in another language
            entry = self._entry(target, is_flushed=False)
            self._changes.append(lambda entries: entries.__setitem__(source, entry))
        self._changes.append(lambda entries: _rename(entries, source, target))

    def flushed(self, path: str) -> None:
        if os.stat(path).st_ino not in self._live:
            self.created(path)
        entry = self._live[os.stat(path).st_ino]
        if not entry.is_folder:
            entry.content, entry.is_flushed = _read(path), True
        for change in self._changes:
            change(self.entries)
        self._changes.clear()

    def opened(self, path: str) -> None:
        """Regard the content of a file that is opened for writing as not flushed."""
        entry = self._live.get(os.stat(path).st_ino)
        if entry is None:
            self.created(path)
        else:
            entry.is_flushed = False

    def lose_power(self, draw: random.Random) -> None:
        """Replace the folder by what the disk holds after a power failure. Then, call `start`."""
        self._records = False
        for change in self._changes[: draw.randint(0, len(self._changes))]:
            change(self.entries)
        latest = {}
        for parent, _, files in os.walk(self.root):
            for path in (os.path.join(parent, name) for name in files):
                latest[os.lstat(path).st_ino] = b"" if os.path.islink(path) else _read(path)
        for name in os.listdir(self.root):
            path = os.path.join(self.root, name)
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
        for path, entry in sorted(self.entries.items()):
            parent = os.path.dirname(path)
            if parent != self.root and parent not in self.entries:
                continue  # its folder was not created, or its removal is on the disk
            if entry.is_folder:
                os.mkdir(path)
            elif entry.is_link:
                os.symlink(entry.content.decode(), path)
            else:
                Path(path).write_bytes(_content(entry, latest.get(entry.inode, b""), draw))


def _rename(entries: dict[str, Entry], source: str, target: str) -> None:
    for path in [path for path in entries if path == source or path.startswith(source + os.sep)]:
        entries[target + path[len(source) :]] = entries.pop(path)


def _content(entry: Entry, latest: bytes, draw: random.Random) -> bytes:
    if entry.is_flushed:
        return entry.content
    start = len(entry.content) if latest.startswith(entry.content) else 0
    return latest[: draw.randint(start, max(start, len(latest)))]


def _read(path: str) -> bytes:
    with _OPEN(path, "rb") as file:
        return file.read()


_OPEN = io.open


@contextlib.contextmanager
def recording(root: Path) -> Iterator[Disk]:
    """Record the changes that Python code makes to a folder."""
    disk = Disk(str(root))
    disk.start()

    def changing(name: str, note: Callable[..., None], place: int = 0) -> Any:
        original = getattr(os, name)

        def change(*args: Any, **kwargs: Any) -> Any:
            if not disk.contains(args[place]):
                return original(*args, **kwargs)
            disk.step()
            result = original(*args, **kwargs)
            note(*(os.fspath(path) for path in args[: place + 1]))
            return result

        return patch.object(os, name, change)

    def opening(original: Callable[..., Any], writes: Callable[..., bool]) -> Callable[..., Any]:
        def opened(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not disk.contains(path) or not writes(*args, **kwargs):
                return original(path, *args, **kwargs)
            disk.step()
            file = original(path, *args, **kwargs)
            disk.opened(os.fspath(path))
            return file

        return opened

    def os_writes(flags: int, *_: Any, **__: Any) -> bool:
        has_name = flags & os.O_TMPFILE != os.O_TMPFILE
        return has_name and bool(flags & (os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_RDWR))

    def file_writes(mode: str = "r", *_: Any, **__: Any) -> bool:
        return bool(set(mode) & set("wax+"))

    fsync = os.fsync

    def flush(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if disk.contains(path):
            disk.step()
            disk.flushed(path)
        else:
            fsync(descriptor)

    with contextlib.ExitStack() as stack:
        for name in ("unlink", "remove", "rmdir"):
            stack.enter_context(changing(name, disk.removed))
        for name in ("rename", "replace"):
            stack.enter_context(changing(name, disk.renamed, place=1))
        stack.enter_context(changing("mkdir", disk.created))
        stack.enter_context(patch.object(os, "open", opening(os.open, os_writes)))
        stack.enter_context(patch.object(os, "fsync", flush))
        for module in (builtins, io):
            stack.enter_context(patch.object(module, "open", opening(_OPEN, file_writes)))
        stack.enter_context(patch.object(shutil, "_use_fd_functions", False))  # which name files relative to folders
        yield disk
