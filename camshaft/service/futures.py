"""Results of commands, which clients fetch with long polls.

future = futures.create(session, ("2f9a:train:0", 7))
future.resolve(Result.of_json({"path": path}))
futures.find(identifier).wait(20.0)                    # None while it is pending
"""

import itertools
import json
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Category = Literal["user", "server"]

Statement = tuple[str, tuple[Any, ...]]
"""Statement of SQL, and its values."""

JSON = "application/json"
PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True)
class Result:
    """Body of the answer to a command. It never changes, so a client that fetches it twice gets the same bytes."""

    body: bytes
    kind: str = JSON
    has_failed: bool = False
    writes: tuple[Statement, ...] = field(default=(), compare=False)
    """What is added to the log together with the result."""

    @staticmethod
    def of_json(value: dict[str, Any]) -> "Result":
        return Result(json.dumps(value, allow_nan=False).encode())

    @staticmethod
    def of_message(message: Any) -> "Result":
        return Result(message.SerializeToString(), PROTOBUF)

    @staticmethod
    def of_error(category: Category, message: str) -> "Result":
        """Return the result of a command that has failed. It is no HTTP error, which clients would repeat."""
        return Result(json.dumps({"error": message, "category": category}).encode(), has_failed=True)


_AGES = itertools.count()


class Future:
    """The result of one command, or of one request for samples."""

    def __init__(self, session: str, key: tuple[str, int] | None = None, identifier: str | None = None):
        self.identifier = identifier or secrets.token_hex(16)
        self.session = session
        self.age = next(_AGES)
        """Position in the order in which futures were created."""
        self.key = key
        """Model or sampler, and number, of its entry in the log. None for the server's own jobs."""
        self.fetched_at: float | None = None
        """Time of the first answer with the result (`time.monotonic`)."""
        self.is_expired = False
        self._result: Result | None = None
        self._is_done = threading.Event()

    @property
    def is_pending(self) -> bool:
        return self._result is None

    def resolve(self, result: Result) -> None:
        assert self._result is None, "a command was executed twice"
        self._result = result
        self._is_done.set()

    def wait(self, seconds: float) -> Result | None:
        """Return the result, or None if it is still pending after `seconds`."""
        self._is_done.wait(seconds)
        if self._result is not None and self.fetched_at is None:
            self.fetched_at = time.monotonic()
        return self._result

    def expire(self, seconds: float) -> Result | None:
        """Replace the result by an error if a client has fetched it more than `seconds` ago. Return the error."""
        if self.is_expired or self.fetched_at is None or time.monotonic() - self.fetched_at <= seconds:
            return None
        message = f"this result was fetched more than {seconds:g} s ago (result_ttl) and is not kept any longer"
        self._result, self.is_expired = Result.of_error("user", message), True
        return self._result


class Futures:
    """Futures of all sessions, by identifier."""

    def __init__(self) -> None:
        self._futures: dict[str, Future] = {}
        self._lock = threading.Lock()

    def create(self, session: str, key: tuple[str, int] | None = None, identifier: str | None = None) -> Future:
        future = Future(session, key, identifier)
        with self._lock:
            self._futures[future.identifier] = future
        return future

    def find(self, identifier: str) -> Future | None:
        with self._lock:
            return self._futures.get(identifier)

    def num_pending(self, session: str) -> int:
        with self._lock:
            return sum(future.is_pending for future in self._futures.values() if future.session == session)

    def expire(self, seconds: float) -> list[tuple[Future, Result]]:
        """Forget the results that clients have fetched more than `seconds` ago. Return their futures, with errors."""
        with self._lock:
            futures = list(self._futures.values())
        return [(future, error) for future in futures if (error := future.expire(seconds)) is not None]

    def forget(self, is_obsolete: Callable[[Future], bool]) -> None:
        """Forget the futures for which the predicate is true. Pending ones still run."""
        with self._lock:
            self._futures = {key: future for key, future in self._futures.items() if not is_obsolete(future)}
