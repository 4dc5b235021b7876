"""A folder on disk that is whole or not there: temporary name, manifest with checksums, rename.

    with new_folder("ckpt/global_step_20/actor", kind="engine", step=20) as folder:
        save_file(tensors, folder / "model.safetensors")
    manifest = verify("ckpt/global_step_20/actor")      # CheckpointError if a byte is missing

Engines, trainer and export write through here, so a run that is killed in mid-write never leaves
something that looks like a checkpoint.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from camshaft.errors import CheckpointError

MANIFEST = "manifest.json"
_UNFINISHED = ".unfinished"
_STEP = re.compile(r"^global_step_(\d+)$")


@contextlib.contextmanager
def new_folder(target: str | Path, **facts: Any) -> Iterator[Path]:
    """A folder to write into; it appears under `target` when the block ends well, replacing what was there.

    `facts` (JSON) are kept in the manifest beside the size and checksum of every file.
    """
    target = Path(target).expanduser().absolute()
    work = target.with_name(target.name + _UNFINISHED)
    if work.exists():
        shutil.rmtree(work)
    work.mkdir(parents=True)
    yield work
    files = {str(path.relative_to(work)): _fingerprint(path) for path in sorted(work.rglob("*")) if path.is_file()}
    manifest = json.dumps({"facts": facts, "files": files}, indent=1)
    with open(work / MANIFEST, "w", encoding="utf-8") as out:
        out.write(manifest)
        out.flush()
        os.fsync(out.fileno())
    if target.exists():
        shutil.rmtree(target)
    os.replace(work, target)


def verify(folder: str | Path) -> dict[str, Any]:
    """The facts given at writing, after every file was found with its size and checksum."""
    folder = Path(folder).expanduser()
    manifest = read_manifest(folder)
    for name, told in manifest["files"].items():
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
    """Is this what `new_folder` was writing when its process ended?"""
    return path.name.endswith(_UNFINISHED)


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} cannot be read ({error})") from error


def check_replaceable(target: str | Path, kind: str) -> None:
    """An error if `new_folder(target, kind=kind)` would replace something that is not an older one of its kind."""
    target = Path(target).expanduser()
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


def plain_path(url: str) -> Path:
    """The local path behind a path or a `file://` URL; other schemes are refused by name."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return Path(url).expanduser()
    if scheme == "file":
        return Path(rest)
    raise CheckpointError(f"'{url}': copies to {scheme}:// are not there yet; give a local path or leave it out")


def copy_folder(source: str, target: str) -> None:
    """Copy a complete folder under its own checksums; `target` appears whole or not at all."""
    origin, goal = plain_path(source), plain_path(target)
    verify(origin)
    work = goal.with_name(goal.name + _UNFINISHED)
    if work.exists():
        shutil.rmtree(work)
    shutil.copytree(origin, work)
    verify(work)
    if goal.exists():
        shutil.rmtree(goal)
    os.replace(work, goal)


def remove(folder: str | Path) -> None:
    """Delete a folder that `copy_folder` brought here."""
    shutil.rmtree(Path(folder).expanduser())
