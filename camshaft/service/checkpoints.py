"""Names, paths and folders of saved weights.

    path = SavedPath.parse("tinker://2f9a:train:0/weights/step-20")
    checkpoints.write(path, record, lambda folder: role.call("save", model_id, folder, True), overwrite=False)
    path, saved = checkpoints.read("tinker://2f9a:train:0/weights/step-20", owner)

    served/2f9a/0/weights/step-20.json        what was saved, and the name of its folder; written last, atomically
    served/2f9a/0/weights/step-20.TIME/       checkpoint of the engine (engine/checkpoint.py)
    served/2f9a/0/states/120/                 state of the server's own after command 120

The small file decides which folder has the name, so an overwritten checkpoint is replaced as a whole, and one that is
being written cannot be seen. A folder that has lost its name is removed when no sampler uses it. Names and ids are
checked before they become paths.
"""

import contextlib
import itertools
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from camshaft import storage
from camshaft.config.engine import LoRAConfig
from camshaft.service.errors import CommandError

Kind = Literal["weights", "sampler_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights")

MAX_TTL = 10**9
"""Maximum time to live of saved weights, in seconds."""

_PATH = re.compile(r"tinker://([\w-]{1,64}):train:(\d{1,9})/(weights|sampler_weights)/([^/]+)")
_NAME = re.compile(r"[A-Za-z0-9_][\w.\-]{0,127}", re.ASCII)
_FOLDER = re.compile(r".+\.\d+")

logger = logging.getLogger(__name__)


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

    @property
    def model_id(self) -> str:
        return f"{self.session}:train:{self.number}"

    def __str__(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


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


def lora_of(record: Record) -> LoRAConfig | None:
    """Return the adapter of a model; None for rank 0, which trains all weights."""
    if not record.rank:
        return None
    return LoRAConfig(
        rank=record.rank,
        alpha=record.alpha,
        seed=record.seed,
        train_attn=record.train_attn,
        train_mlp=record.train_mlp,
        train_unembed=record.train_unembed,
    )


@dataclass(frozen=True)
class Saved:
    """Saved weights: their record, and the folder of the checkpoint. Times are those of `time.time`."""

    record: Record
    folder: Path
    number: int | None = None
    """Number of the command that has saved them; None for the server."""
    created_at: float = 0.0
    expires_at: float | None = None

    def num_bytes(self) -> int:
        """Return the size of the files, of which some may be removed at the same time."""
        size = 0
        for path in self.folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                size += path.stat().st_size if path.is_file() else 0
        return size


class Checkpoints:
    """Saved weights of all models, in one folder. Hold `lock` while a checkpoint is read."""

    def __init__(self, root: Path):
        self.root = root
        self.lock = threading.RLock()
        self._names = threading.Lock()
        """Held while a name changes, and not while a checkpoint is written or read."""
        self._reported: dict[Path, str] = {}
        """Last error of each folder that could not be swept."""

    def states_of(self, model_id: str) -> Path:
        """Return the folder for the states of a model that the server saves to restore it."""
        return self.folder_of(model_id) / "states"

    def folder_of(self, model_id: str) -> Path:
        """Return the folder of a model."""
        session, _, number = model_id.partition(":train:")
        return self.root / session / number

    def find(self, path: SavedPath) -> Saved | None:
        """Return what is saved under a path; None if there is nothing. Raise `CommandError` if its file is damaged."""
        text = storage.read_text(self._parent(path), f"{path.name}.json")
        if text is None:
            return None
        try:
            content = json.loads(text)
            record, folder = Record(**content.pop("record")), self._parent(path) / content.pop("folder")
            saved = Saved(record, folder, **content)
            return None if saved.expires_at is not None and saved.expires_at <= time.time() else saved
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CommandError(
                f"{path}: {path.name}.json does not describe saved weights; restore or move it"
            ) from error

    def get(self, path: SavedPath) -> Saved:
        """Return what is saved under a path. Raise `CommandError` if there is nothing."""
        saved = self.find(path)
        if saved is None:
            raise CommandError(f"{path}: no weights are saved under this path; check its session and name")
        return saved

    def read(self, text: str, owner: str) -> tuple[SavedPath, Saved]:
        """Return the weights of an owner at a path. Raise `CommandError` if there are none."""
        path = SavedPath.parse(text)
        saved = self.find(path)
        if saved is None or saved.record.owner != owner:
            raise CommandError(f"{text}: no weights are saved under this path; check its session and name")
        return path, saved

    def write(
        self,
        path: SavedPath,
        record: Record,
        save: Callable[[str], Any],
        overwrite: bool,
        number: int | None = None,
        ttl_seconds: float | None = None,
    ) -> None:
        """Save weights under a path. `save` writes the checkpoint to the folder that it gets.

        A command that is executed again after a crash finds the weights that it has saved under its number.
        """
        expires_at = _expiry(ttl_seconds)
        with self.lock:
            earlier = self.find(path)
            if earlier is not None and number is not None and earlier.number == number:
                return
            if earlier is not None and not overwrite:
                raise CommandError(
                    f"{path} exists, and saved weights do not change; use another name, or overwrite=True"
                )
            parent, now = self._parent(path), time.time()
            storage.make_folder(parent)
            folder = parent / f"{path.name}.{time.time_ns()}"  # which no earlier one has had
            save(str(folder))
            with self._names:
                self._name(path, Saved(record, folder, number, now, expires_at))

    def set_ttl(self, path: SavedPath, seconds: float | None) -> None:
        """Let saved weights expire after a time from now, or never."""
        with self._names:
            self._name(path, replace(self.get(path), expires_at=_expiry(seconds)))

    def remove(self, path: SavedPath) -> None:
        """Remove the name of saved weights. `sweep` removes their folder."""
        with self._names:
            (self._parent(path) / f"{path.name}.json").unlink(missing_ok=True)

    def sweep(self, used: Collection[str]) -> None:
        """Remove the weights that have expired or have no name, except those in folders that samplers use.

        A folder that cannot be swept is reported and left as it is.
        """
        with self.lock:
            for parent in self._parents():
                try:
                    self._sweep(parent, used)
                except (CommandError, OSError) as error:
                    if self._reported.get(parent) != str(error):
                        logger.warning("expired weights in %s are not removed: %s", parent, error)
                    self._reported[parent] = str(error)

    def _sweep(self, parent: Path, used: Collection[str]) -> None:
        found = {path: self.find(path) for path in _paths(parent)}
        for path, saved in found.items():
            if saved is None:
                self.remove(path)
        named = {saved.folder for saved in found.values() if saved is not None}
        for folder in parent.iterdir():
            if _FOLDER.fullmatch(folder.name) and folder not in named and str(folder) not in used:
                storage.remove(folder)

    def all_of(self, owner: str) -> list[tuple[SavedPath, Saved]]:
        """Return the saved weights of an owner, the newest first."""
        found: list[tuple[SavedPath, Saved]] = []
        for path in itertools.chain(*map(_paths, self._parents())):
            with contextlib.suppress(CommandError):  # of damaged files, which `sweep` reports
                if (saved := self.find(path)) is not None and saved.record.owner == owner:
                    found.append((path, saved))
        return sorted(found, key=lambda entry: -entry[1].created_at)

    def _parents(self) -> list[Path]:
        """Return the folders that contain saved weights."""
        return [folder for kind in KINDS for folder in self.root.glob(f"*/*/{kind}") if folder.parts[-2].isdecimal()]

    def _name(self, path: SavedPath, saved: Saved) -> None:
        content = asdict(saved) | {"folder": saved.folder.name}
        storage.write_text(self._parent(path), f"{path.name}.json", json.dumps(content, indent=1))

    def _parent(self, path: SavedPath) -> Path:
        return self.root / path.session / str(path.number) / path.kind


def _expiry(seconds: float | None) -> float | None:
    """Return the time at which weights with a time to live expire. Raise `CommandError` if it is not a valid one."""
    if seconds is None:
        return None
    if not 0 < seconds <= MAX_TTL:
        raise CommandError(f"ttl_seconds={seconds} is not from 1 to {MAX_TTL}; leave it out to keep the weights")
    return time.time() + seconds


def _paths(parent: Path) -> list[SavedPath]:
    """Return the paths of the weights in a folder."""
    session, number, kind = parent.parts[-3:]
    return [SavedPath(session, int(number), kind, file.stem) for file in parent.glob("*.json")]  # pyright: ignore
