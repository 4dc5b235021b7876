"""Atomic writing of folders, with checksums, and copies to and from remote file systems.

    with new_folder("ckpt/global_step_20/actor", kind="engine", step=20) as folder:
        save_file(tensors, folder / "model.safetensors")
    facts = verify("ckpt/global_step_20/actor")         # raises CheckpointError if a file is missing or damaged

A folder is written under a temporary name, gets a manifest with the size and the checksum of every file, and is then
renamed. If a run is killed while it writes, the previous folder remains intact. Files, folders and renames are flushed
to the disk (fsync), so a folder that has appeared survives a power failure. Several processes can write a folder
together: one calls `begin` and `finish`, the two halves of `new_folder`. From `copy_folder` on, functions also accept
URLs.

Only what this module has written is deleted: the files that a manifest lists, and temporary folders, which contain
`_UNFINISHED_MANIFEST` until they have a manifest. Anything else that is in the way is renamed.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from camshaft.errors import CheckpointError, FormatError, StorageError
from camshaft.storage.urls import file_system, is_url, local, rename_aside_remotely
from camshaft.subprocesses import NO_LIMIT, Wait, run_in_thread
from camshaft.temporary import lock_exclusively

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1
"""Number of the layout of the folders that this version writes and of the largest one that it reads.

Increase it whenever an earlier version would misread a folder, and keep the checksum of the manifest as it is, which
earlier versions verify before they read the number. Folders of version 0.1.0 have no number.
"""
LOCK = ".lock"
"""Empty file in a folder that `lock_folder` locks."""
_UNFINISHED = ".unfinished"
_REPLACED = ".replaced"
_REMOVED = MANIFEST + ".removed"
"""Name of the manifest while the files that it lists are deleted."""
_UNFINISHED_MANIFEST = b'{"unfinished": true}\n'
"""Manifest of a temporary folder of `begin`. Its files are unknown."""
_STEP = re.compile(r"^global_step_(\d+)$")


@contextlib.contextmanager
def new_folder(target: str | Path, **facts: Any) -> Iterator[Path]:
    """Yield a temporary folder, which replaces `target` when the block ends without an error.

    The manifest contains `facts` (JSON values), and the size and the checksum of every file. An error in the block
    removes the temporary folder.
    """
    work = begin(target)
    try:
        yield work
        finish(target, fingerprints(work, files_in(work)), facts)
    except BaseException:
        with contextlib.suppress(OSError):  # the next call removes it
            _remove_local(work)
        raise


def begin(target: str | Path) -> Path:
    """Create and return an empty temporary folder next to `target`. `finish` renames it to `target`."""
    target = Path(target).expanduser().absolute()
    _restore_replaced(target)
    work, aside = target.with_name(target.name + _UNFINISHED), target.with_name(target.name + _REPLACED)
    for leftover in (work, aside):
        _clear(leftover)
    make_folder(target.parent)
    work.mkdir()
    (work / MANIFEST).write_bytes(_UNFINISHED_MANIFEST)
    for path in (work / MANIFEST, work):
        flush(path)
    return work


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, and flush their names to the disk."""
    folder = folder.absolute()
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    if missing:  # a file in the place of the folder is named by whatever uses the folder
        folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        flush(path.parent)


def finish(target: str | Path, files: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Write the manifest, and rename the folder that `begin` created to `target`.

    `files` is the result of `fingerprints`. An existing `target` is renamed first and deleted last, so that the old or
    the new folder exists if the process is killed. If it contains other files, it is renamed only.
    """
    target = Path(target).expanduser().absolute()
    work, aside = target.with_name(target.name + _UNFINISHED), target.with_name(target.name + _REPLACED)
    contents = {"format": FORMAT, "facts": dict(facts), "files": dict(sorted(files.items()))}
    new = work / (MANIFEST + _UNFINISHED)
    new.write_text(_manifest_text(contents), encoding="utf-8")
    flush(new)
    os.replace(new, work / MANIFEST)
    for path in (*(folder for folder in work.rglob("*") if folder.is_dir()), work):
        flush(path)
    if os.path.lexists(target):
        os.replace(target, aside)
    os.replace(work, target)
    flush(target.parent)
    _clear(aside)


@contextlib.contextmanager
def new_file(target: str | Path, durable: bool = True) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces `target` when the block ends without an error.

    The caller decides whether an existing `target` may be replaced. If not `durable`, nothing is flushed to the disk.
    """
    target = Path(target).expanduser().absolute()
    folder = target.with_name(target.name + _UNFINISHED)
    _clear(folder)
    folder.mkdir()
    work = folder / (f"new-{MANIFEST}" if target.name == MANIFEST else target.name)
    try:
        (folder / MANIFEST).write_bytes(_UNFINISHED_MANIFEST)
        yield work
        if durable:
            flush(work)
        os.replace(work, target)
        if durable:
            flush(target.parent)
    finally:
        with contextlib.suppress(OSError):  # the next call removes it
            _remove_local(folder)


def lock_folder(folder: Path) -> IO[str] | None:
    """Lock a folder until the returned file is closed or the process ends. Return None if it is locked already.

    If the file system does not support locks, a warning is logged. StorageError is raised if a pipe is in the place of
    a file, because to open a pipe waits until another program does so too.
    """
    for entry in folder.iterdir():
        if entry.is_fifo():
            raise StorageError(f"{entry} is a pipe, not a file; rename or delete it, or use another folder")
    path = folder / LOCK
    path.touch()
    try:
        return lock_exclusively(path)
    except OSError as error:
        logger.warning("%s cannot be locked (%s); make sure that no other run writes to it", folder, error.strerror)
        return open(path, encoding="utf-8")


def fingerprints(root: Path, paths: Iterable[Path]) -> dict[str, Any]:
    """Flush files to the disk, and map the path of each one, relative to `root`, to its size and checksum."""
    entries = {}
    for path in paths:
        flush(path)
        entries[str(path.relative_to(root))] = _fingerprint(path)
    return entries


def files_in(folder: Path) -> list[Path]:
    """Return the files in a temporary folder and its subfolders, without the manifest."""
    return [path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST]


def _restore_replaced(target: Path) -> None:
    """Restore the previous `target` if a process was killed between the two renames of `finish`."""
    aside = target.with_name(target.name + _REPLACED)
    if not os.path.lexists(target) and _listed_files(aside / MANIFEST) is not None:
        # Another process may have restored it, or the file system is read-only.
        with contextlib.suppress(OSError):
            os.replace(aside, target)


def rename_existing(path: Path) -> Path:
    """Rename a file or folder to the first unused name, for example metrics.1.jsonl, and return its new path."""
    return _rename(path, path.stem, path.suffix)


def rename_aside(path: Path) -> None:
    """Rename a file or folder of others that is in the way, for example to `metrics.jsonl.1`, and log a warning."""
    aside = _rename(path, path.name, "")
    logger.warning("%s is in the way, and camshaft has not written all of it; renamed it to %s", path, aside)


def _rename(path: Path, stem: str, suffix: str) -> Path:
    number = 1
    while os.path.lexists(target := path.with_name(f"{stem}.{number}{suffix}")):
        number += 1
    path.rename(target)
    return target


def _clear(folder: Path) -> None:
    """Delete what this module has written to a folder, and rename the folder if anything remains."""
    if os.path.lexists(folder):
        _remove_local(folder)
    if os.path.lexists(folder):
        rename_aside(folder)


def _remove_local(folder: Path) -> None:
    """Delete a temporary folder of `begin`, or the files that a manifest lists. All other files remain.

    If the process is killed, the next call continues.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    manifest, removed = folder / MANIFEST, folder / _REMOVED
    if _is_marked(folder):
        for path in folder.iterdir():
            if path != manifest:  # which is deleted last
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        manifest.unlink()
    if _listed_files(manifest) is not None and not os.path.lexists(removed):
        os.replace(manifest, removed)  # the folder is incomplete from here on
    files = _listed_files(removed)
    for name in files or ():
        path = Path(os.path.realpath(folder), name)
        if os.path.realpath(path.parent) == str(path.parent):  # not in a folder behind a link
            path.unlink(missing_ok=True)
    if files is not None:
        for parent, _, _ in os.walk(folder, topdown=False):
            _remove_empty(parent)
        removed.unlink()
    _remove_empty(folder)


def _is_marked(folder: Path) -> bool:
    """Return True for a temporary folder of `begin`, also if a full disk or a power failure has cut its marker off."""
    content = _content(folder / MANIFEST)
    if content is None or content == _UNFINISHED_MANIFEST:
        return content is not None
    is_cut_off = _UNFINISHED_MANIFEST.startswith(content.rstrip(b"\0"))
    return is_cut_off and [path.name for path in folder.iterdir()] == [MANIFEST]


def _remove_empty(folder: str | Path) -> None:
    with contextlib.suppress(OSError):  # it is not empty
        os.rmdir(folder)


def _listed_files(manifest: Path) -> list[str] | None:
    """Return the files that a manifest lists, or None if it is missing or damaged, or if it is not a manifest."""
    content = _content(manifest)
    if content is not None:
        with contextlib.suppress(CheckpointError):
            return list(_parse_manifest(content, manifest.parent)["files"])
    return None


def _content(path: Path) -> bytes | None:
    """Return the content of a file, or None if it is missing or a link."""
    return path.read_bytes() if path.is_file() and not path.is_symlink() else None


def verify(folder: str | Path, share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """Verify the size and the checksum of every file, and return the facts in the manifest.

    With `share=(r, n)`, this process verifies only every n-th file, starting with file r.
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
    """Return True if `folder` contains a manifest and all files have the expected size. Checksums are not verified.

    Raise FormatError if a newer version has written the folder.
    """
    folder = Path(folder).expanduser()
    try:
        files = read_manifest(folder)["files"]
    except FormatError:
        raise
    except CheckpointError:
        return False
    return all((folder / name).is_file() and (folder / name).stat().st_size == files[name]["bytes"] for name in files)


def is_unfinished(path: Path) -> bool:
    """Return True if this is a temporary folder of `new_folder` that an interrupted process did not remove."""
    return path.name.endswith((_UNFINISHED, _REPLACED))


def remove_unfinished(path: Path) -> None:
    """Remove a temporary folder that an interrupted process has left behind. Any other file or folder remains."""
    if is_unfinished(path):
        _remove_local(path)


def read_manifest(location: str | Path) -> dict[str, Any]:
    """Return the manifest of a folder or URL: `format`, `facts`, `files` and its own checksum, `sha256`.

    Raise CheckpointError if it is missing or damaged, and FormatError if a newer version has written it.
    """
    if is_url(location):
        files, root = file_system(str(location))
        return _read_remote_manifest(files, root, str(location))
    folder = local(location)
    _restore_replaced(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a complete checkpoint: it contains no {MANIFEST}")
    return _parse_manifest(path.read_bytes(), folder)


def replace_facts(location: str | Path, facts: Mapping[str, Any]) -> None:
    """Replace the facts in the manifest of a folder or URL."""
    manifest = read_manifest(location)
    del manifest["sha256"]
    write_text(location, MANIFEST, _manifest_text({**manifest, "facts": dict(facts)}))


def _manifest_text(contents: Mapping[str, Any]) -> str:
    return json.dumps({**contents, "sha256": _digest_of(contents)}, indent=1)


def _parse_manifest(manifest: bytes, folder: str | Path) -> dict[str, Any]:
    try:
        contents = json.loads(manifest)
        checksum = contents.pop("sha256")
        number = contents.get("format", 0)
        if not all(map(isinstance, (contents["facts"], contents["files"], number), (dict, dict, int))):
            raise ValueError("its entries have the wrong type")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} cannot be read ({error})") from error
    if checksum != _digest_of(contents):
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} does not match its checksum")
    if number > FORMAT:
        raise FormatError(
            f"{folder} was written by a newer version of camshaft: its format is {number}, and this version reads "
            f"formats up to {FORMAT}; update camshaft, or use another folder"
        )
    for name in contents["files"]:
        if name.startswith("/") or ".." in name.split("/"):
            raise CheckpointError(f"{folder} is damaged: '{name}' in its {MANIFEST} is outside the folder")
    return {**contents, "sha256": checksum}


def read_state(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint; raise CheckpointError if it is damaged."""
    try:
        state = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.parent} is damaged: {path.name} cannot be read ({error})") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path.parent} is damaged: {path.name} contains no object")
    return state


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file that others have written. Raise ValueError with the file and the reason."""
    try:
        content = json.loads(file.read_bytes())
    except RecursionError as error:
        raise ValueError(f"{file} is not valid JSON (its brackets are nested too deeply)") from error
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        kind = "null" if content is None else f"a {type(content).__name__}"
        raise ValueError(f"{file} contains {kind} instead of a JSON object")
    return content


def _digest_of(contents: Mapping[str, Any]) -> str:
    """Return the checksum of a manifest, which covers the facts and the entries of all files."""
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def flush(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_replaceable(target: str | Path, kind: str) -> None:
    """Raise CheckpointError if `target` exists, is not empty, and was not written with the same `kind`."""
    target = Path(target).expanduser()
    _restore_replaced(target)
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if (target / MANIFEST).is_file() and read_manifest(target)["facts"].get("kind") == kind:
        return
    raise CheckpointError(f"{target} already exists and is not an older {kind} folder; use a new folder")


def prune(target: str | Path, keep: int) -> list[Path]:
    """Delete the oldest checkpoints of the series of `target`, so that `keep` remain. Return the deleted folders.

    If the path of `target` contains `global_step_<n>`, its series are the folders whose paths differ only in n, in the
    order of n. Otherwise they are the folders beside it whose manifests contain the same fact `series`, in the order
    of the fact `global_step`, and of their age if that is equal. `target` itself is then never deleted.
    """
    target = Path(target).expanduser()
    index = next((i for i, part in enumerate(target.parts) if _STEP.match(part)), None)
    if index is None:
        older = [folder for folder in _series(target) if folder != target]
        removed = older[: max(0, len(older) + 1 - keep)]
        for folder in removed:
            _remove_local(folder)
        return removed
    root, rest = Path(*target.parts[:index]), target.parts[index + 1 :]
    folders = [folder for _, folder in step_folders(root) if (folder.joinpath(*rest) / MANIFEST).is_file()]
    outdated = folders[: max(0, len(folders) - keep)]
    for folder in outdated:
        _remove_local(folder.joinpath(*rest))
        if rest and not any(folder.iterdir()):
            folder.rmdir()
    return [folder.joinpath(*rest) for folder in outdated]


def _series(target: Path) -> list[Path]:
    """Return the complete folders beside `target` with its fact `series`, oldest first."""
    series = read_manifest(target)["facts"].get("series")
    folders = []
    for folder in target.parent.iterdir() if series is not None else ():
        with contextlib.suppress(CheckpointError):  # not a checkpoint, or a damaged one
            facts = read_manifest(folder)["facts"]
            if facts.get("series") == series and not is_unfinished(folder):
                folders.append((facts["global_step"], (folder / MANIFEST).stat().st_mtime_ns, folder))
    return [folder for _, _, folder in sorted(folders)]


def step_folders(root: str | Path) -> list[tuple[int, Path]]:
    """Return (n, folder) of every `global_step_<n>` in `root`, oldest first."""
    root = Path(root).expanduser()
    if not root.is_dir():
        return []
    return sorted((int(match[1]), path) for path in root.iterdir() if (match := _STEP.match(path.name)))


def _fingerprint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as handle:
        digest = hashlib.file_digest(handle, "sha256")
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


# -- local paths and URLs -------------------------------------------------------------------------


def copy_folder(source: str, target: str) -> None:
    """Copy a complete folder and verify its checksums. `source` or `target` can be a URL (`hdfs://`, `s3://`, ...).

    A local `target` appears atomically. This is not possible at a URL, because object stores cannot rename. There, the
    manifest of an older copy is deleted first and the new manifest is written last, so that a folder with a manifest is
    always complete. Until then, a copy of it under another name lists the files of the upload. Only files that one of
    the two lists are replaced or deleted.
    """
    if is_url(source) and is_url(target):
        raise CheckpointError(f"cannot copy '{source}' to '{target}'; one of the two must be a local path")
    if is_url(target):
        _upload(local(source), target)
    elif is_url(source):
        _download(source, local(target))
    else:  # either folder can be on a network file system that hangs
        wait = Wait(f"copy of {source}", StorageError, NO_LIMIT)
        run_in_thread(lambda: _copy_local(local(source), local(target)), wait, lambda: f"the file system of {target}")


def _copy_local(source: Path, target: Path) -> None:
    verify(source)
    manifest, copy = read_manifest(source), begin(target)
    for name in manifest["files"]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / name, copy / name)
    files = fingerprints(copy, (copy / name for name in manifest["files"]))
    if damaged := [name for name in files if files[name] != manifest["files"][name]]:
        raise CheckpointError(f"{target} is damaged: '{damaged[0]}' differs from that of {source}; try again")
    finish(target, files, manifest["facts"])


def list_steps(location: str | Path) -> list[int]:
    """Return the numbers of the `global_step_<n>` folders in a folder or at a URL, sorted."""
    if not is_url(location):
        return [step for step, _ in step_folders(local(location))]
    files, root = file_system(str(location))
    names = [path.rstrip("/").rpartition("/")[2] for path in files.ls(root, detail=False)] if files.exists(root) else []
    return sorted(int(match[1]) for name in names if (match := _STEP.match(name)))


def write_text(location: str | Path, name: str, text: str) -> None:
    """Write a small file to a folder, atomically, or to a URL."""
    if is_url(location):
        files, root = file_system(str(location))
        files.pipe_file(f"{root}/{name}", text.encode())
        return
    with new_file(local(location) / name) as work:
        work.write_text(text, encoding="utf-8")


def read_text(location: str | Path, name: str) -> str | None:
    """Return the content of a file that `write_text` wrote, or None if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        if not is_url(location):
            return (local(location) / name).read_text(encoding="utf-8", errors="replace")
        files, root = file_system(str(location))
        return files.cat_file(f"{root}/{name}").decode(errors="replace")
    return None


def exists(folder: str | Path) -> bool:
    """Return True if a local folder exists, or if the folder at a URL contains a manifest."""
    if not is_url(folder):
        return local(folder).exists()
    files, root = file_system(str(folder))
    return files.exists(f"{root}/{MANIFEST}")


def remove(folder: str | Path) -> None:
    """Make a folder incomplete, and delete the files that its manifest lists. All other files remain.

    A temporary folder of `begin` is deleted with all its files.
    """
    if not is_url(folder):
        _remove_local(local(folder))
        return
    files, root = file_system(str(folder))
    _remove_copy(files, root, str(folder))


def _read_remote_manifest(files: Any, root: str, url: str, name: str = MANIFEST) -> dict[str, Any]:
    try:
        return _parse_manifest(files.cat_file(f"{root}/{name}"), url)
    except FileNotFoundError as error:
        raise CheckpointError(f"{url} is not a complete checkpoint: it contains no {name}") from error


def _remove_copy(files: Any, root: str, url: str) -> None:
    """Delete the files of a complete or interrupted upload. The manifest is renamed first and deleted last."""
    manifest, unfinished = f"{root}/{MANIFEST}", f"{root}/{MANIFEST}{_UNFINISHED}"
    with contextlib.suppress(CheckpointError):  # if the manifest is missing or damaged, its files are unknown
        _read_remote_manifest(files, root, url)
        files.pipe_file(unfinished, files.cat_file(manifest))
        files.rm_file(manifest)
    with contextlib.suppress(CheckpointError):
        names = _read_remote_manifest(files, root, url, MANIFEST + _UNFINISHED)["files"]
        for path in (manifest, *(f"{root}/{name}" for name in names), unfinished):
            if files.exists(path):
                files.rm_file(path)
    if files.exists(root) and not files.find(root):
        files.rm(root, recursive=True)  # some file systems keep empty folders


def _upload(origin: Path, url: str) -> None:
    verify(origin)
    expected = read_manifest(origin)["files"]
    files, root = file_system(url)
    _remove_copy(files, root, url)
    for name in (MANIFEST, *expected):
        if files.exists(f"{root}/{name}"):
            rename_aside_remotely(files, f"{root}/{name}")
    files.put_file(str(origin / MANIFEST), f"{root}/{MANIFEST}{_UNFINISHED}")
    for name in expected:
        files.put_file(str(origin / name), f"{root}/{name}")
    files.invalidate_cache()
    for name in expected:
        size = files.info(f"{root}/{name}")["size"]
        if size != expected[name]["bytes"]:
            raise CheckpointError(
                f"{url}: '{name}' has {size} bytes after the upload, but {expected[name]['bytes']} bytes in {origin}"
            )
    files.put_file(str(origin / MANIFEST), f"{root}/{MANIFEST}")
    with contextlib.suppress(OSError):  # a store may forbid deletion, and the copy is complete
        files.rm_file(f"{root}/{MANIFEST}{_UNFINISHED}")


def _download(url: str, goal: Path) -> None:
    files, root = file_system(url)
    manifest = _read_remote_manifest(files, root, url)
    copy = begin(goal)
    for name, expected in manifest["files"].items():
        path = copy / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            files.get_file(f"{root}/{name}", str(path))
        except FileNotFoundError as error:
            raise CheckpointError(f"{url} is incomplete: '{name}' is missing") from error
        if fingerprints(copy, [path]) != {name: expected}:
            raise CheckpointError(f"{url} is damaged or was corrupted in transit: '{name}' does not match its checksum")
    finish(goal, manifest["files"], manifest["facts"])
