"""Results of commands, which clients fetch with long polls.

future = futures.create(session, ("2f9a:train:0", 7))
future.resolve(Result.of_json({"path": path}))
futures.fetch(futures.find(identifier), 20.0)          # None while it is pending
futures.expire(600.0)                                  # forgets what was fetched 600 s ago
"""

import itertools
import json
import secrets
import threading
import time
from collections import Counter, deque
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

    def __init__(
        self,
        session: str,
        key: tuple[str, int] | None = None,
        identifier: str | None = None,
        digest: bytes = b"",
        is_kept: bool = False,
        then: Callable[["Future"], object] | None = None,
    ):
        """`then` is called when there is a result."""
        self.identifier = identifier or secrets.token_hex(16)
        self.session = session
        self.age = next(_AGES)
        """Position in the order in which futures were created."""
        self.key = key
        """Model or sampler, and number, of its entry in the log. None for the server's own jobs."""
        self.digest = digest
        """Digest of the request, by which a repeated one is recognized."""
        self.is_kept = is_kept
        """True if the result is kept until the session ends."""
        self.is_fetched = False
        """True if a client has got the result."""
        self._result: Result | None = None
        self._is_done = threading.Event()
        self._then = then

    @property
    def is_pending(self) -> bool:
        return self._result is None

    def resolve(self, result: Result) -> None:
        assert self._result is None, "a command was executed twice"
        self._result = result
        self._is_done.set()
        if self._then is not None:
            self._then(self)

    def wait(self, seconds: float) -> Result | None:
        """Return the result, or None if it is still pending after `seconds`."""
        self._is_done.wait(seconds)
        return self._result


class Futures:
    """Futures of all sessions, by identifier."""

    def __init__(self) -> None:
        self._futures: dict[str, Future] = {}
        self._num_pending = Counter[str]()
        """Number of futures without a result, by session."""
        self._fetched: deque[tuple[float, Future]] = deque()
        """Futures whose results expire, with the times of their first answers (`time.monotonic`)."""
        self._lock = threading.Lock()

    def create(
        self,
        session: str,
        key: tuple[str, int] | None = None,
        identifier: str | None = None,
        digest: bytes = b"",
        is_kept: bool = False,
    ) -> Future:
        future = Future(session, key, identifier, digest, is_kept, self._count_result)
        with self._lock:
            self._futures[future.identifier] = future
            self._num_pending[session] += 1
        return future

    def _count_result(self, future: Future) -> None:
        with self._lock:
            if future.identifier in self._futures:
                self._num_pending[future.session] -= 1

    def find(self, identifier: str) -> Future | None:
        with self._lock:
            return self._futures.get(identifier)

    def num_pending(self, session: str) -> int:
        with self._lock:
            return self._num_pending[session]

    def fetch(self, future: Future, seconds: float) -> Result | None:
        """Return a result for a client, or None if it is still pending after `seconds`."""
        result = future.wait(seconds)
        with self._lock:
            if result is not None and not future.is_fetched:
                future.is_fetched = True
                if not future.is_kept:
                    self._fetched.append((time.monotonic(), future))
        return result

    def expire(self, seconds: float) -> list[Future]:
        """Forget the futures that clients have fetched more than `seconds` ago, and return them."""
        limit, expired = time.monotonic() - seconds, list[Future]()
        with self._lock:
            while self._fetched and self._fetched[0][0] < limit:
                _, future = self._fetched.popleft()
                if self._futures.pop(future.identifier, None) is not None:
                    expired.append(future)
        return expired

    def forget(self, session: str) -> None:
        """Forget the futures of a session. Pending ones still run."""
        with self._lock:
            self._futures = {key: future for key, future in self._futures.items() if future.session != session}
            del self._num_pending[session]
