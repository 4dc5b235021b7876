"""The checkpoints of a run on disk.

    <root>/global_step_20/actor/...                written atomically by the actor's engine
                         /actor_huggingface/...    optional: the weights as a Hugging Face folder
                         /critic/...
                         /trainer/...              written last; its manifest lists the roles of the checkpoint
          /latest_checkpointed_iteration.txt       20
          /best_checkpointed_iteration.txt         10: the best step by validation, never removed
          /aside.1/global_step_30/...              of an earlier run that this run does not continue

A checkpoint is complete if its `trainer` folder and every role listed there are complete. A run that is killed between
two roles leaves an incomplete checkpoint, which is never loaded. Retention removes an older checkpoint only after the
newer one is complete.

Checkpoints are copied to an optional second location. The manager reads from it only if the run has no complete
local checkpoint: then it fetches the newest one.

The Hugging Face folder of a role is written before the checkpoint is complete and removed together with the role. A run
does not resume from it, so moving it away leaves the checkpoint complete.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from camshaft import storage
from camshaft.errors import CheckpointError

LATEST = "latest_checkpointed_iteration.txt"
BEST = "best_checkpointed_iteration.txt"
TRAINER = "trainer"

Write = Callable[[str, str | None], None]
"""Writes one role to a folder, and to a second one unless it is None: `save_checkpoint` and `export` of a role."""

logger = logging.getLogger(__name__)


def export_of(role: str) -> str:
    """Return the name of the role's Hugging Face folder in a checkpoint."""
    return f"{role}_huggingface"


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    step: int
    folder: Path
    state: dict[str, Any]
    roles: tuple[str, ...]

    def role(self, name: str) -> str:
        return str(self.folder / name)


class CheckpointManager:
    """The checkpoints in the folder `root`, with copies in `second`, a folder or a URL."""

    def __init__(self, root: str | Path, second: str | None = None):
        self.root = Path(root).expanduser()
        self.second = None if second is None else second.rstrip("/")

    # -- writing ----------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        roles: Mapping[str, Write],
        state: Mapping[str, Any],
        keep: Mapping[str, int | None],
        exports: Mapping[str, Write] | None = None,
        best: int | None = None,
    ) -> Saved:
        """Write every role, then `state` (JSON), which completes the checkpoint; then remove old checkpoints.

        `keep` is the number of checkpoints to keep per role; None, or a missing role, keeps all. `exports` writes the
        Hugging Face folders of the roles in it. The step `best` is always kept.
        """
        start = time.perf_counter()
        name = f"global_step_{step}"
        folder, copy = self.root / name, None if self.second is None else f"{self.second}/{name}"
        # A checkpoint that is overwritten becomes incomplete first.
        for location in (str(folder), *([] if copy is None else [copy])):
            for old in (TRAINER, *roles, *map(export_of, roles)):
                if storage.is_there(f"{location}/{old}"):
                    storage.remove(f"{location}/{old}")
        writers = {**roles, **{export_of(role): write for role, write in (exports or {}).items()}}
        for part, write in writers.items():
            write(str(folder / part), None if copy is None else f"{copy}/{part}")
        with storage.new_folder(folder / TRAINER, kind="trainer", global_step=step, roles=list(roles)) as work:
            (work / "state.json").write_text(json.dumps(state), encoding="utf-8")
        if copy is not None:
            storage.copy_folder(str(folder / TRAINER), f"{copy}/{TRAINER}")
        for location in (self.root, *([] if self.second is None else [self.second])):
            storage.write_text(location, LATEST, str(step))
        # A role may still write in the background; until then the checkpoint before is the newest complete one.
        complete = all(storage.is_complete(folder / role) for role in roles)
        kept = self._protected(best)
        for role in roles:
            self._retain(role, keep.get(role), step if complete else step - 1, kept)
        self._sweep(step)
        note = "" if complete else "; still writing in the background"
        logger.info("saved %s: %.1f s, %s%s", folder, time.perf_counter() - start, in_words(size_of(folder)), note)
        return Saved(step, folder, dict(state), tuple(roles))

    def _protected(self, best: int | None) -> set[int]:
        """Record the best step; returns the steps to keep: it and, until it is complete, the previous best."""
        folders = {step: folder for step, folder in storage.step_folders(self.root) if step == best}
        if best is None or not folders:
            return set()
        previous = read_marker(self.root, BEST)
        storage.write_text(self.root, BEST, str(best))
        return {best} if previous is None or incomplete_reason(folders[best]) is None else {best, previous}

    def move_aside(self, after: int) -> None:
        """Move the checkpoints after step `after` of an earlier run, which this run does not continue, to `aside.<n>`.

        In place they would count as newer than the checkpoints of this run, for resuming and for retention.
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

    def _retain(self, role: str, count: int | None, newest: int, kept: set[int]) -> None:
        """Remove folders of `role` older than its newest `count` complete checkpoints up to step `newest`."""
        if count is None:
            return
        steps = [(step, folder) for step, folder in storage.step_folders(self.root) if step <= newest]
        complete = [step for step, folder in steps if all(map(storage.is_complete, (folder / TRAINER, folder / role)))]
        for step, folder in steps:
            if step < min(complete[-count:], default=0) and step not in kept:
                for old in (folder / export_of(role), folder / role):
                    if old.is_dir():
                        storage.remove(old)

    def _sweep(self, now: int) -> None:
        """Remove checkpoints before step `now` without any role, left by retention or by a kill during a write."""
        for step, folder in storage.step_folders(self.root):
            if step < now and all(path.name == TRAINER or storage.is_unfinished(path) for path in folder.iterdir()):
                storage.remove(folder)

    # -- reading ----------------------------------------------------------------------------------

    def latest(self) -> Saved | None:
        """Return the newest complete checkpoint, fetched from the second location if `root` has none; or None."""
        saved = self._latest_local()
        if saved is not None or self.second is None or not self._fetch(self.second):
            return saved
        return self._latest_local()

    def _fetch(self, second: str) -> bool:
        """Copy the newest complete checkpoint of the second location to `root`."""
        # Checkpoints after the marker belong to an earlier run that was started over.
        newest = storage.read_text(second, LATEST)
        for step in reversed(storage.steps_at(second)):
            name = f"global_step_{step}"
            if newest is not None and step > int(newest):
                continue
            try:
                self._copy_to_root(f"{second}/{name}", self.root / name)
            except CheckpointError as error:
                logger.warning("skipped: %s", error)
                continue
            logger.info("fetched %s/%s, because %s has no complete checkpoint", second, name, self.root)
            return True
        return False

    def _copy_to_root(self, source: str, folder: Path) -> None:
        """Copy one checkpoint, its trainer folder last, so that an interrupted copy is recognized as incomplete."""
        roles = storage.facts_at(f"{source}/{TRAINER}")["roles"]
        for role in roles:
            storage.facts_at(f"{source}/{role}")  # raises before anything is copied if the role is missing
        for part in (*roles, TRAINER):
            storage.copy_folder(f"{source}/{part}", str(folder / part))

    def _latest_local(self) -> Saved | None:
        for _, folder in reversed(storage.step_folders(self.root)):
            try:
                return self.open(folder)
            except CheckpointError as error:
                logger.warning("skipped: %s", error)
        return None

    def open(self, folder: str | Path) -> Saved:
        """Open a checkpoint by its folder; raises an error if it is incomplete."""
        folder = Path(folder).expanduser()
        if not folder.is_dir():
            raise CheckpointError(f"{folder} does not exist")
        inside = storage.step_folders(folder)
        if inside:
            raise CheckpointError(f"{folder} is a folder of checkpoints; name one of them, for example {inside[-1][1]}")
        facts = storage.verify(folder / TRAINER)
        problem = incomplete_reason(folder)
        if problem is not None:
            raise CheckpointError(f"{folder} is incomplete: {problem}")
        state = json.loads((folder / TRAINER / "state.json").read_text(encoding="utf-8"))
        return Saved(facts["global_step"], folder, state, tuple(facts["roles"]))


# -- state of checkpoints, without verifying checksums ----------------------------------------------


def incomplete_reason(step: Path) -> str | None:
    """Return why a checkpoint is incomplete, or None. File sizes are checked, checksums are not."""
    if not storage.is_complete(step / TRAINER):
        return f"'{TRAINER}' is missing or incomplete"
    for role in storage.read_manifest(step / TRAINER)["facts"]["roles"]:
        if not storage.is_complete(step / role):
            return f"'{role}' is missing or incomplete"
    return None


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def in_words(count: float) -> str:
    """Format a number of bytes: 1234567 -> "1.2 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def read_marker(root: Path, marker: str) -> int | None:
    """Return the step in the file `LATEST` or `BEST`."""
    text = storage.read_text(root, marker)
    return None if text is None else int(text)
