"""Which steps of a run are on disk, and which of them can be trusted.

    <root>/global_step_20/actor/...      written by the actor's engine, whole or not at all
                         /critic/...
                         /trainer/...    written last: its manifest lists the roles that belong to the step
          /latest_checkpointed_iteration.txt

A step counts as saved when its `trainer` folder is whole and every role that it lists is. A run killed
between two roles leaves a step that nobody mistakes for a checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from camshaft import storage
from camshaft.errors import CheckpointError

LATEST = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Saved:
    """One step that is whole."""

    step: int
    folder: Path
    state: dict[str, Any]

    def role(self, name: str) -> str:
        return str(self.folder / name)


class CheckpointManager:
    """The steps under one root."""

    def __init__(self, root: str | Path):
        self.root = Path(root).expanduser()

    def save(self, step: int, roles: Mapping[str, Callable[[str], None]], state: Mapping[str, Any]) -> Saved:
        """Let every role write its folder, then write `state` (JSON) and mark the step as whole."""
        folder = self.root / f"global_step_{step}"
        for name, write in roles.items():
            write(str(folder / name))
        with storage.new_folder(folder / "trainer", kind="trainer", global_step=step, roles=list(roles)) as work:
            (work / "state.json").write_text(json.dumps(state), encoding="utf-8")
        marker = self.root / (LATEST + ".unfinished")
        marker.write_text(str(step), encoding="utf-8")
        os.replace(marker, self.root / LATEST)
        self._forget_steps_without_roles()
        return Saved(step, folder, dict(state))

    def latest(self) -> Saved | None:
        """The newest step that is whole, or None."""
        for _, folder in reversed(storage.step_folders(self.root)):
            if self._is_whole(folder):
                return self.open(folder)
        return None

    def open(self, folder: str | Path) -> Saved:
        """A step by its folder; an error says what is missing."""
        folder = Path(folder).expanduser()
        if not folder.is_dir():
            raise CheckpointError(f"there is no checkpoint folder {folder}")
        facts = storage.verify(folder / "trainer")
        for name in facts["roles"]:
            if not storage.is_complete(folder / name):
                raise CheckpointError(f"{folder} is incomplete: '{name}' was not written to its end")
        state = json.loads((folder / "trainer" / "state.json").read_text(encoding="utf-8"))
        return Saved(facts["global_step"], folder, state)

    def _is_whole(self, folder: Path) -> bool:
        if not storage.is_complete(folder / "trainer"):
            return False
        roles = storage.read_manifest(folder / "trainer")["facts"]["roles"]
        return all(storage.is_complete(folder / name) for name in roles)

    def _forget_steps_without_roles(self) -> None:
        """Retention removes the folders of roles; the trainer's small one goes with the last of them."""
        for _, folder in storage.step_folders(self.root):
            if [path.name for path in folder.iterdir()] == ["trainer"]:
                storage.remove(folder)
