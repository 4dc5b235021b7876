"""Files and folders of other file systems, copied near once.

    fetch("hdfs://node/models/mine")          # a local folder
    fetch("s3://bucket/train.parquet")        # a local file
    fetch("models/mine")                      # what is on this machine stays where it is

Copies lie under `cache_folder()`, in folders named after the URL. A file gets its name when it is whole. A copy counts
by its record, which is written last and says what is there and what was there when it was made: where both are what
they were, nothing is copied again. One process of a machine copies at a time, and the others wait and find the copy.
Used by whoever reads data or models.
"""

import base64
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from camshaft import storage
from camshaft.errors import CamshaftError, StorageError

_STAMPS = (
    *("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "generation", "checksum"),
    *("mtime", "LastModified", "last_modified", "modificationTime", "updated", "created"),
)
"""What file systems call that which changes with a file. An ETag is no checksum where a store encrypts or splits."""
_MD5 = ("md5Hash", "content_md5")
"""What they call its MD5."""
_RECORD = ".origin.json"
_TURN_SECONDS = 0.2

logger = logging.getLogger(__name__)

Files = dict[str, dict[str, Any]]
"""Name under the root ("" is the root itself, a file) -> its size in bytes, its stamp, and its MD5 if that is told."""


def cache_folder(kind: str) -> Path:
    """Where copies of one kind are kept: under CAMSHAFT_CACHE, or in the user's folder of caches."""
    named = os.environ.get("CAMSHAFT_CACHE")
    home = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "camshaft"
    return home.expanduser().absolute() / kind


def fetch(place: str | Path) -> Path:
    """The local path of a file or folder, which is copied here first if `place` is a URL of another file system."""
    if not storage.is_url(place):
        return storage.local(place)
    url = str(place).rstrip("/")
    with readable(url):
        files, root = storage.file_system(url)
        target = _target(url)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            lock = open(target.with_name(target.name + ".lock"), "w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise StorageError(
                f"{url} cannot be copied to {target} ({error.strerror}): set CAMSHAFT_CACHE to a folder with room"
            ) from error
        with lock:
            _wait_for_turn(lock, url)
            _renew(files, root, url, target)
    return target


@contextlib.contextmanager
def readable(url: str) -> Iterator[None]:
    """What the client of a file system raises, whatever it is, as an error that names the URL."""
    try:
        yield
    except CamshaftError:
        raise
    except FileNotFoundError as error:
        raise StorageError(f"there is no {url}") from error
    except Exception as error:
        raise StorageError(f"{url} cannot be read: {type(error).__name__}: {error}") from error


def _target(url: str) -> Path:
    scheme, _, rest = url.partition("://")
    parts = ["_" if part in ("..", ".") else part for part in rest.split("/") if part]
    return cache_folder("files").joinpath(scheme, *parts)


def _wait_for_turn(lock: Any, url: str) -> None:
    turns = 0
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if turns % int(60 / _TURN_SECONDS) == 0:
                logger.info("%s: another process is copying it; waiting", url)
            turns += 1
            time.sleep(_TURN_SECONDS)


def _renew(files: Any, root: str, url: str, target: Path) -> None:
    """Make the copy what is there, if it is not."""
    there, record = _listed(files, root), target.with_name(target.name + _RECORD)
    if not there:
        raise StorageError(f"{url} is an empty folder")
    known = _recorded(record, url)
    current = {name for name in there if _is_current(there[name], known.get(name), target / name)}
    if current == there.keys() == known.keys():
        return
    record.unlink(missing_ok=True)
    if target.is_dir() != ("" not in there):  # a file was replaced by a folder, or a folder by a file
        _remove(target)
        known = {}
    size = sum(entry["bytes"] or 0 for name, entry in there.items() if name not in current)
    logger.info("copying %s (%.1f MB) to %s", url, size / 1e6, target)
    for name in there.keys() - current:
        _copy(files, f"{root}/{name}" if name else root, url, there[name], target / name)
    for name in known.keys() - there.keys():
        (target / name).unlink(missing_ok=True)
    files.invalidate_cache()
    if _listed(files, root) != there:
        raise StorageError(f"{url} changed while it was copied; start again when nobody writes there")
    made = {name: {**entry, "mtime_ns": (target / name).stat().st_mtime_ns} for name, entry in there.items()}
    with storage.new_file(record) as work:
        work.write_text(json.dumps({"url": url, "files": made}, indent=1), encoding="utf-8")


def _listed(files: Any, root: str) -> Files:
    info = files.info(root)
    if info["type"] == "file":
        return {"": _entry(info)}
    found = files.find(root, detail=True)
    names = {path: path.removeprefix(root).lstrip("/") for path in found}
    outside = next((path for path, name in names.items() if ".." in name.split("/")), None)
    if outside is not None:
        raise StorageError(f"'{outside}' is no file inside the folder that is to be copied")
    return {names[path]: _entry(info) for path, info in found.items() if info["type"] == "file"}


def _entry(info: dict[str, Any]) -> dict[str, Any]:
    stamp = {name: str(info[name]) for name in _STAMPS if info.get(name) is not None}
    md5 = next((info[name] for name in _MD5 if info.get(name)), None)
    if isinstance(md5, str):
        md5 = base64.b64decode(md5)
    return {"bytes": info.get("size"), "stamp": stamp, "md5": None if md5 is None else bytes(md5).hex()}


def _recorded(record: Path, url: str) -> dict[str, Any]:
    """What the record of a copy says; nothing if there is none that can be read."""
    try:
        told = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return told["files"] if told["url"] == url else {}


def _is_current(there: dict[str, Any], known: dict[str, Any] | None, path: Path) -> bool:
    """Is this the file that was copied, at both ends? Where nothing tells of changes, nobody knows."""
    if known is None or not there["stamp"] or not path.is_file():
        return False
    here = path.stat()
    same_there = {**known, "mtime_ns": None} == {**there, "mtime_ns": None}
    return same_there and here.st_mtime_ns == known["mtime_ns"] and here.st_size == there["bytes"]


def _copy(files: Any, path: str, url: str, told: dict[str, Any], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with storage.new_file(target) as work:
        files.get_file(path, str(work))
        size = work.stat().st_size
        if told["bytes"] is not None and size != told["bytes"]:
            raise StorageError(f"{url}: of the {told['bytes']} bytes of {path} {size} arrived; start again")
        if told["md5"] is not None:
            with open(work, "rb") as arrived:
                digest = hashlib.file_digest(arrived, "md5").hexdigest()
            if digest != told["md5"]:
                raise StorageError(f"{url}: {path} arrived with another MD5 than it has there; start again")


def _remove(target: Path) -> None:
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
