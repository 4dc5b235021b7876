"""Sessions of clients, which own models and samplers.

A session ends when its client finishes it, or after a time without a heartbeat. There is no request to unload a model:
a model is released when its session ends.
"""

import re
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus

from packaging.specifiers import SpecifierSet

from camshaft.plugins import TESTED_SDK
from camshaft.service.commands import Repetitions
from camshaft.service.errors import Refused
from camshaft.service.futures import Future
from camshaft.service.models import Model
from camshaft.service.sampling import Sampler, Version

FIRST_SDK = (0, 25)
"""First version of the SDK that sends protobuf."""


@dataclass
class Session:
    """A client that has been started once."""

    owner: str
    """Name of its key."""
    identifier: str = field(default_factory=lambda: secrets.token_hex(8))
    seen_at: float = field(default_factory=time.monotonic)
    """Time of the last request (`time.monotonic`)."""
    models: dict[int, Model] = field(default_factory=dict)
    """Models by their number in the session."""
    samplers: dict[int, Sampler] = field(default_factory=dict)
    """Samplers by their number in the session."""
    missing_models: dict[str, Future] = field(default_factory=dict)
    """Models whose base model is not served since the last start, by id, with the futures of their creations. Their
    commands remain in the log."""
    missing_samplers: dict[int, Version] = field(default_factory=dict)
    """Weights of samplers whose base model is not served since the last start."""
    creations: Repetitions = field(default_factory=lambda: Repetitions("model"))
    lock: threading.RLock = field(default_factory=threading.RLock)

    def used_versions(self) -> set[Version]:
        """Return the weights of the samplers."""
        return {*(sampler.version for sampler in list(self.samplers.values())), *self.missing_samplers.values()}


class Sessions:
    """Sessions that have not ended."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._closed: dict[str, Session] = {}
        """Sessions that have ended, and whose models are still to be saved and released."""
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Session]:
        with self._lock:
            return iter(list(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: Session) -> None:
        with self._lock:
            self._sessions[session.identifier] = session

    def used_versions(self) -> set[Version]:
        """Return the weights of the samplers of all sessions."""
        return set[Version]().union(*(session.used_versions() for session in self))

    def get(self, identifier: str) -> Session:
        """Return a session that has not ended."""
        with self._lock:
            return self._sessions[identifier]

    def find(self, identifier: str, owner: str) -> Session:
        """Return a session. Raise `Refused` if it has ended, or belongs to another key."""
        with self._lock:
            session = self._sessions.get(identifier)
        if session is None:
            raise Refused(
                f"the session {identifier} has ended; create a new ServiceClient",
                HTTPStatus.GONE,
            )
        check_owner(session.owner, owner)
        session.seen_at = time.monotonic()
        return session

    def of_model(self, model_id: str, owner: str) -> tuple[Session, Model]:
        """Return a model and its session."""
        identifier, _, number = model_id.partition(":train:")
        session = self.find(identifier, owner)
        model = session.models.get(int(number)) if number.isdecimal() and len(number) < 10 else None
        if model is None:
            raise Refused(f"the session has no model {model_id}; create it first", HTTPStatus.NOT_FOUND)
        return session, model

    def of_sampler(self, sampler_id: str, owner: str) -> tuple[Session, Sampler]:
        """Return a sampler and its session."""
        identifier, _, number = sampler_id.partition(":sample:")
        session = self.find(identifier, owner)
        sampler = session.samplers.get(int(number)) if number.isdecimal() and len(number) < 10 else None
        if sampler is None:
            raise Refused(
                f"the session has no sampler {sampler_id}; create it first. A sampler of weights without a name ends "
                "when their model has published more than `max_published` sets: give a name to those to be kept",
                HTTPStatus.NOT_FOUND,
            )
        return session, sampler

    def close(self, session: Session) -> bool:
        """End a session. Return False if it has been closed already."""
        with self._lock:
            if self._sessions.pop(session.identifier, None) is None:
                return False
            self._closed[session.identifier] = session
            return True

    def forget(self, session: Session) -> None:
        """Forget a closed session."""
        with self._lock:
            self._closed.pop(session.identifier, None)

    def models_with_engines(self) -> list[Model]:
        """Return the models that have an engine or will get one, also those of closed sessions."""
        with self._lock:
            sessions = [*self._sessions.values(), *self._closed.values()]
        return [model for session in sessions for model in list(session.models.values()) if model.holds_engine]


def check_owner(owner: str, key: str) -> None:
    """Raise `Refused`, as for an unknown key, if something belongs to another key."""
    if owner != key:
        raise Refused("the API key is not valid for this", HTTPStatus.UNAUTHORIZED)


def check_sdk(version: str) -> str | None:
    """Return a warning about an SDK that is not tested. Raise `Refused` for one whose requests cannot be read."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return None
    number = (int(match[1]), int(match[2]))
    if number < FIRST_SDK:
        raise Refused(
            f"tinker {version} sends requests as JSON, which this server does not read; install tinker{TESTED_SDK}"
        )
    if SpecifierSet(TESTED_SDK).contains(f"{number[0]}.{number[1]}"):
        return None
    return f"camshaft serve is tested with tinker{TESTED_SDK}, and this is {version}; see docs/serve.md#newer-sdks"
