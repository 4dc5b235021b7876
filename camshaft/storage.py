"""A folder on disk that is whole or not there: temporary name, manifest with checksums, rename.

    with new_folder("ckpt/global_step_20/actor", kind="engine", step=20) as folder:
        save_file(tensors, folder / "model.safetensors")
    manifest = verify("ckpt/global_step_20/actor")      # CheckpointError if a byte is missing

Engines, trainer and export write through here, so a run that is killed in mid-write never leaves
something that looks like a checkpoint, and never loses the one that it was about to replace. `begin` and
`finish` are the two halves of `new_folder`, for a folder that several processes write into.
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
"""What to install beside fsspec, by the beginning of a URL; others are named by fsspec itself."""
_STEP = re.compile(r"^global_step_(\d+)$")


@contextlib.contextmanager
def new_folder(target: str | Path, **facts: Any) -> Iterator[Path]:
    """A folder to write into; it appears under `target` when the block ends well, replacing what was there.

    `facts` (JSON) are kept in the manifest beside the size and checksum of every file.
    """
    work = begin(target)
    yield work
    finish(target, fingerprints(work, (path for path in work.rglob("*") if path.is_file())), facts)


def begin(target: str | Path) -> Path:
    """An empty folder beside `target`, to be written into and handed to `finish`."""
    target = Path(target).expanduser().absolute()
    _put_back(target)
    work, aside = target.with_name(target.name + _UNFINISHED), target.with_name(target.name + _REPLACED)
    for leftover in (work, aside):
        if leftover.exists():
            shutil.rmtree(leftover)
    work.mkdir(parents=True)
    return work


def finish(target: str | Path, files: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Let the folder that `begin` gave take the name `target`, with its manifest: `fingerprints` and `facts`.

    What was there is set aside before and deleted after, so a kill at any moment leaves the one or the other.
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
    """The same for one file, without a manifest: a path to write to; it becomes `target` when the block ends well."""
    target = Path(target).expanduser().absolute()
    work = target.with_name(target.name + _UNFINISHED)
    yield work
    with open(work, "rb") as written:
        os.fsync(written.fileno())
    os.replace(work, target)


def hold(folder: Path) -> IO[str] | None:
    """Keep others out of a folder while the file that this gives is open, however the process ends; None: one is in."""
    lock = open(folder / ".lock", "w", encoding="utf-8")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock


def fingerprints(root: Path, paths: Iterable[Path]) -> dict[str, Any]:
    """Size and checksum of each of `paths`, by its name under `root`."""
    return {str(path.relative_to(root)): _fingerprint(path) for path in paths}


def _put_back(target: Path) -> None:
    """Undo a replacement that was killed between its two renames."""
    if not target.exists():
        with contextlib.suppress(FileNotFoundError):  # there is none, or another reader was faster
            os.replace(target.with_name(target.name + _REPLACED), target)


def verify(folder: str | Path, share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """The facts given at writing, after every file was found with its size and checksum.

    With `share=(r, n)` this is one of n processes that look at every n-th file each.
    """
    folder = Path(folder).expanduser()
    manifest = read_manifest(folder)
    for name, told in list(manifest["files"].items())[share[0] :: share[1]]:
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} is incomplete: '{name}' is missing")
        if _fingerprint(path) != told:
            raise CheckpointError(f"{folder} is damaged: '{name}' does not match its checksum")
    return manifest["facts"]


def is_complete(folder: str | Path) -> bool:
    """Was `folder` written to its end, every file in its full length? (Cheap: it reads the manifest alone.)"""
    folder = Path(folder).expanduser()
    try:
        files = read_manifest(folder)["files"]
    except CheckpointError:
        return False
    return all((folder / name).is_file() and (folder / name).stat().st_size == files[name]["bytes"] for name in files)


def is_unfinished(path: Path) -> bool:
    """Is this what `new_folder` was writing, or about to delete, when its process ended?"""
    return path.name.endswith((_UNFINISHED, _REPLACED))


def read_manifest(folder: Path) -> dict[str, Any]:
    _put_back(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}")
    return _parsed(path.read_bytes(), folder)


def _parsed(manifest: bytes, folder: str | Path) -> dict[str, Any]:
    try:
        return json.loads(manifest)
    except ValueError as error:
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} cannot be read ({error})") from error


def check_replaceable(target: str | Path, kind: str) -> None:
    """An error if `new_folder(target, kind=kind)` would replace something that is not an older one of its kind."""
    target = Path(target).expanduser()
    _put_back(target)
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if (target / MANIFEST).is_file() and read_manifest(target)["facts"].get("kind") == kind:
        return
    raise CheckpointError(f"{target} is there already and would be replaced as a whole. Name a folder that is not")


def prune(target: str | Path, keep: int) -> list[Path]:
    """Remove the oldest folders that differ from `target` only in the number of `global_step_<n>`."""
    target = Path(target).expanduser()
    place = next((i for i, part in enumerate(target.parts) if _STEP.match(part)), None)
    if place is None:
        raise CheckpointError(f"max_ckpt_to_keep needs a part 'global_step_<n>' in the path, got {target}")
    root, rest = Path(*target.parts[:place]), target.parts[place + 1 :]
    found = sorted((step, folder) for step, folder in step_folders(root) if (folder / Path(*rest)).is_dir())
    removed = []
    for _, folder in found[: max(0, len(found) - keep)]:
        victim = folder.joinpath(*rest)
        shutil.rmtree(victim)
        removed.append(victim)
        if victim != folder and not any(folder.iterdir()):
            folder.rmdir()
    return removed


def step_folders(root: str | Path) -> list[tuple[int, Path]]:
    """(n, folder) of every `global_step_<n>` in `root`, oldest first."""
    root = Path(root).expanduser()
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _STEP.match(path.name))]
    return sorted(found)


def _fingerprint(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 22):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


# -- copies elsewhere -----------------------------------------------------------------------------


def copy_folder(source: str, target: str) -> None:
    """Copy a complete folder under its own checksums; each side is a path or a URL (`hdfs://`, `s3://`, ...).

    A local `target` appears whole or not at all. Object stores cannot rename: at a URL the manifest of an older copy
    goes first and the new one comes last, so that whatever has a manifest is whole. Only files that a manifest names
    are ever replaced or removed there.
    """
    if is_url(source) and is_url(target):
        raise CheckpointError(f"'{source}' to '{target}': one of the two has to be a local path")
    if is_url(target):
        _upload(local(source), target)
    elif is_url(source):
        _download(source, local(target))
    else:
        origin, goal = local(source), local(target)
        verify(origin)
        work = begin(goal)
        shutil.copytree(origin, work, dirs_exist_ok=True)
        verify(work)
        manifest = read_manifest(work)
        finish(goal, manifest["files"], manifest["facts"])


def steps_at(place: str | Path) -> list[int]:
    """The numbers of `step_folders`, in a folder or at a URL."""
    if not is_url(place):
        return [step for step, _ in step_folders(local(place))]
    files, root = file_system(str(place))
    names = [path.rstrip("/").rpartition("/")[2] for path in files.ls(root, detail=False)] if files.exists(root) else []
    return sorted(int(match[1]) for name in names if (match := _STEP.match(name)))


def facts_at(place: str | Path) -> dict[str, Any]:
    """The facts of a folder, also at a URL; an error if it has no manifest."""
    if not is_url(place):
        return read_manifest(local(place))["facts"]
    files, root = file_system(str(place))
    return _manifest_at(files, root, str(place))["facts"]


def write_text(place: str | Path, name: str, text: str) -> None:
    """A small file in a folder, where it appears whole, or at a URL."""
    if is_url(place):
        files, root = file_system(str(place))
        files.pipe_file(f"{root}/{name}", text.encode())
        return
    with new_file(local(place) / name) as work:
        work.write_text(text, encoding="utf-8")


def read_text(place: str | Path, name: str) -> str | None:
    """What `write_text` wrote; None if there is no such file."""
    with contextlib.suppress(FileNotFoundError):
        if not is_url(place):
            return (local(place) / name).read_text(encoding="utf-8")
        files, root = file_system(str(place))
        return files.cat_file(f"{root}/{name}").decode()
    return None


def is_there(folder: str | Path) -> bool:
    """Is there such a folder? At a URL: is there one that counts, with a manifest?"""
    if not is_url(folder):
        return local(folder).exists()
    files, root = file_system(str(folder))
    return files.exists(f"{root}/{MANIFEST}")


def remove(folder: str | Path) -> None:
    """Delete a folder; at a URL its manifest first, and nothing that this does not name."""
    if not is_url(folder):
        shutil.rmtree(local(folder))
        return
    files, root = file_system(str(folder))
    _remove_copy(files, root, str(folder))


def is_url(place: str | Path) -> bool:
    """Is this not on the file system of this machine?"""
    return isinstance(place, str) and "://" in place and not place.startswith("file://")


def local(place: str | Path) -> Path:
    """The path behind a place on this machine."""
    return Path(str(place).removeprefix("file://")).expanduser()


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system behind a URL, and the path in it."""
    scheme = url.partition("://")[0]
    try:
        from fsspec.core import url_to_fs

        files, root = url_to_fs(url)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        more = f" {package}" if package else f" and the one for {scheme}://"
        raise StorageError(
            f"'{url}' needs a package that is not installed: pip install 'camshaft[remote]'{more} ({error})"
        ) from error
    except ValueError as error:
        raise StorageError(f"'{url}': {error}; give a local path, or a URL that fsspec knows") from error
    except OSError as error:
        # pyarrow brings the client of Hadoop and looks for its libraries when it connects.
        hint = ". Set JAVA_HOME, HADOOP_HOME and CLASSPATH=$(hadoop classpath --glob)" if scheme == "hdfs" else ""
        reason = str(error).partition("\n")[0]  # of the places that pyarrow looks in, one is enough
        raise StorageError(f"'{url}': {scheme}:// cannot be reached ({reason}){hint}") from error
    if not root.strip("/"):
        raise StorageError(f"'{url}' names no folder; put one after the host or bucket")
    files.invalidate_cache()  # others write there
    return files, root.rstrip("/")


def _manifest_at(files: Any, root: str, url: str) -> dict[str, Any]:
    try:
        manifest = _parsed(files.cat_file(f"{root}/{MANIFEST}"), url)
    except FileNotFoundError as error:
        raise CheckpointError(f"{url} is not a complete checkpoint: it has no {MANIFEST}") from error
    for name in manifest["files"]:
        if name.startswith("/") or ".." in name.split("/"):
            raise CheckpointError(f"{url} is damaged: '{name}' in its {MANIFEST} is no file inside it")
    return manifest


def _remove_copy(files: Any, root: str, url: str) -> None:
    names: list[str] = []
    with contextlib.suppress(CheckpointError):  # none, or cut off: then nobody knows what it named
        names += _manifest_at(files, root, url)["files"]
    for name in (MANIFEST, *names):
        if files.exists(f"{root}/{name}"):
            files.rm_file(f"{root}/{name}")
    if files.exists(root) and not files.find(root):
        files.rm(root, recursive=True)  # folders that are left empty, where a file system has such


def _upload(origin: Path, url: str) -> None:
    verify(origin)
    told = read_manifest(origin)["files"]
    files, root = file_system(url)
    _remove_copy(files, root, url)
    for name in told:
        files.put_file(str(origin / name), f"{root}/{name}")
    files.invalidate_cache()
    for name in told:
        size = files.info(f"{root}/{name}")["size"]
        if size != told[name]["bytes"]:
            raise CheckpointError(f"{url}: '{name}' has {size} bytes there, and {told[name]['bytes']} in {origin}")
    files.put_file(str(origin / MANIFEST), f"{root}/{MANIFEST}")


def _download(url: str, goal: Path) -> None:
    files, root = file_system(url)
    manifest = _manifest_at(files, root, url)
    work = begin(goal)
    for name, told in manifest["files"].items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            files.get_file(f"{root}/{name}", str(path))
        except FileNotFoundError as error:
            raise CheckpointError(f"{url} is incomplete: '{name}' is missing") from error
        if _fingerprint(path) != told:
            raise CheckpointError(f"{url} is damaged, or was on its way here: '{name}' does not match its checksum")
    finish(goal, manifest["files"], manifest["facts"])
