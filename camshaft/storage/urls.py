"""Local paths and URLs of remote file systems.

files, root = file_system("s3://bucket/folder")        # a file system of fsspec, and the path in it
local("file:///data/train.parquet")                    # a local path
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from camshaft.errors import StorageError
from camshaft.plugins import install_command
from camshaft.subprocesses import NO_LIMIT, Wait, run_in_thread

logger = logging.getLogger(__name__)

_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "adlfs"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
    "webhdfs": "requests",
    "oss": "ossfs",
}
"""Maps URL schemes to packages that fsspec requires. For other schemes, the error of fsspec names the package."""


def is_url(location: str | Path) -> bool:
    """Return True if `location` is the URL of a remote file system."""
    return isinstance(location, str) and "://" in location and not location.startswith("file://")


def local(location: str | Path) -> Path:
    """Return a path or `file://` URL as a local path, with `~` expanded."""
    return Path(str(location).removeprefix("file://")).expanduser()


def check_client(url: str) -> None:
    """Raise StorageError if the package for the file system of a URL is not installed. This opens no connection."""
    with _storage_errors(url):
        from fsspec import get_filesystem_class

        get_filesystem_class(url.partition("://")[0].rpartition("::")[2])


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path of the URL in this file system."""
    with _storage_errors(url):
        from fsspec.core import url_to_fs

        files, root = url_to_fs(url)
    if not root.strip("/"):
        raise StorageError(f"'{url}' contains no path; add a folder after the host or bucket")
    files.invalidate_cache()  # other processes may have written to it
    return _MonitoredFileSystem(files, url.partition("://")[0]), root.rstrip("/")


@contextlib.contextmanager
def _storage_errors(url: str) -> Iterator[None]:
    """Raise StorageError for errors of fsspec."""
    scheme = url.partition("://")[0]
    try:
        yield
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        more = f" {package}" if package else f" and the package for {scheme}://"
        raise StorageError(
            f"'{url}' requires a package that is not installed: {install_command('fsspec')}{more} ({error})"
        ) from error
    except ValueError as error:
        raise StorageError(f"'{url}': {error}; use a local path, or a URL that fsspec supports") from error
    except OSError as error:
        # pyarrow includes the Hadoop client, which searches for the Hadoop libraries when it connects.
        hint = ". Set JAVA_HOME, HADOOP_HOME and CLASSPATH=$(hadoop classpath --glob)" if scheme == "hdfs" else ""
        reason = str(error).partition("\n")[0]  # pyarrow lists every searched path
        raise StorageError(f"'{url}': {scheme}:// is unreachable ({reason}){hint}") from error


def rename_aside_remotely(files: Any, path: str) -> None:
    """Rename a file that is in the way of an upload to the first unused name, and log a warning."""
    number = 1
    while files.exists(f"{path}.{number}"):
        number += 1
    files.mv(path, f"{path}.{number}")
    logger.warning("%s is in the way, and no manifest lists it; renamed it to %s.%d", path, path, number)


class _MonitoredFileSystem:
    """A file system of fsspec. Each call runs in a thread, so that a call that hangs is reported and ends."""

    def __init__(self, files: Any, scheme: str):
        self._files, self._scheme = files, scheme

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._files, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            wait = Wait(f"{self._scheme}.{name}", StorageError, NO_LIMIT)
            path = args[name == "put_file"] if args else ""
            return run_in_thread(lambda: method(*args, **kwargs), wait, lambda: f"{self._scheme}://{path}")

        return call
