"""The checkpoints of a run on disk.

    <root>/global_step_20/actor/...                written atomically by the engine of the actor
                         /actor_huggingface/...    the weights as a Hugging Face folder, optional
                         /critic/...
                         /trainer/...              written last; its manifest lists the roles of the checkpoint
          /latest_checkpointed_iteration.txt       20
          /best_checkpointed_iteration.txt         10, the best step by validation, whose checkpoint is always kept
          /aside.1/global_step_30/...              checkpoints of an earlier run that this run does not resume

A checkpoint is complete if its `trainer` folder and the folders of all roles listed there are complete. A run that is
killed while it saves leaves an incomplete checkpoint, which is never loaded. Retention removes an older checkpoint only
when the newer one is complete.

Checkpoints can be copied to a mirror, which is another folder or a URL. If a run has no complete local checkpoint, the
manager fetches the newest one from the mirror.

The Hugging Face folder of a role is written before the checkpoint is complete, and removed together with the role. Runs
do not resume from it, so the checkpoint remains complete if the folder is moved or deleted.
"""

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from camshaft import storage
from camshaft.errors import CheckpointError
from camshaft.subprocesses import NO_LIMIT, Limit, limit_waits

LATEST = "latest_checkpointed_iteration.txt"
BEST = "best_checkpointed_iteration.txt"
TRAINER = "trainer"
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

    def role(self, name: str) -> str:
        return str(self.folder / name)


class CheckpointManager:
    """Manage the checkpoints in the folder `root`, and their copies in `mirror`, a folder or a URL.

    `limit` is the time limit of each access to the mirror by this process.
    """

    def __init__(self, root: str | Path, mirror: str | None = None, limit: Limit = NO_LIMIT):
        self.root, self._limit = Path(root).expanduser(), limit
        self.mirror = None if mirror is None else mirror.rstrip("/")

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
            state: State of the trainer as JSON values. It is written last and completes the checkpoint.
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
        with storage.new_folder(folder / TRAINER, kind="trainer", global_step=step, roles=list(roles)) as work:
            (work / "state.json").write_text(json.dumps(state), encoding="utf-8")
        with limit_waits(self._limit):
            if copy is not None:
                storage.copy_folder(str(folder / TRAINER), f"{copy}/{TRAINER}")
            for location in (self.root, *([] if self.mirror is None else [self.mirror])):
                storage.write_text(location, LATEST, str(step))
        # An engine can still be writing in the background. The new checkpoint is incomplete until it finishes.
        complete = all(storage.is_complete(folder / role) for role in roles)
        protected_steps = self._record_best(best)
        for role in roles:
            self._remove_old(role, keep.get(role), step if complete else step - 1, protected_steps)
        self._remove_empty(step)
        note = "" if complete else "; still writing in the background"
        logger.info(
            "saved %s: %.1f s, %s%s", folder, time.perf_counter() - start, format_size(folder_size(folder)), note
        )
        return SavedCheckpoint(step, folder, dict(state), tuple(roles))

    def _record_best(self, best: int | None) -> set[int]:
        """Record the best step on disk, and return the steps that retention must keep.

        These are the best step and, until its checkpoint is complete, the previous best step.
        """
        folders = {step: folder for step, folder in storage.step_folders(self.root) if step == best}
        if best is None or not folders:
            return set()
        previous = read_marker(self.root, BEST)
        storage.write_text(self.root, BEST, str(best))
        return {best} if previous is None or incomplete_reason(folders[best]) is None else {best, previous}

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
            (self.root / marker).unlink(missing_ok=True)
        logger.info("moved checkpoints of an earlier run to %s: %s", aside, ", ".join(folder.name for folder in later))

    def _remove_old(self, role: str, count: int | None, newest: int, protected_steps: set[int]) -> None:
        """Remove the folders of `role` that are older than the last `count` complete ones up to step `newest`."""
        if count is None:
            return
        steps = [(step, folder) for step, folder in storage.step_folders(self.root) if step <= newest]
        complete = [step for step, folder in steps if all(map(storage.is_complete, (folder / TRAINER, folder / role)))]
        for step, folder in steps:
            if step < min(complete[-count:], default=0) and step not in protected_steps:
                for old in (folder / export_folder_name(role), folder / role):
                    if old.is_dir():
                        _remove(old)

    def _remove_empty(self, newest: int) -> None:
        """Remove checkpoints before step `newest` that contain no role.

        Retention leaves them behind, and so does a run that is killed while it saves.
        """
        for step, folder in storage.step_folders(self.root):
            if step < newest and all(path.name == TRAINER or storage.is_unfinished(path) for path in folder.iterdir()):
                _remove(folder)

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
        if saved is None:
            # A damaged checkpoint was complete once; interrupted saves do not count.
            damaged = [folder for _, folder in storage.step_folders(self.root) if _was_complete(folder)]
            if damaged:
                raise CheckpointError(
                    f"{self.root} contains no intact checkpoint; the number of damaged ones is {len(damaged)}. The "
                    f"newest: {find_damage(damaged[-1])}. Restore one from a backup, or start a new run with "
                    "trainer.resume_mode=disable"
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
            except CheckpointError as error:
                logger.warning("skipped a checkpoint: %s", error)
                continue
            logger.info("fetched %s/%s, because %s contains no complete checkpoint", mirror, name, self.root)
            return True
        return False

    def _copy_to_root(self, source: str, folder: Path) -> None:
        """Copy a checkpoint. The `trainer` folder is copied last, so that an interrupted copy is incomplete."""
        roles = roles_of(storage.read_facts(f"{source}/{TRAINER}"), source)
        for role in roles:
            storage.read_facts(f"{source}/{role}")  # raises an error before anything is copied if the role is missing
        for part in (*roles, TRAINER):
            storage.copy_folder(f"{source}/{part}", str(folder / part))

    def _latest_local(self) -> SavedCheckpoint | None:
        for _, folder in reversed(storage.step_folders(self.root)):
            try:
                return self.open(folder)
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
        facts = storage.verify(folder / TRAINER)
        problem = incomplete_reason(folder)
        if problem is not None:
            raise CheckpointError(f"{folder} is incomplete: {problem}")
        roles = roles_of(facts, folder)
        threads = min(_MAX_THREADS, os.cpu_count() or 1)
        with ThreadPoolExecutor(threads) as pool:
            shares = [(folder / role, (index, threads)) for role in roles for index in range(threads)]
            list(pool.map(lambda share: storage.verify(*share), shares))
        state = json.loads((folder / TRAINER / "state.json").read_text(encoding="utf-8"))
        return SavedCheckpoint(facts["global_step"], folder, state, tuple(roles))


def roles_of(facts: Mapping[str, Any], folder: str | Path) -> list[str]:
    """Return the roles in the facts of a `trainer` folder; raise CheckpointError if they are missing."""
    roles = facts.get("roles")
    if not isinstance(roles, list) or not roles or not isinstance(facts.get("global_step"), int):
        raise CheckpointError(
            f"{folder} is damaged: {TRAINER}/{storage.MANIFEST} does not list the roles and the step; restore the file "
            "from a backup"
        )
    return roles


def find_damage(step: Path) -> str | None:
    """Return the reason why a checkpoint is incomplete or damaged, or None if it is intact. Checksums are verified."""
    try:
        CheckpointManager(step.parent).open(step)
    except CheckpointError as error:
        return str(error)
    return None


# -- state of checkpoints, without verifying checksums ----------------------------------------------


def incomplete_reason(step: Path) -> str | None:
    """Return the reason why a checkpoint is incomplete, or None if it is complete.

    File sizes are compared with the manifests. Checksums are not verified.
    """
    if not storage.is_complete(step / TRAINER):
        return f"'{TRAINER}' is missing or incomplete"
    for role in roles_of(storage.read_facts(step / TRAINER), step):
        if not storage.is_complete(step / role):
            return f"'{role}' is missing or incomplete"
    return None


def _remove(folder: Path) -> None:
    """Remove an old checkpoint. A run does not end because this fails, for example on NFS if a file is open."""
    try:
        storage.remove(folder)
    except OSError as error:
        logger.warning("%s cannot be removed: %s. The next save tries again", folder, error)


def _was_complete(step: Path) -> bool:
    """Return True if all manifests exist; an interrupted save lacks some."""
    if not (step / TRAINER / storage.MANIFEST).exists():
        return False
    try:
        roles = roles_of(storage.read_facts(step / TRAINER), step)
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


def read_marker(root: Path, marker: str) -> int | None:
    """Return the step number in the file `LATEST` or `BEST`, or None if the file does not exist."""
    text = storage.read_text(root, marker)
    if text is None:
        return None
    if text.strip().isdecimal():
        return int(text)
    raise CheckpointError(f"{root / marker} does not contain a step number, but {text[:40]!r}; delete the file")
