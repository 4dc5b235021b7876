"""The checkpoints of a run on disk.

    <root>/global_step_20/actor/...                written atomically by the engine of the actor
                         /actor_huggingface/...    the weights as a Hugging Face folder, optional
                         /critic/...
                         /trainer/...              written last; its manifest lists the roles and their checksums
          /latest_checkpointed_iteration.txt       20
          /best_checkpointed_iteration.txt         10, the best step by validation, whose checkpoint is always kept
          /aside.1/global_step_30/...              checkpoints of an earlier run that this run does not resume

A checkpoint is complete if its `trainer` folder and the folders of all roles listed there are complete, and if these
roles were saved together. A run that is killed while it saves leaves an incomplete checkpoint, which is never loaded.
Retention removes an older checkpoint only when the newer one is complete.

The manifest of `trainer` contains the checksum of each role's manifest, so a role of another checkpoint is detected. An
engine that writes in the background ends later. Until the next save, or the end of the run, adds the checksum of such a
role, the role is recognized by its step.

Checkpoints can be copied to a mirror, which is another folder or a URL. If a run has no complete local checkpoint, the
manager fetches the newest one from the mirror.

The Hugging Face folder of a role is written before the checkpoint is complete, and removed together with the role. Runs
do not resume from it, so the checkpoint remains complete if the folder is moved, deleted or replaced.
"""

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from camshaft import storage
from camshaft.errors import CheckpointError, FormatError, StorageError
from camshaft.subprocesses import NO_LIMIT, Limit, limit_waits

LATEST = "latest_checkpointed_iteration.txt"
BEST = "best_checkpointed_iteration.txt"
TRAINER, STATE = "trainer", "state.json"
TENSORS = "in_flight.safetensors"
"""File with the tensors of the trainer, which are batches that are generated and not learned."""
_MAX_THREADS = 16

Write = Callable[[str, str | None], None]
"""`save_checkpoint` or `export` of a role. Arguments: the folder to write, and the folder in the mirror or None."""

logger = logging.getLogger(__name__)


def export_folder_name(role: str) -> str:
    """Return the name of the role's Hugging Face folder in a checkpoint."""
    return f"{role}_huggingface"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint: its step, folder, trainer state and roles."""

    step: int
    folder: Path
    state: dict[str, Any]
    roles: tuple[str, ...]
    is_fetched: bool = False
    """True if the checkpoint was just copied from the mirror, which holds no other files of the run."""

    def role(self, name: str) -> str:
        return str(self.folder / name)


class CheckpointManager:
    """Manage the checkpoints in the folder `root`, and their copies in `mirror`, a folder or a URL.

    `limit` is the time limit of each access to the mirror by this process.
    """

    def __init__(self, root: str | Path, mirror: str | None = None, limit: Limit = NO_LIMIT):
        self.root, self._limit = Path(root).expanduser(), limit
        self.mirror = None if mirror is None else mirror.rstrip("/")
        self._kept: set[Path] = set()
        """Old folders that retention has not removed, because they contain other files."""
        self._unbound: str | None = None
        """Name of the last checkpoint, if a role of it was still being written when the checkpoint was saved."""

    # -- writing ----------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        roles: Mapping[str, Write],
        state: Mapping[str, Any],
        keep: Mapping[str, int | None],
        exports: Mapping[str, Write] | None = None,
        best: int | None = None,
    ) -> SavedCheckpoint:
        """Save a checkpoint, and remove old checkpoints.

        Args:
            step: Number of the step, which names the folder.
            roles: Function per role that writes its folder.
            state: State of the trainer: JSON values, and tensors. It is written last and completes the checkpoint.
            keep: Number of checkpoints to keep per role. None, or a missing role, keeps all.
            exports: Function per role that writes its Hugging Face folder.
            best: Best step so far, whose checkpoint is always kept.
        """
        start = time.perf_counter()
        name = f"global_step_{step}"
        folder, copy = self.root / name, None if self.mirror is None else f"{self.mirror}/{name}"
        # Remove the `trainer` folder of an existing checkpoint first, so that it is incomplete while it is overwritten.
        with limit_waits(self._limit):
            for location in (str(folder), *([] if copy is None else [copy])):
                for old in (TRAINER, *roles, *map(export_folder_name, roles)):
                    if storage.exists(f"{location}/{old}"):
                        storage.remove(f"{location}/{old}")
        writers = {**roles, **{export_folder_name(role): write for role, write in (exports or {}).items()}}
        for part, write in writers.items():
            write(str(folder / part), None if copy is None else f"{copy}/{part}")
        self.bind()  # an engine ends the previous write before it starts the next one
        manifests = _checksums(folder, roles)
        facts = {"kind": "trainer", "global_step": step, "roles": list(roles), "manifests": manifests}
        with _errors_with_path(folder / TRAINER), storage.new_folder(folder / TRAINER, **facts) as work:
            _write_state(work, state)
        with limit_waits(self._limit):
            if copy is not None:
                storage.copy_folder(str(folder / TRAINER), f"{copy}/{TRAINER}")
            for location in (self.root, *([] if self.mirror is None else [self.mirror])):
                _write_marker(location, LATEST, step)
        # An engine can still be writing in the background. The new checkpoint is incomplete until it finishes.
        complete = len(manifests) == len(roles)
        self._unbound = None if complete else name
        protected_steps = self._record_best(best)
        for role in roles:
            self._remove_old(role, keep.get(role), step if complete else step - 1, protected_steps)
        self._remove_empty(step)
        note = "" if complete else "; still writing in the background"
        logger.info(
            "saved %s: %.1f s, %s%s", folder, time.perf_counter() - start, format_size(folder_size(folder)), note
        )
        return SavedCheckpoint(step, folder, dict(state), tuple(roles))

    def bind(self) -> None:
        """Add the checksums of roles that were written in the background to the manifest of the last checkpoint."""
        name, self._unbound = self._unbound, None
        if name is None:
            return
        with limit_waits(self._limit):
            for location in (self.root, *([] if self.mirror is None else [self.mirror])):
                trainer = f"{location}/{name}/{TRAINER}"
                try:
                    if storage.exists(trainer):  # unless the user has removed it
                        facts = storage.read_manifest(trainer)["facts"]
                        manifests = _checksums(self.root / name, facts["roles"])
                        storage.replace_facts(trainer, {**facts, "manifests": manifests})
                except (CheckpointError, StorageError, OSError) as error:
                    # Without its checksum, a role is recognized by its step.
                    logger.warning("the manifest of %s cannot be completed: %s. The run continues", trainer, error)

    def _record_best(self, best: int | None) -> set[int]:
        """Record the best step on disk, and return the steps that retention must keep.

        These are the best step and, until its checkpoint is complete, the previous best step.
        """
        folders = {step: folder for step, folder in storage.step_folders(self.root) if step == best}
        if best is None or not folders:
            return set()
        previous = read_marker(self.root, BEST) if _is_marker(storage.read_text(self.root, BEST)) else None
        _write_marker(self.root, BEST, best)
        return {best} if previous is None or find_problem(folders[best]) is None else {best, previous}

    def move_aside(self, after: int) -> None:
        """Move checkpoints of an earlier run with a step number above `after` to the folder `aside.<n>`.

        Otherwise they would be newer than the checkpoints of this run, which affects resuming and retention.
        """
        later = [folder for step, folder in storage.step_folders(self.root) if step > after]
        if not later:
            return
        number = 1
        while (aside := self.root / f"aside.{number}").exists():
            number += 1
        aside.mkdir()
        for folder in later:
            os.replace(folder, aside / folder.name)
        for marker in (LATEST, BEST):
            if _is_marker(storage.read_text(self.root, marker)):
                (self.root / marker).unlink(missing_ok=True)
        logger.info("moved checkpoints of an earlier run to %s: %s", aside, ", ".join(folder.name for folder in later))

    def _remove_old(self, role: str, count: int | None, newest: int, protected_steps: set[int]) -> None:
        """Remove the folders of `role` that are older than the last `count` complete ones up to step `newest`."""
        if count is None:
            return
        steps = [(step, folder) for step, folder in storage.step_folders(self.root) if step <= newest]
        complete = [step for step, folder in steps if _holds(folder, role)]
        for step, folder in steps:
            if step < min(complete[-count:], default=0) and step not in protected_steps:
                for old in (folder / export_folder_name(role), folder / role):
                    if old.is_dir():
                        self._remove(old)

    def _remove_empty(self, newest: int) -> None:
        """Remove checkpoints before step `newest` that contain no role, and nothing that others have written.

        Retention leaves them behind, and so does a run that is killed while it saves.
        """
        for step, folder in storage.step_folders(self.root):
            if step < newest and all(path.name == TRAINER or storage.is_unfinished(path) for path in folder.iterdir()):
                for path in folder.iterdir():
                    self._remove(path)
                with contextlib.suppress(OSError):  # something is kept in it
                    folder.rmdir()

    def _remove(self, folder: Path) -> None:
        """Remove an old checkpoint. A run does not end because this fails, for example on NFS if a file is open."""
        try:
            storage.remove(folder)
        except OSError as error:
            logger.warning("%s cannot be removed: %s. The next save tries again", folder, error)
            return
        if folder.exists() and folder not in self._kept:
            self._kept.add(folder)
            logger.warning(
                "%s is kept, because no intact manifest lists all of its files; delete it if you do not need it", folder
            )

    # -- reading ----------------------------------------------------------------------------------

    def latest(self) -> SavedCheckpoint | None:
        """Return the newest intact checkpoint, or None if no checkpoint has been saved.

        If `root` contains none, fetch one from the mirror. If all checkpoints are damaged, raise CheckpointError. A run
        that starts from the initial model would overwrite them.
        """
        saved = self._latest_local()
        with limit_waits(self._limit):
            if saved is None and self.mirror is not None and self._fetch(self.mirror):
                saved = self._latest_local()
                saved = saved and replace(saved, is_fetched=True)
        if saved is None:
            # A damaged checkpoint was complete once; interrupted saves do not count.
            damaged = [folder for _, folder in storage.step_folders(self.root) if _was_complete(folder)]
            if damaged:
                problem = find_problem(damaged[-1], verify=True)
                raise CheckpointError(
                    f"{self.root} contains no intact checkpoint; the number of damaged ones is {len(damaged)}. The "
                    f"newest: {problem}. Restore one from a backup, or start a new run with trainer.resume_mode=disable"
                )
        return saved

    def _fetch(self, mirror: str) -> bool:
        """Copy the newest complete checkpoint in the mirror to `root`, and return True if there is one."""
        # Checkpoints after the marker belong to an earlier run, which was started again from an earlier step.
        newest = storage.read_text(mirror, LATEST)
        for step in reversed(storage.list_steps(mirror)):
            name = f"global_step_{step}"
            if newest is not None and newest.strip().isdecimal() and step > int(newest):
                continue
            try:
                self._copy_to_root(f"{mirror}/{name}", self.root / name)
            except FormatError:
                raise
            except CheckpointError as error:
                logger.warning("skipped a checkpoint: %s", error)
                continue
            logger.info("fetched %s/%s, because %s contains no complete checkpoint", mirror, name, self.root)
            return True
        return False

    def _copy_to_root(self, source: str, folder: Path) -> None:
        """Copy a checkpoint. The `trainer` folder is copied last, so that an interrupted copy is incomplete."""
        parts = Parts.read(source)
        for role in parts.roles:  # before anything is copied
            problem = parts.mismatch(role, storage.read_manifest(f"{source}/{role}"))
            if problem is not None:
                raise CheckpointError(f"{source} is damaged: {problem}")
        for part in (*parts.roles, TRAINER):
            storage.copy_folder(f"{source}/{part}", str(folder / part))

    def _latest_local(self) -> SavedCheckpoint | None:
        for _, folder in reversed(storage.step_folders(self.root)):
            try:
                return self.open(folder)
            except FormatError:
                raise  # if the run resumed from an older step, it would overwrite this one
            except CheckpointError as error:
                logger.warning("skipped a checkpoint: %s", error)
        return None

    def open(self, folder: str | Path) -> SavedCheckpoint:
        """Return the checkpoint in `folder` after its checksums are verified.

        Raise CheckpointError if the checkpoint is incomplete or damaged.
        """
        folder = Path(folder).expanduser()
        if not folder.is_dir():
            raise CheckpointError(f"{folder} does not exist")
        checkpoints = storage.step_folders(folder)
        if checkpoints:
            example = checkpoints[-1][1]
            raise CheckpointError(f"{folder} contains several checkpoints; use one of them, for example {example}")
        storage.verify(folder / TRAINER)
        parts = Parts.read(folder)
        problem = parts.problem(folder)
        if problem is not None:
            raise CheckpointError(f"{folder} cannot be used: {problem}")
        threads = min(_MAX_THREADS, os.cpu_count() or 1)
        with ThreadPoolExecutor(threads) as pool:
            shares = [(folder / role, (index, threads)) for role in parts.roles for index in range(threads)]
            list(pool.map(lambda share: storage.verify(*share), shares))
        state = _read_state(folder / TRAINER)
        if parts.manifests is None:
            logger.info(
                "%s was saved by an earlier version, which did not record the checksums of its roles; only their steps "
                "have been compared",
                folder,
            )
        return SavedCheckpoint(parts.step, folder, state, tuple(parts.roles))


@dataclass(frozen=True)
class Parts:
    """The step and the roles of a checkpoint, according to the manifest of its `trainer` folder."""

    step: int
    roles: list[str]
    manifests: Mapping[str, str] | None
    """Checksum of the manifest of each role that was complete. None in a checkpoint of version 0.1.0."""

    @classmethod
    def read(cls, checkpoint: str | Path) -> Self:
        """Read the manifest in a folder or at a URL; raise CheckpointError if it does not list the parts."""
        facts = storage.read_manifest(f"{checkpoint}/{TRAINER}")["facts"]
        step, roles, manifests = (facts.get(name) for name in ("global_step", "roles", "manifests"))
        if not roles or not all(map(isinstance, (step, roles, manifests or {}), (int, list, dict))):
            raise CheckpointError(
                f"{checkpoint} is damaged: {TRAINER}/{storage.MANIFEST} does not list the roles and the step; restore "
                "the file from a backup"
            )
        return cls(step, roles, manifests)

    def problem(self, checkpoint: Path) -> str | None:
        """Return the reason why the checkpoint is incomplete, or None. Checksums of files are not verified."""
        if not storage.is_complete(checkpoint / TRAINER):
            return f"'{TRAINER}' is missing or incomplete"
        for role in self.roles:
            if not storage.is_complete(checkpoint / role):
                return f"'{role}' is missing or incomplete"
            problem = self.mismatch(role, storage.read_manifest(checkpoint / role))
            if problem is not None:
                return problem
        return None

    def mismatch(self, role: str, manifest: Mapping[str, Any]) -> str | None:
        """Return a sentence if the role with this manifest was saved with another checkpoint, otherwise None."""
        step = manifest["facts"].get("global_step")
        checksum = (self.manifests or {}).get(role)
        # Engines of third parties may record no step, or 0.
        belongs = step in (None, 0, self.step) if checksum is None else manifest["sha256"] == checksum
        if belongs:
            return None
        origin = "another checkpoint" if step in (None, 0, self.step) else f"the checkpoint of step {step}"
        return f"'{role}' belongs to {origin}, and 'trainer' to that of step {self.step}"


def _write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the tensors of a state to `TENSORS`, if there are any, and the other values to `STATE`."""
    tensors = {name: value.contiguous() for name, value in state.items() if isinstance(value, Tensor)}
    values = {name: value for name, value in state.items() if name not in tensors}
    (folder / STATE).write_text(json.dumps(values), encoding="utf-8")
    if tensors:
        save_file(tensors, folder / TENSORS)


@contextlib.contextmanager
def _errors_with_path(path: str | Path) -> Iterator[None]:
    """Add the path to an error of the disk, which names none if a write fails."""
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(f"{path} could not be written: {error}; check the free space of its disk") from error
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _read_state(folder: Path) -> dict[str, Any]:
    """Read what `_write_state` wrote. Its checksums are verified already."""
    tensors = load_file(folder / TENSORS) if (folder / TENSORS).exists() else {}
    return {**storage.read_state(folder / STATE), **tensors}


def _checksums(checkpoint: Path, roles: Iterable[str]) -> dict[str, str]:
    """Return the checksum of the manifest of each complete role."""
    complete = [role for role in roles if storage.is_complete(checkpoint / role)]
    return {role: storage.read_manifest(checkpoint / role)["sha256"] for role in complete}


# -- state of checkpoints ---------------------------------------------------------------------------


def find_problem(checkpoint: Path, verify: bool = False) -> str | None:
    """Return the reason why a checkpoint is incomplete or damaged, or None.

    File sizes, and the checksums of the manifests, are compared. With `verify`, the checksums of all files are verified
    as well.
    """
    try:
        if verify:
            CheckpointManager(checkpoint.parent).open(checkpoint)
            return None
        return Parts.read(checkpoint).problem(checkpoint)
    except CheckpointError as error:
        return str(error)


def _holds(checkpoint: Path, role: str) -> bool:
    """Return True if the state of the trainer and this role are complete, and were saved together."""
    folders = checkpoint / TRAINER, checkpoint / role
    try:
        complete = all(map(storage.is_complete, folders))
        return complete and Parts.read(checkpoint).mismatch(role, storage.read_manifest(folders[1])) is None
    except CheckpointError:
        return False


def _was_complete(step: Path) -> bool:
    """Return True if all manifests exist; an interrupted save lacks some."""
    if not (step / TRAINER / storage.MANIFEST).exists():
        return False
    try:
        roles = Parts.read(step).roles
    except CheckpointError:
        return True
    return all((step / role / storage.MANIFEST).exists() for role in roles)


def folder_size(folder: Path) -> int:
    """Return the total size of all files in a folder, in bytes."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # renamed by a thread that is still writing
                size += os.stat(os.path.join(parent, name)).st_size
    return size


def format_size(count: float) -> str:
    """Format a number of bytes, for example 1234567 as "1.2 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _write_marker(location: str | Path, marker: str, step: int) -> None:
    """Write a step number to the file `LATEST` or `BEST`. A local file with other content is renamed."""
    if not storage.is_url(location) and not _is_marker(storage.read_text(location, marker)):
        storage.rename_aside(storage.local(location) / marker)
    with _errors_with_path(f"{location}/{marker}"):
        storage.write_text(location, marker, str(step))


def _is_marker(text: str | None) -> bool:
    return text is None or not text.strip("\0 \n") or text.strip().isdecimal()


def read_marker(root: Path, marker: str) -> int | None:
    """Return the step number in the file `LATEST` or `BEST`, or None if the file does not exist."""
    text = storage.read_text(root, marker)
    if text is None:
        return None
    if text.strip().isdecimal():
        return int(text)
    raise CheckpointError(f"{root / marker} does not contain a step number, but {text[:40]!r}; delete the file")
