"""What a place on disk holds of a run: the folder of one role, and what its engine says of the model in it.

    found = find(Path("checkpoints/demo"))      # a run's folder, global_step_20 in it, or global_step_20/critic
    found.folder, found.model.head              # (.../global_step_20/actor, "causal_lm")

Nothing is loaded; the files themselves are held against their checksums when the engine reads them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from camshaft import storage
from camshaft.checkpoint import CheckpointManager
from camshaft.checkpoint.manager import TRAINER
from camshaft.config.engine import EngineModel
from camshaft.engine.checkpoint import FACTS, facts_of
from camshaft.errors import CheckpointError

FIRST = "actor"
"""The role of a step that is meant where none is named."""


@dataclass(frozen=True)
class Stored:
    """The checkpoint of one role."""

    folder: Path
    model: EngineModel
    """As the run had it."""
    seed: int
    tokenizer: str | None
    """The folder of the run's tokenizer, where the trainer says."""


def find(place: Path) -> Stored:
    """The role that `place` means: its own folder, of a step the actor (or its only role), of a run the newest step."""
    place = place.expanduser().absolute()
    folder = place if (place / FACTS).is_file() and not (place / TRAINER).is_dir() else _role_of(_step_of(place))
    storage.read_manifest(folder)  # without one it was not written to its end
    told: dict[str, Any] = facts_of(folder).get("engine", {})
    if "model" not in told:
        raise CheckpointError(f"{folder} does not say which model it is of; its engine keeps no such entry in {FACTS}")
    return Stored(folder, EngineModel(**told["model"]), told["seed"], _tokenizer(folder.parent / TRAINER))


def _step_of(place: Path) -> Path:
    """The folder of a step that is whole."""
    if not place.is_dir():
        raise CheckpointError(f"there is no folder {place}")
    if storage.step_folders(place):
        saved = CheckpointManager(place).latest()
        if saved is None:
            raise CheckpointError(f"{place}: none of its steps is whole; the role folders in them may be, name one")
        return saved.folder
    if place in [folder for _, folder in storage.step_folders(place.parent)]:
        return CheckpointManager(place.parent).open(place).folder
    inside = ", ".join(sorted(path.name for path in place.iterdir())[:8]) or "nothing"
    raise CheckpointError(
        f"{place} is no checkpoint (it holds {inside}). Name the folder of a run, a step in it (global_step_20), or a "
        "role of a step (global_step_20/actor)"
    )


def _role_of(step: Path) -> Path:
    roles = storage.read_manifest(step / TRAINER)["facts"]["roles"]
    return step / (FIRST if FIRST in roles else roles[0])


def _tokenizer(trainer: Path) -> str | None:
    path = trainer / "state.json"
    return json.loads(path.read_text(encoding="utf-8")).get("tokenizer") if path.is_file() else None
