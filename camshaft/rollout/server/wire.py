"""HTTP to one server, with bounded waits and bounded repetition.

    wire = Wire("http://127.0.0.1:8000", timeout=3600, retry_timeout=5)
    wire.ask("GET", "/v1/models")                      # repeated if need be
    wire.tell("/pause?mode=wait")                      # once: it may have happened though no answer came
    with wire.line() as line:                          # one connection for many requests
        line.ask("POST", "/v1/completions", {...})

Repeated is what the server did not take or answered with an error of its own (5xx), and only where asking twice is
asking once. What it refuses (4xx), or answers too late, is an error at once. All errors name the url.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from camshaft.errors import RolloutError

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds between two tries; each pause is twice the one before."""
SHOWN = 2000
"""So many characters of what a server says are in an error."""
API_KEY = "VLLM_API_KEY"
"""The variable of the environment with the key that the server wants, if it wants one; vLLM reads the same."""


class Unreachable(RolloutError):
    """Nobody took the request, or the server has trouble: trying later may help."""


class Wire:
    """See the map above. `ended` tells how the server ended, if that is known."""

    def __init__(self, url: str, timeout: float, retry_timeout: float, ended: Callable[[], str] = str):
        self.url, self.timeout, self.retry_timeout, self.ended = url, timeout, retry_timeout, ended
        self.retries = 0

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """For what changes nothing there."""
        with self.line() as line:
            return line.ask(method, path, body)

    def tell(self, path: str, body: Any = None) -> Any:
        """For what changes something there."""
        with self.line() as line:
            return line.once("POST", path, body)

    @contextlib.contextmanager
    def line(self, stopped: threading.Event | None = None) -> Iterator[Line]:
        """A connection, and a new one whenever it broke; `stopped` ends its repetitions."""
        line = Line(self, stopped or threading.Event())
        try:
            yield line
        finally:
            line.close()


class Line:
    """One connection."""

    def __init__(self, wire: Wire, stopped: threading.Event):
        parts = urlsplit(wire.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        assert parts.hostname is not None
        self._connection = kind(parts.hostname, parts.port, timeout=wire.timeout)
        self._wire, self._stopped = wire, stopped

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Repeated until it is answered or `retry_timeout` has passed."""
        deadline, pause = 0.0, FIRST_PAUSE
        while True:
            try:
                return self.once(method, path, body)
            except Unreachable as error:
                if ended := self._wire.ended():
                    raise RolloutError(f"{self._wire.url} did not answer {path}: it {ended}") from error
                deadline = deadline or time.monotonic() + self._wire.retry_timeout
                if time.monotonic() + pause > deadline or self._stopped.wait(pause):
                    raise
                pause = min(2 * pause, LONGEST_PAUSE)
                self._wire.retries += 1

    def once(self, method: str, path: str, body: Any = None) -> Any:
        """The answer as JSON; None for an empty one."""
        wire, seconds = self._wire, self._wire.timeout
        try:
            status, text = self._answer(method, path, body)
        except TimeoutError as error:
            self.close()
            raise RolloutError(
                f"{wire.url} has not answered {path} for {seconds:g} s; if it is only slow, give engine_kwargs.timeout "
                "more seconds"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            ended = wire.ended()
            how = f"it {ended}" if ended else f"{type(error).__name__}: {error}"
            raise Unreachable(f"{wire.url} did not answer {path}: {how}") from error
        if status >= 400:
            kind = Unreachable if status >= 500 else RolloutError
            raise kind(f"{wire.url} answered {path} with HTTP {status}: {text.decode(errors='replace')[:SHOWN]}")
        try:
            return json.loads(text) if text else None
        except ValueError as error:
            raise RolloutError(f"{wire.url} answered {path} with something that is not JSON: {text[:80]!r}") from error

    def _answer(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(API_KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        self._connection.request(method, path, data, headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def hang_up(self) -> None:
        """From another thread: whoever waits here for an answer is told that none will come."""
        place: socket.socket | None = self._connection.sock
        if place is not None:
            with contextlib.suppress(OSError):  # it was closed meanwhile
                place.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()
