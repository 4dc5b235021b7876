"""HTTP client for one vLLM server, with timeouts and bounded retries.

    client = HTTPClient("http://127.0.0.1:8000", Limit(3600.0, "engine_kwargs.timeout=3600"), retry_timeout=5)
    client.request("GET", "/v1/models")             # idempotent: retried on failure
    client.post_once("/pause?mode=wait")            # not idempotent: sent once
    with client.connection() as connection:         # one connection for many requests
        connection.request("POST", "/v1/completions", {...})

Connection errors and HTTP 5xx responses are retried until `retry_timeout` has passed. HTTP 4xx responses and timeouts
raise at once. Every error reports the URL. A server that does not answer is reported in the log (`Wait`).
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from camshaft.errors import GeneratorError, NoAnswerError, RolloutError
from camshaft.rollout.vllm.guard import API_KEY
from camshaft.subprocesses import Limit, Wait, run_in_thread

INITIAL_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.1, 2.0
"""Seconds between two attempts; the pause doubles after each attempt."""
MAX_ERROR_BODY = 2000
"""Maximum number of characters of a response body in an error message."""

REJECTED = (400, 401, 403, 404, 405, 422)
"""Statuses of requests that the server would reject again."""


class RequestRejected(RolloutError):
    """The server rejected a request, and would reject it again."""


class ServerUnavailable(GeneratorError):
    """The connection failed or the server answered with HTTP 5xx. A later attempt, or another server, may succeed."""


class HTTPClient:
    """Client that exchanges JSON over HTTP with the server at `url`.

    Args:
        url: Address of the server.
        limit: Time limit of a request. If None, the limit of the call that this process runs applies.
        retry_timeout: Time in seconds during which a failed request is retried.
        exit_report: Returns a description of how the server process ended. It returns an empty string while the process
            runs or if its state is unknown. A non-empty report is added to connection errors and stops the retries.
        describe: Returns a description of the server for messages.
        key: The server's API key, by default the value of the environment variable VLLM_API_KEY, if it is set.
    """

    def __init__(
        self,
        url: str,
        limit: Limit | None,
        retry_timeout: float,
        exit_report: Callable[[], str] = str,
        describe: Callable[[], str] | None = None,
        key: str | None = None,
    ):
        self.url, self.limit, self.retry_timeout, self.exit_report = url, limit, retry_timeout, exit_report
        self.describe = describe or (lambda: f"the server at {url}")
        self.key = os.environ.get(API_KEY) if key is None else key
        self.retries = 0

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Send an idempotent request on a new connection and retry it if it fails."""
        return self._run(path, lambda connection: connection.request(method, path, body))

    def post_once(self, path: str, body: Any = None) -> Any:
        """Send a POST request that changes state on the server. It is not retried."""
        return self._run(path, lambda connection: connection.request_once("POST", path, body))

    def _run(self, path: str, send: Callable[["RetryingConnection"], Any]) -> Any:
        """Send a request in a thread, report the wait for its response, and close the connection at the limit."""
        with self.connection() as connection:
            try:
                return run_in_thread(lambda: send(connection), Wait(path, NoAnswerError, self.limit), self.describe)
            except BaseException:
                connection.abort()
                raise

    def connection(self, stop_event: threading.Event | None = None) -> contextlib.closing["RetryingConnection"]:
        """Open a connection that reconnects after a failure. Setting `stop_event` ends the retries."""
        return contextlib.closing(RetryingConnection(self, stop_event or threading.Event()))


class RetryingConnection:
    """A persistent HTTP connection that retries failed requests."""

    def __init__(self, client: HTTPClient, stop_event: threading.Event):
        parts = urlsplit(client.url)
        connection_class = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        assert parts.hostname is not None
        self._connection = connection_class(parts.hostname, parts.port)
        self._client, self._stop_event = client, stop_event

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request and retry it until it succeeds or `retry_timeout` has passed."""
        deadline, pause = 0.0, INITIAL_PAUSE_SECONDS
        while True:
            try:
                return self.request_once(method, path, body)
            except ServerUnavailable as error:
                if report := self._client.exit_report():
                    raise GeneratorError(f"{self._client.url} did not answer {path}: the server {report}") from error
                deadline = deadline or time.monotonic() + self._client.retry_timeout
                if time.monotonic() + pause > deadline or self._stop_event.wait(pause):
                    raise
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
                self._client.retries += 1

    def request_once(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request and return the response body parsed as JSON, or None if it is empty."""
        client = self._client
        try:
            status, content = self._send(method, path, body)
        except (OSError, HTTPException) as error:
            self.close()
            report = client.exit_report()
            reason = f"the server {report}" if report else f"{type(error).__name__}: {error}"
            raise ServerUnavailable(f"{client.url} did not answer {path}: {reason}") from error
        if status >= 400:
            error_class = ServerUnavailable if status >= 500 else RolloutError
            if status in REJECTED:
                error_class = RequestRejected
            message = content.decode(errors="replace")[:MAX_ERROR_BODY]
            fix = f"; set {API_KEY} to the server's API key" if status == 401 else ""
            raise error_class(f"{client.url} answered {path} with HTTP {status}: {message}{fix}")
        try:
            return json.loads(content) if content else None
        except ValueError as error:
            raise RolloutError(
                f"{client.url} answered {path} with invalid JSON: {content[:80]!r}; check vllm_server_base_url"
            ) from error

    def _send(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        """Send a request and return the status code and body of the response."""
        headers = {"Content-Type": "application/json"}
        if self._client.key:
            headers["Authorization"] = f"Bearer {self._client.key}"
        data = None if body is None else json.dumps(body).encode()
        self._connection.request(method, path, data, headers)
        response = self._connection.getresponse()
        return response.status, response.read()

    def abort(self) -> None:
        """Shut down the socket from another thread, so that a pending request fails immediately without retries."""
        self._stop_event.set()
        connection_socket: socket.socket | None = self._connection.sock
        if connection_socket is not None:
            with contextlib.suppress(OSError):  # another thread may have closed the socket
                connection_socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()
