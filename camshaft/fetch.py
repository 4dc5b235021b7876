"""Download data and models from remote file systems to a local cache.

    fetch("hdfs://node/models/mine")          # returns a local folder
    fetch("s3://bucket/train.parquet")        # returns a local file
    fetch("hf://Qwen/Qwen2.5-0.5B")           # returns a folder in the Hugging Face cache
    fetch("models/mine")                      # returns local paths unchanged

Copies are stored in `cache_folder("files")`, in folders named after the URL without its secrets. A file appears under
its name only after it has been downloaded completely. A record of the state of source and copy is written before and
after the download. As long as both are unchanged, nothing is downloaded again. Files that are not in the record are not
deleted, and they are renamed if they are in the way. Only one process per machine downloads a URL at a time; other
processes wait and use the same copy.
"""

import base64
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from camshaft import hub, storage
from camshaft.errors import CamshaftError, StorageError

_STAMPS = (
    *("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "generation", "checksum"),
    *("mtime", "LastModified", "last_modified", "modificationTime", "updated", "created"),
)
"""Metadata entries that change when a file changes. ETags are not used as checksums, because not every ETag is one."""
_MD5 = ("md5Hash", "content_md5")
"""Metadata entries that contain the MD5 of a file."""
_USER_INFO = re.compile(r"(?<=://)(?:[^/@:\s]*:[^/\s]*|(?<=http://)[^/@\s]*|(?<=https://)[^/@\s]*)@")
_RECORD = ".origin.json"
_RETRY_SECONDS = 0.2

logger = logging.getLogger(__name__)

Files = dict[str, dict[str, Any]]
"""Maps relative paths ("" for a single file) to the size in bytes, the stamp, and the MD5 if it is available."""


def cache_folder(kind: str) -> Path:
    """Return the cache folder for a kind of files: a subfolder of CAMSHAFT_CACHE, or of the user's cache folder."""
    configured = os.environ.get("CAMSHAFT_CACHE")
    home = Path(configured) if configured else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "camshaft"
    return home.expanduser().absolute() / kind


def fetch(location: str | Path, weights: bool = True) -> Path:
    """Return the local path of a file or folder. If `location` is a URL, download it first.

    A model on the Hugging Face hub is downloaded without its weights if `weights` is False.
    """
    if not storage.is_url(location):
        return storage.local(location)
    url = str(location).rstrip("/")
    with convert_errors(url):
        target = _target(url)
        if hub.is_model_url(url):
            with download_lock(url, target):
                return hub.download(url.removeprefix(hub.SCHEME), weights)
        files, root = storage.file_system(url)
        with download_lock(url, target):
            _download_changes(files, root, url, target)
    return target


def fetch_models(models: Iterable[tuple[str, bool]]) -> None:
    """Download models of the Hugging Face hub, with or without their weights, unless they are in the local cache.

    Commands call this before they import torch, so that a wrong name or a missing connection is reported within
    seconds.
    """
    for path, weights in dict.fromkeys(models):
        if hub.is_model_url(path):
            fetch(path, weights)


@contextlib.contextmanager
def convert_errors(url: str) -> Iterator[None]:
    """Convert all exceptions of a file system client to a StorageError that contains the URL."""
    try:
        yield
    except CamshaftError:
        raise
    except FileNotFoundError as error:
        raise StorageError(f"{url} does not exist") from error
    except Exception as error:
        raise StorageError(f"{url} cannot be read: {type(error).__name__}: {error}") from error


def _target(url: str) -> Path:
    scheme, _, rest = _without_secrets(url).partition("://")
    parts = ["_" if part in ("..", ".") else part for part in rest.split("/") if part]
    return cache_folder("files").joinpath(scheme, *parts)


def _without_secrets(url: str) -> str:
    """Return the URL without user info, and with a checksum in place of its query, which can contain a signature."""
    url = _USER_INFO.sub("", url)
    scheme, _, rest = url.partition("://")
    address, _, query = rest.partition("?")
    if not query or not scheme.endswith(("http", "https")):  # elsewhere, a name can contain a question mark
        return url
    return f"{scheme}://{hashlib.sha256(query.encode()).hexdigest()[:16]}/{address}"


@contextlib.contextmanager
def download_lock(url: str, target: Path) -> Iterator[None]:
    """Hold the lock of a URL, so that only one process of this machine downloads it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = open(target.with_name(target.name + ".lock"), "a", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise StorageError(
            f"{url} cannot be downloaded to {target} ({error.strerror}); set CAMSHAFT_CACHE to a writable folder"
        ) from error
    with lock:
        _acquire(lock, url)
        yield


def _acquire(lock: Any, url: str) -> None:
    attempts = 0
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if attempts % int(60 / _RETRY_SECONDS) == 0:
                logger.info("waiting for another process that downloads %s", url)
            attempts += 1
            time.sleep(_RETRY_SECONDS)


def _download_changes(files: Any, root: str, url: str, target: Path) -> None:
    """Download the files that are missing or outdated in the local copy, and write the record."""
    remote, record = _list_files(files, root), target.with_name(target.name + _RECORD)
    if not remote:
        raise StorageError(f"{url} is an empty folder; set the URL of a file or of a folder with files")
    recorded = _read_record(record, url)
    up_to_date = {name for name in remote if _is_current(remote[name], recorded.get(name), target / name)}
    if up_to_date == remote.keys() == recorded.keys():
        return
    expected = {name: {**remote[name], "replaces": _time_of(recorded.get(name))} for name in remote.keys() - up_to_date}
    recorded |= expected
    _write_record(record, url, recorded)
    _remove_outdated(target, {name: recorded[name] for name in recorded.keys() - remote.keys()}, is_file="" in remote)
    size = sum(entry["bytes"] or 0 for name, entry in remote.items() if name not in up_to_date)
    logger.info("downloading %s (%.1f MB) to %s", url, size / 1e6, target)
    for name in remote.keys() - up_to_date:
        if os.path.lexists(target / name) and not _is_own(recorded[name], target / name):
            storage.rename_aside(target / name)
        _copy(files, f"{root}/{name}" if name else root, url, remote[name], target / name)
    files.invalidate_cache()
    if _list_files(files, root) != remote:
        raise StorageError(f"{url} changed during the download; try again when no process writes to it")
    entries = {name: {**entry, "mtime_ns": (target / name).stat().st_mtime_ns} for name, entry in remote.items()}
    _write_record(record, url, entries)


def _remove_outdated(target: Path, recorded: Mapping[str, Any], is_file: bool) -> None:
    """Delete downloaded files that the source no longer has, and rename what prevents a file or a folder `target`."""
    for name, entry in recorded.items():
        if _is_own(entry, target / name):
            (target / name).unlink()
    if target.is_dir() and is_file:
        for parent, _, _ in os.walk(target, topdown=False):
            with contextlib.suppress(OSError):  # it is not empty
                os.rmdir(parent)
    if os.path.lexists(target) and target.is_dir() == is_file:
        storage.rename_aside(target)


def _list_files(files: Any, root: str) -> Files:
    info = files.info(root)
    if info["type"] == "file":
        return {"": _entry(info)}
    entries = files.find(root, detail=True)
    names = {path: path.removeprefix(root).lstrip("/") for path in entries}
    outside = next((path for path, name in names.items() if ".." in name.split("/")), None)
    if outside is not None:
        raise StorageError(f"'{outside}' is outside the folder to download; remove '..' from the name of the file")
    return {names[path]: _entry(info) for path, info in entries.items() if info["type"] == "file"}


def _entry(info: dict[str, Any]) -> dict[str, Any]:
    stamp = {name: str(info[name]) for name in _STAMPS if info.get(name) is not None}
    md5 = next((info[name] for name in _MD5 if info.get(name)), None)
    if isinstance(md5, str):
        md5 = base64.b64decode(md5)
    return {"bytes": info.get("size"), "stamp": stamp, "md5": None if md5 is None else bytes(md5).hex()}


def _read_record(record: Path, url: str) -> dict[str, Any]:
    """Return the file entries of a record. Empty if the record is missing, unreadable, or describes another URL."""
    try:
        content = json.loads(record.read_text(encoding="utf-8"))
        return content["files"] if content["url"] == _without_secrets(url) else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _write_record(record: Path, url: str, entries: Mapping[str, Any]) -> None:
    """Write a record with an entry per file."""
    if os.path.lexists(record) and not _read_record(record, url):
        storage.rename_aside(record)
    with storage.new_file(record) as temporary:
        temporary.write_text(json.dumps({"url": _without_secrets(url), "files": entries}, indent=1), encoding="utf-8")


def _is_current(remote: dict[str, Any], recorded: dict[str, Any] | None, path: Path) -> bool:
    """Return True if neither the source nor the copy has changed. False if the source provides no stamp."""
    if recorded is None or not remote["stamp"] or not path.is_file():
        return False
    local = path.stat()
    unchanged = {**recorded, "mtime_ns": None} == {**remote, "mtime_ns": None}
    return unchanged and local.st_mtime_ns == recorded.get("mtime_ns") and local.st_size == remote["bytes"]


def _is_own(recorded: Mapping[str, Any], path: Path) -> bool:
    """Return True if a file is the one that was downloaded according to its entry in the record.

    While a file is downloaded, its entry has the time of the previous one, which it replaces.
    """
    if path.is_symlink() or not path.is_file():
        return False
    facts = path.stat()
    if "replaces" in recorded and facts.st_size == recorded["bytes"]:
        return True
    return facts.st_mtime_ns == _time_of(recorded)


def _time_of(recorded: Mapping[str, Any] | None) -> int | None:
    """Return the time of the file that has been downloaded, or None."""
    return None if recorded is None else recorded.get("mtime_ns", recorded.get("replaces"))


def _copy(files: Any, path: str, url: str, expected: dict[str, Any], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with storage.new_file(target) as temporary:
        files.get_file(path, str(temporary))
        size = temporary.stat().st_size
        if expected["bytes"] is not None and size != expected["bytes"]:
            raise StorageError(f"{url}: received {size} of the {expected['bytes']} bytes of {path}; try again")
        if expected["md5"] is not None:
            with open(temporary, "rb") as content:
                digest = hashlib.file_digest(content, "md5").hexdigest()
            if digest != expected["md5"]:
                raise StorageError(f"{url}: the MD5 of {path} differs from that of the source; try again")
