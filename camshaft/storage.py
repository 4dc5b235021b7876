"""Atomic folders on disk: temporary name, manifest with checksums, fsync, rename.

    with new_folder("ckpt/global_step_20/actor", kind="engine", step=20) as folder:
        save_file(tensors, folder / "model.safetensors")
    manifest = verify("ckpt/global_step_20/actor")      # CheckpointError if a byte is missing

Engines, trainer and export use this module, so that a run killed while writing leaves neither an incomplete checkpoint
nor a missing previous one. `begin` and `finish` are the two halves of `new_folder`, for folders that several processes
write. The functions below `copy_folder` also accept URLs.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from camshaft.errors import CheckpointError, StorageError

MANIFEST = "manifest.json"
_UNFINISHED = ".unfinished"
_REPLACED = ".replaced"
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "adlfs"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
    "webhdfs": "requests",
    "oss": "ossfs",
}
"""URL scheme -> package that fsspec needs; fsspec's error reports the others."""
_STEP = re.compile(r"^global_step_(\d+)$")


@contextlib.contextmanager
def new_folder(target: str | Path, **facts: Any) -> Iterator[Path]:
    """Yield a folder to write; it replaces `target` when the block ends without an error.

    `facts` (JSON) are stored in the manifest with the size and checksum of every file.
    """
    work = begin(target)
    yield work
    finish(target, fingerprints(work, (path for path in work.rglob("*") if path.is_file())), facts)


def begin(target: str | Path) -> Path:
    """Create an empty folder next to `target`, to write into before `finish`."""
    target = Path(target).expanduser().absolute()
    _put_back(target)
    work, aside = target.with_name(target.name + _UNFINISHED), target.with_name(target.name + _REPLACED)
    for leftover in (work, aside):
        if leftover.exists():
            shutil.rmtree(leftover)
    work.mkdir(parents=True)
    return work


def finish(target: str | Path, files: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Write the manifest (`fingerprints` and `facts`) and rename the folder of `begin` to `target`.

    An existing `target` is renamed before and deleted after, so that a kill at any moment leaves one of the two.
    """
    target = Path(target).expanduser().absolute()
    work, aside = target.with_name(target.name + _UNFINISHED), target.with_name(target.name + _REPLACED)
    manifest = json.dumps({"facts": dict(facts), "files": dict(sorted(files.items()))}, indent=1)
    with open(work / MANIFEST, "w", encoding="utf-8") as out:
        out.write(manifest)
        out.flush()
        os.fsync(out.fileno())
    if target.exists():
        os.replace(target, aside)
    os.replace(work, target)
    if aside.exists():
        shutil.rmtree(aside)


@contextlib.contextmanager
def new_file(target: str | Path) -> Iterator[Path]:
    """Yield a path to write; the file replaces `target` when the block ends without an error."""
    target = Path(target).expanduser().absolute()
    work = target.with_name(target.name + _UNFINISHED)
    yield work
    with open(work, "rb") as written:
        os.fsync(written.fileno())
    os.replace(work, target)


def hold(folder: Path) -> IO[str] | None:
    """Lock a folder until the returned file is closed or the process ends; return None if it is already locked."""
    lock = open(folder / ".lock", "w", encoding="utf-8")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock


def fingerprints(root: Path, paths: Iterable[Path]) -> dict[str, Any]:
    """Return size and checksum of each path, by its name relative to `root`."""
    return {str(path.relative_to(root)): _fingerprint(path) for path in paths}


def _put_back(target: Path) -> None:
    """Undo a replacement that was interrupted between its two renames."""
    if not target.exists():
        with contextlib.suppress(FileNotFoundError):  # nothing to undo, or another process did it
            os.replace(target.with_name(target.name + _REPLACED), target)


def verify(folder: str | Path, share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """Verify size and checksum of every file and return the facts of the manifest.

    With `share=(r, n)`, this process is one of n and verifies every n-th file.
    """
    folder = Path(folder).expanduser()
    manifest = read_manifest(folder)
    for name, expected in list(manifest["files"].items())[share[0] :: share[1]]:
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} is incomplete: '{name}' is missing")
        if _fingerprint(path) != expected:
            raise CheckpointError(f"{folder} is damaged: '{name}' does not match its checksum")
    return manifest["facts"]


def is_complete(folder: str | Path) -> bool:
    """Return True if `folder` has a manifest and all files have their full size; checksums are not read."""
    folder = Path(folder).expanduser()
    try:
        files = read_manifest(folder)["files"]
    except CheckpointError:
        return False
    return all((folder / name).is_file() and (folder / name).stat().st_size == files[name]["bytes"] for name in files)


def is_unfinished(path: Path) -> bool:
    """Return True if this is a leftover of an interrupted `new_folder`."""
    return path.name.endswith((_UNFINISHED, _REPLACED))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder; raise CheckpointError if it is missing or unreadable."""
    _put_back(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}")
    return _parse_manifest(path.read_bytes(), folder)


def _parse_manifest(manifest: bytes, folder: str | Path) -> dict[str, Any]:
    try:
        return json.loads(manifest)
    except ValueError as error:
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} cannot be read ({error})") from error


def check_replaceable(target: str | Path, kind: str) -> None:
    """Raise CheckpointError if `target` exists and is not a folder of the same `kind`."""
    target = Path(target).expanduser()
    _put_back(target)
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if (target / MANIFEST).is_file() and read_manifest(target)["facts"].get("kind") == kind:
        return
    raise CheckpointError(f"{target} already exists and is not an older {kind}; use a new folder")


def prune(target: str | Path, keep: int) -> list[Path]:
    """Delete the oldest folders that differ from `target` only in the number of `global_step_<n>`; keep `keep`."""
    target = Path(target).expanduser()
    index = next((i for i, part in enumerate(target.parts) if _STEP.match(part)), None)
    if index is None:
        raise CheckpointError(f"max_ckpt_to_keep needs a part 'global_step_<n>' in the path, got {target}")
    root, rest = Path(*target.parts[:index]), target.parts[index + 1 :]
    folders = sorted((step, folder) for step, folder in step_folders(root) if (folder / Path(*rest)).is_dir())
    removed = []
    for _, folder in folders[: max(0, len(folders) - keep)]:
        outdated = folder.joinpath(*rest)
        shutil.rmtree(outdated)
        removed.append(outdated)
        if outdated != folder and not any(folder.iterdir()):
            folder.rmdir()
    return removed


def step_folders(root: str | Path) -> list[tuple[int, Path]]:
    """Return (n, folder) of every `global_step_<n>` in `root`, oldest first."""
    root = Path(root).expanduser()
    if not root.is_dir():
        return []
    return sorted((int(match[1]), path) for path in root.iterdir() if (match := _STEP.match(path.name)))


def _fingerprint(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 22):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


# -- local paths and URLs -------------------------------------------------------------------------


def copy_folder(source: str, target: str) -> None:
    """Copy a complete folder and verify its checksums; each side is a path or a URL (`hdfs://`, `s3://`, ...).

    A local `target` appears atomically. Object stores cannot rename: at a URL the manifest of an older copy is deleted
    first and the new manifest is written last, so every folder with a manifest is complete. Only files listed in a
    manifest are replaced or deleted there.
    """
    if is_url(source) and is_url(target):
        raise CheckpointError(f"'{source}' to '{target}': one of the two must be a local path")
    if is_url(target):
        _upload(local(source), target)
    elif is_url(source):
        _download(source, local(target))
    else:
        origin, goal = local(source), local(target)
        verify(origin)
        copy = begin(goal)
        shutil.copytree(origin, copy, dirs_exist_ok=True)
        verify(copy)
        manifest = read_manifest(copy)
        finish(goal, manifest["files"], manifest["facts"])


def steps_at(place: str | Path) -> list[int]:
    """Return the step numbers of the `global_step_<n>` folders in a folder or at a URL."""
    if not is_url(place):
        return [step for step, _ in step_folders(local(place))]
    files, root = file_system(str(place))
    names = [path.rstrip("/").rpartition("/")[2] for path in files.ls(root, detail=False)] if files.exists(root) else []
    return sorted(int(match[1]) for name in names if (match := _STEP.match(name)))


def facts_at(place: str | Path) -> dict[str, Any]:
    """Return the manifest facts of a folder or URL; raise CheckpointError without a manifest."""
    if not is_url(place):
        return read_manifest(local(place))["facts"]
    files, root = file_system(str(place))
    return _manifest_at(files, root, str(place))["facts"]


def write_text(place: str | Path, name: str, text: str) -> None:
    """Write a small file to a folder (atomically) or a URL."""
    if is_url(place):
        files, root = file_system(str(place))
        files.pipe_file(f"{root}/{name}", text.encode())
        return
    with new_file(local(place) / name) as work:
        work.write_text(text, encoding="utf-8")


def read_text(place: str | Path, name: str) -> str | None:
    """Read a file written by `write_text`; None if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        if not is_url(place):
            return (local(place) / name).read_text(encoding="utf-8")
        files, root = file_system(str(place))
        return files.cat_file(f"{root}/{name}").decode()
    return None


def is_there(folder: str | Path) -> bool:
    """Return True if a local folder exists, or if a URL has a folder with a manifest."""
    if not is_url(folder):
        return local(folder).exists()
    files, root = file_system(str(folder))
    return files.exists(f"{root}/{MANIFEST}")


def remove(folder: str | Path) -> None:
    """Delete a folder; at a URL the manifest first, then only the files that it lists."""
    if not is_url(folder):
        shutil.rmtree(local(folder))
        return
    files, root = file_system(str(folder))
    _remove_copy(files, root, str(folder))


def is_url(place: str | Path) -> bool:
    """Return True if `place` is a URL of another file system."""
    return isinstance(place, str) and "://" in place and not place.startswith("file://")


def local(place: str | Path) -> Path:
    """Return the local path of `place`."""
    return Path(str(place).removeprefix("file://")).expanduser()


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it."""
    scheme = url.partition("://")[0]
    try:
        from fsspec.core import url_to_fs

        files, root = url_to_fs(url)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        more = f" {package}" if package else f" and the one for {scheme}://"
        raise StorageError(
            f"'{url}' requires a package that is not installed: pip install 'camshaft[remote]'{more} ({error})"
        ) from error
    except ValueError as error:
        raise StorageError(f"'{url}': {error}; use a local path, or a URL that fsspec supports") from error
    except OSError as error:
        # pyarrow contains the Hadoop client and searches for the Hadoop libraries when it connects.
        hint = ". Set JAVA_HOME, HADOOP_HOME and CLASSPATH=$(hadoop classpath --glob)" if scheme == "hdfs" else ""
        reason = str(error).partition("\n")[0]  # pyarrow lists every searched path
        raise StorageError(f"'{url}': {scheme}:// is unreachable ({reason}){hint}") from error
    if not root.strip("/"):
        raise StorageError(f"'{url}' has no path; add a folder after the host or bucket")
    files.invalidate_cache()  # other processes may write to it
    return files, root.rstrip("/")


def _manifest_at(files: Any, root: str, url: str) -> dict[str, Any]:
    try:
        manifest = _parse_manifest(files.cat_file(f"{root}/{MANIFEST}"), url)
    except FileNotFoundError as error:
        raise CheckpointError(f"{url} is not a complete checkpoint: it has no {MANIFEST}") from error
    for name in manifest["files"]:
        if name.startswith("/") or ".." in name.split("/"):
            raise CheckpointError(f"{url} is damaged: '{name}' in its {MANIFEST} is not inside the folder")
    return manifest


def _remove_copy(files: Any, root: str, url: str) -> None:
    names: list[str] = []
    with contextlib.suppress(CheckpointError):  # missing or truncated: its files are unknown
        names += _manifest_at(files, root, url)["files"]
    for name in (MANIFEST, *names):
        if files.exists(f"{root}/{name}"):
            files.rm_file(f"{root}/{name}")
    if files.exists(root) and not files.find(root):
        files.rm(root, recursive=True)  # empty folders remain on some file systems


def _upload(origin: Path, url: str) -> None:
    verify(origin)
    expected = read_manifest(origin)["files"]
    files, root = file_system(url)
    _remove_copy(files, root, url)
    for name in expected:
        files.put_file(str(origin / name), f"{root}/{name}")
    files.invalidate_cache()
    for name in expected:
        size = files.info(f"{root}/{name}")["size"]
        if size != expected[name]["bytes"]:
            raise CheckpointError(f"{url}: '{name}' has {size} bytes, but {expected[name]['bytes']} in {origin}")
    files.put_file(str(origin / MANIFEST), f"{root}/{MANIFEST}")


def _download(url: str, goal: Path) -> None:
    files, root = file_system(url)
    manifest = _manifest_at(files, root, url)
    copy = begin(goal)
    for name, expected in manifest["files"].items():
        path = copy / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            files.get_file(f"{root}/{name}", str(path))
        except FileNotFoundError as error:
            raise CheckpointError(f"{url} is incomplete: '{name}' is missing") from error
        if _fingerprint(path) != expected:
            raise CheckpointError(f"{url} is damaged or was corrupted in transit: '{name}' does not match its checksum")
    finish(goal, manifest["files"], manifest["facts"])
