"""Lists of training runs, saved weights and sessions, and the removal of saved weights.

    runs = Runs(checkpoints, sessions)
    runs.list_runs("local", Page(limit=20))
    runs.delete("local", "2f9a:train:0", "weights", "step-20")

A training run is a model that is in training or has saved weights. Everything belongs to the key of its session.
"""

import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from camshaft.service.checkpoints import Checkpoints, Record, Saved, SavedPath
from camshaft.service.errors import CommandError, Refused
from camshaft.service.sessions import Sessions
from camshaft.wire.schemas import TrainingRun

TYPES = {"weights": "training", "sampler_weights": "sampler"}
"""Type of a checkpoint, as clients know it, by the kind of its path."""


@dataclass(frozen=True)
class Page:
    """Part of a list that a client asks for."""

    limit: int = 100
    offset: int = 0

    @staticmethod
    def of_query(query: dict[str, list[str]], limit: int = 100) -> "Page":
        """Return the part that the parameters of a URL name."""
        texts = [query.get(name, [str(default)])[-1] for name, default in (("limit", limit), ("offset", 0))]
        if not all(text.isdecimal() and len(text) < 10 for text in texts):
            raise Refused(f"limit={texts[0]} and offset={texts[1]} must be integers of at least 0")
        return Page(int(texts[0]), int(texts[1]))

    def cut(self, entries: list[Any]) -> list[Any]:
        return entries[self.offset :][: self.limit]

    def cursor(self, entries: list[Any]) -> dict[str, int]:
        return {"offset": self.offset, "limit": self.limit, "total_count": len(entries)}


class Runs:
    """Models, saved weights and sessions of each key. Methods are called from several threads."""

    def __init__(self, checkpoints: Checkpoints, sessions: Sessions):
        self.checkpoints, self.sessions = checkpoints, sessions

    def list_runs(self, owner: str, page: Page) -> dict[str, Any]:
        runs = list(self._runs(owner).values())
        return {"training_runs": page.cut(runs), "cursor": page.cursor(runs)}

    def get_run(self, owner: str, model_id: str) -> dict[str, Any]:
        runs = self._runs(owner)
        if model_id not in runs:
            raise Refused(f"there is no training run {model_id} of this key", HTTPStatus.NOT_FOUND)
        return runs[model_id]

    def list_checkpoints(self, owner: str, page: Page, model_id: str | None = None) -> dict[str, Any]:
        """Return the saved weights of a model, or of all models."""
        found = [
            _describe(path, saved)
            for path, saved in self.checkpoints.all_of(owner)
            if model_id in (None, path.model_id)
        ]
        return {"checkpoints": page.cut(found), "cursor": page.cursor(found)}

    def list_sessions(self, owner: str, page: Page) -> dict[str, Any]:
        return {"sessions": page.cut([session.identifier for session in self.sessions if session.owner == owner])}

    def get_session(self, owner: str, identifier: str) -> dict[str, Any]:
        session = self.sessions.find(identifier, owner)
        return {
            "training_run_ids": [model.identifier for model in list(session.models.values())],
            "sampler_ids": [sampler.identifier for sampler in list(session.samplers.values())],
        }

    def delete(self, owner: str, model_id: str, kind: str, name: str) -> dict[str, Any]:
        """Delete saved weights. Samplers that use them keep them."""
        self.checkpoints.remove(self._find(owner, model_id, kind, name))
        return {}

    def set_ttl(self, owner: str, model_id: str, kind: str, name: str, seconds: int | None) -> dict[str, Any]:
        """Let saved weights expire after a time from now; None: never."""
        path = self._find(owner, model_id, kind, name)
        try:
            self.checkpoints.set_ttl(path, seconds)
        except CommandError as error:
            raise Refused(str(error)) from error
        return {}

    def _find(self, owner: str, model_id: str, kind: str, name: str) -> SavedPath:
        try:
            return self.checkpoints.read(f"tinker://{model_id}/{kind}/{name}", owner)[0]
        except CommandError as error:
            raise Refused(str(error), HTTPStatus.NOT_FOUND) from error

    def _runs(self, owner: str) -> dict[str, dict[str, Any]]:
        """Return the training runs of a key by id, the last used first."""
        facts: dict[str, tuple[Record, float]] = {}
        last: dict[tuple[str, str], dict[str, Any]] = {}
        for path, saved in self.checkpoints.all_of(owner):  # the newest first
            facts.setdefault(path.model_id, (saved.record, saved.created_at))
            last.setdefault((path.model_id, path.kind), _describe(path, saved))
        for session in self.sessions:
            used_at = time.time() - (time.monotonic() - session.seen_at)
            for model in list(session.models.values()) if session.owner == owner else ():
                facts[model.identifier] = (model.facts.record, used_at)
        return {
            model_id: asdict(
                TrainingRun(
                    training_run_id=model_id,
                    base_model=record.base_model,
                    model_owner=record.owner,
                    is_lora=bool(record.rank),
                    lora_rank=record.rank or None,
                    last_request_time=_format_time(used_at),
                    last_checkpoint=last.get((model_id, "weights")),
                    last_sampler_checkpoint=last.get((model_id, "sampler_weights")),
                )
            )
            for model_id, (record, used_at) in sorted(facts.items(), key=lambda item: -item[1][1])
        }


def _describe(path: SavedPath, saved: Saved) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{path.kind}/{path.name}",
        "checkpoint_type": TYPES[path.kind],
        "time": _format_time(saved.created_at),
        "tinker_path": str(path),
        "size_bytes": saved.num_bytes(),
        "expires_at": None if saved.expires_at is None else _format_time(saved.expires_at),
    }


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
