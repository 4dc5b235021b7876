"""Which steps of a run are on disk, and which of them can be trusted.

    <root>/global_step_20/actor/...      written by the actor's engine, whole or not at all
                         /actor_huggingface/...    if it is asked for: the weights as a model folder
                         /critic/...
                         /trainer/...    written last: its manifest lists the roles that belong to the step
          /latest_checkpointed_iteration.txt    20
          /best_checkpointed_iteration.txt      10: by validation, if the run looks for the best; never removed
          /aside.1/global_step_30/...    of an earlier run that this one did not continue

A step counts as saved when its `trainer` folder is whole and every role that it lists is. A run killed
between two roles leaves a step that nobody mistakes for a checkpoint, and retention removes an older step only
after the newer one counts.

The second place, where steps are copied, is only written to, but for a run that begins without any whole step of its
own: then the newest one there is fetched.

A role's model folder is written before the step counts and removed with the role's own. No run goes on from it, so
a step from which it was moved away counts all the same.
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
"""Writes one role to a folder, and to a second one unless that is None; `save_checkpoint` and `export` of a role do."""

logger = logging.getLogger(__name__)


def export_of(role: str) -> str:
    """The name of the role's model folder in a step."""
    return f"{role}_huggingface"


@dataclass(frozen=True)
class Saved:
    """One step that is whole."""

    step: int
    folder: Path
    state: dict[str, Any]
    roles: tuple[str, ...]

    def role(self, name: str) -> str:
        return str(self.folder / name)


class CheckpointManager:
    """The steps under `root`; each is copied to `second` too, a folder or a URL, if there is one."""

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
        """Let every role write its folder, then write `state` (JSON) and mark the step as whole.

        `keep` says of how many steps a role's folder stays; None, or a role that is not in it: of all. `exports` write
        the model folders of those roles that are to have one. `best` is the step that is kept whatever `keep` says.
        """
        start = time.perf_counter()
        name = f"global_step_{step}"
        folder, copy = self.root / name, None if self.second is None else f"{self.second}/{name}"
        # A step that is written again is not whole until all of it is new.
        for place in (str(folder), *([] if copy is None else [copy])):
            for old in (TRAINER, *roles, *map(export_of, roles)):
                if storage.is_there(f"{place}/{old}"):
                    storage.remove(f"{place}/{old}")
        writers = {**roles, **{export_of(role): write for role, write in (exports or {}).items()}}
        for part, write in writers.items():
            write(str(folder / part), None if copy is None else f"{copy}/{part}")
        with storage.new_folder(folder / TRAINER, kind="trainer", global_step=step, roles=list(roles)) as work:
            (work / "state.json").write_text(json.dumps(state), encoding="utf-8")
        if copy is not None:
            storage.copy_folder(str(folder / TRAINER), f"{copy}/{TRAINER}")
        for place in (self.root, *([] if self.second is None else [self.second])):
            storage.write_text(place, LATEST, str(step))
        # What a role writes in the background may not be there yet: until then the step before is the newest.
        counts = all(storage.is_complete(folder / role) for role in roles)
        spared = self._spared(best)
        for role in roles:
            self._retain(role, keep.get(role), step if counts else step - 1, spared)
        self._sweep(step)
        behind = "" if counts else "; the rest is being written"
        logger.info("saved %s: %.1f s, %s%s", folder, time.perf_counter() - start, in_words(size_of(folder)), behind)
        return Saved(step, folder, dict(state), tuple(roles))

    def _spared(self, best: int | None) -> set[int]:
        """The best step, and the one before it as long as the new one is not whole; says in the file which is best."""
        there = {step: folder for step, folder in storage.step_folders(self.root) if step == best}
        if best is None or not there:
            return set()
        before = marked(self.root, BEST)
        storage.write_text(self.root, BEST, str(best))
        return {best} if before is None or broken(there[best]) is None else {best, before}

    def put_aside(self, after: int) -> None:
        """Move the steps past `after` out of the way: they are of an earlier run that this one does not continue.

        Left in place, they would be newer than whatever this run saves: taken for the step to resume from,
        and kept in its stead.
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
        logger.info("%s of an earlier run: moved to %s", ", ".join(folder.name for folder in later), aside)

    def _retain(self, role: str, count: int | None, newest: int, spared: set[int]) -> None:
        """Remove the folders of `role` that are older than the newest `count` of whole steps up to `newest`."""
        if count is None:
            return
        steps = [(step, folder) for step, folder in storage.step_folders(self.root) if step <= newest]
        whole = [step for step, folder in steps if all(map(storage.is_complete, (folder / TRAINER, folder / role)))]
        for step, folder in steps:
            if step < min(whole[-count:], default=0) and step not in spared:
                for old in (folder / export_of(role), folder / role):
                    if old.is_dir():
                        storage.remove(old)

    def _sweep(self, now: int) -> None:
        """Remove steps before `now` that retention, or a kill in mid-write, left without any role."""
        for step, folder in storage.step_folders(self.root):
            if step < now and all(path.name == TRAINER or storage.is_unfinished(path) for path in folder.iterdir()):
                storage.remove(folder)

    # -- reading ----------------------------------------------------------------------------------

    def latest(self) -> Saved | None:
        """The newest step that is whole, fetched from the second place if there is none here; or None."""
        here = self._latest_here()
        if here is not None or self.second is None or not self._fetch(self.second):
            return here
        return self._latest_here()

    def _fetch(self, second: str) -> bool:
        """Copy the newest whole step of the second place to here."""
        # Steps past the marker are of an earlier run that this one began anew beside.
        newest = storage.read_text(second, LATEST)
        for step in reversed(storage.steps_at(second)):
            name = f"global_step_{step}"
            if newest is not None and step > int(newest):
                continue
            try:
                self._copy_here(f"{second}/{name}", self.root / name)
            except CheckpointError as error:
                logger.warning("passed over: %s", error)
                continue
            logger.info("fetched %s/%s: %s holds no step", second, name, self.root)
            return True
        return False

    def _copy_here(self, source: str, folder: Path) -> None:
        """Copy one step, its trainer folder last. What an attempt that broke off left does not count."""
        roles = storage.facts_at(f"{source}/{TRAINER}")["roles"]
        for role in roles:
            storage.facts_at(f"{source}/{role}")  # is it there? before anything is copied
        for part in (*roles, TRAINER):
            storage.copy_folder(f"{source}/{part}", str(folder / part))

    def _latest_here(self) -> Saved | None:
        for _, folder in reversed(storage.step_folders(self.root)):
            try:
                return self.open(folder)
            except CheckpointError as error:
                logger.warning("passed over: %s", error)
        return None

    def open(self, folder: str | Path) -> Saved:
        """A step by its folder; an error says what is missing."""
        folder = Path(folder).expanduser()
        if not folder.is_dir():
            raise CheckpointError(f"there is no checkpoint folder {folder}")
        inside = storage.step_folders(folder)
        if inside:
            raise CheckpointError(f"{folder} holds several steps; name one of them, for instance {inside[-1][1]}")
        facts = storage.verify(folder / TRAINER)
        problem = broken(folder)
        if problem is not None:
            raise CheckpointError(f"{folder} is incomplete: {problem}")
        state = json.loads((folder / TRAINER / "state.json").read_text(encoding="utf-8"))
        return Saved(facts["global_step"], folder, state, tuple(facts["roles"]))


# -- what is there, without trust in its bytes -----------------------------------------------------


def broken(step: Path) -> str | None:
    """Why a step does not count; None if it does. Sizes are looked at, checksums are not."""
    if not storage.is_complete(step / TRAINER):
        return f"'{TRAINER}' is not there, or was not written to its end"
    for role in storage.read_manifest(step / TRAINER)["facts"]["roles"]:
        if not storage.is_complete(step / role):
            return f"'{role}' is not there, or was not written to its end"
    return None


def size_of(folder: Path) -> int:
    """Bytes of all files in it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def in_words(count: float) -> str:
    """1234567 -> "1.2 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def marked(root: Path, marker: str) -> int | None:
    """The step that `LATEST` or `BEST` names."""
    text = storage.read_text(root, marker)
    return None if text is None else int(text)
