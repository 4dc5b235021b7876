"""Names, paths and folders of saved weights.

    path = SavedPath.parse("tinker://2f9a:train:0/weights/step-20")
    checkpoints.write(path, record, lambda folder: role.call("save", model_id, folder, True), overwrite=False)
    path, saved = checkpoints.read("tinker://2f9a:train:0/weights/step-20", owner)

    served/2f9a/0/weights/step-20.json        what was saved, and the name of its folder; written last, atomically
    served/2f9a/0/weights/step-20.1/          checkpoint of the engine (engine/checkpoint.py)

The small file decides which folder has the name, so an overwritten checkpoint is replaced as a whole, and one that is
being written cannot be seen. Names and ids are checked before they become paths.
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from camshaft import storage
from camshaft.service.errors import CommandError

Kind = Literal["weights", "sampler_weights"]

_PATH = re.compile(r"tinker://([\w-]{1,64}):train:(\d{1,9})/(weights|sampler_weights)/([^/]+)")
_NAME = re.compile(r"[A-Za-z0-9_][\w.\-]{0,127}", re.ASCII)


@dataclass(frozen=True)
class SavedPath:
    """A path of the form that the SDK knows: tinker://{session}:train:{number}/{kind}/{name}."""

    session: str
    number: int
    kind: Kind
    name: str

    @staticmethod
    def parse(text: str) -> "SavedPath":
        match = _PATH.fullmatch(text)
        if match is None or not _NAME.fullmatch(match[4]):
            raise CommandError(
                f"{text} is not the path of saved weights; use one that save_state returned, of the form "
                "tinker://SESSION:train:0/weights/NAME"
            )
        return SavedPath(match[1], int(match[2]), match[3], match[4])  # pyright: ignore[reportArgumentType]

    @staticmethod
    def of_model(model_id: str, kind: Kind, name: str | None) -> "SavedPath":
        """Return the path of new weights of a model."""
        if name is None or not _NAME.fullmatch(name):
            raise CommandError(
                f"{name!r} cannot be the name of saved weights; use up to 128 letters, digits, dots, hyphens and "
                "underscores, beginning with a letter, a digit or an underscore"
            )
        return SavedPath.parse(f"tinker://{model_id}/{kind}/{name}")

    def __str__(self) -> str:
        return f"tinker://{self.session}:train:{self.number}/{self.kind}/{self.name}"


@dataclass(frozen=True)
class Record:
    """Facts about saved weights."""

    base_model: str
    """Name of the base model, as clients know it."""
    owner: str
    """Name of the key whose session has saved them."""
    rank: int
    """Rank of the adapter; 0 for all weights."""
    alpha: float
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    by_server: bool = False
    """True for the state that the server has saved at the end of a session."""


@dataclass(frozen=True)
class Saved:
    """Saved weights: their record, and the folder of the checkpoint."""

    record: Record
    folder: Path


class Checkpoints:
    """Saved weights of all models, in one folder."""

    def __init__(self, root: Path):
        self.root = root

    def find(self, path: SavedPath) -> Saved | None:
        """Return what is saved under a path; None if there is nothing."""
        text = storage.read_text(self._parent(path), f"{path.name}.json")
        if text is None:
            return None
        content = json.loads(text)
        return Saved(Record(**content["record"]), self._parent(path) / content["folder"])

    def read(self, text: str, owner: str) -> tuple[SavedPath, Saved]:
        """Return the weights of an owner at a path. Raise `CommandError` if there are none."""
        path = SavedPath.parse(text)
        saved = self.find(path)
        if saved is None or saved.record.owner != owner:
            raise CommandError(f"{text}: no weights are saved under this path; check its session and name")
        return path, saved

    def write(self, path: SavedPath, record: Record, save: Callable[[str], Any], overwrite: bool) -> None:
        """Save weights under a path. `save` writes the checkpoint to the folder that it gets."""
        earlier = self.find(path)
        if earlier is not None and not overwrite:
            raise CommandError(f"{path} exists, and saved weights do not change; use another name, or overwrite=True")
        parent = self._parent(path)
        storage.make_folder(parent)
        numbers = [int(entry.name.rpartition(".")[2]) for entry in self._folders(path)]
        folder = parent / f"{path.name}.{max(numbers, default=0) + 1}"
        save(str(folder))
        content = {"folder": folder.name, "record": asdict(record)}
        storage.write_text(parent, f"{path.name}.json", json.dumps(content, indent=1))
        if earlier is not None:
            storage.remove(earlier.folder)

    def _folders(self, path: SavedPath) -> list[Path]:
        """Return all folders that a path has had, of which those of interrupted saves may remain."""
        pattern = re.compile(re.escape(path.name) + r"\.\d+")
        return [entry for entry in self._parent(path).iterdir() if pattern.fullmatch(entry.name)]

    def _parent(self, path: SavedPath) -> Path:
        return self.root / path.session / str(path.number) / path.kind
