"""HTTP servers for programs, mostly those of one user on this machine.

    class Hello:
        def refuse(self, request): return None if bearer_token(request) == KEY else Reply(403, b"wrong key")
        def answer(self, request): return json_reply({"path": request.path})

    with LocalServer(Hello(), ServerLimits()) as server:
        server.start()                      # in a thread; or server.serve_forever()
        server.server_port

A server listens on the loopback interface or on a Unix socket. A request has to name this machine in its Host header,
so that pages of other sites cannot reach the server from a browser. A server with keys may listen on another interface,
where it has any name.
The service then permits or refuses it by its headers, before the body is read. The limits bound connections, bodies,
and the time in which a client sends a request or reads a reply. If there are too many connections, a further one
replaces the one without a request in progress that has been without a permitted request for the longest time. If all
have one, its request is answered with 429. Requests are not logged, because they contain keys.
"""

import contextlib
import io
import json
import os
import re
import select
import socket
import socketserver
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast
from urllib.parse import parse_qs, urlsplit

from camshaft.errors import ConfigError

MAX_FIELDS = 1000
"""Maximum number of parameters in the URL of a request."""
_HOST = re.compile(r"^(localhost|127\.0\.0\.1|\[::1\])(:\d+)?$")
LOOPBACK = "127.0.0.1"
_PROBE_SECONDS = 2.0
"""Time in which a server accepts a connection to its Unix socket."""
MAX_SURPLUS = 32
"""Maximum number of connections beyond the limit, each of which gets one answer."""
_SURPLUS_SECONDS = 5.0
"""Time limit for the request of such a connection."""
_BEARER = re.compile(r"^Bearer +(\S+) *$", re.IGNORECASE)


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a server."""

    connections: int = 64
    body: int = 0
    """Maximum number of bytes of the body of a request."""
    seconds: float = 30.0
    """Maximum time to receive a request, to send a part of a reply, and between two requests of a connection."""
    body_option: str = ""
    """Option of the command that sets `body`, for errors."""


class Request(NamedTuple):
    """A request. `body` is empty until the service has permitted the request."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: Mapping[str, str]
    body: bytes
    is_connected: Callable[[], bool]
    """Return False if the client has closed its connection."""


@dataclass(frozen=True)
class Reply:
    """A reply. A body that is an iterator is sent in parts."""

    status: int
    body: bytes | Iterator[bytes]
    kind: str = "text/plain"
    headers: Mapping[str, str] = field(default_factory=dict)
    writing: AbstractContextManager[object] = field(default_factory=contextlib.nullcontext)
    """Context in which the reply is written. It exits without an exception if the reply has been written completely."""
    close: bool = False
    """Close the connection afterwards."""


class Service(Protocol):
    """The answers of a server. Methods are called from several threads."""

    def refuse(self, request: Request) -> Reply | None:
        """Return None to permit a request, and otherwise the reply to it. Its body has not been read."""
        ...

    def answer(self, request: Request) -> Reply:
        """Return the reply to a permitted request."""
        ...


def json_reply(value: Any, status: int = HTTPStatus.OK, **options: Any) -> Reply:
    """Return a reply with a JSON value, which must not contain NaN or infinite numbers."""
    return Reply(status, json.dumps(value, default=str, allow_nan=False).encode(), "application/json", **options)


def bearer_token(request: Request) -> str | None:
    """Return the key in the Authorization header."""
    match = _BEARER.match(request.headers.get("Authorization", ""))
    return None if match is None else match[1]


class LocalServer(ThreadingHTTPServer):
    """Server on a loopback port, or on a Unix socket with mode 0600. It has one thread per connection."""

    daemon_threads = True

    def __init__(
        self,
        service: Service,
        limits: ServerLimits,
        port: int = 0,
        socket_path: Path | None = None,
        socket_option: str = "socket_path",
        host: str = LOOPBACK,
    ):
        """Open the server. `socket_option` is the option of a command that sets `socket_path`, for errors.

        With a `host` other than the loopback address, other machines can connect, so the service must refuse requests
        without a key.
        """
        self.service, self.limits, self.socket_path = service, limits, socket_path
        self.request_queue_size = limits.connections
        self.checks_host = socket_path is None and host in (LOOPBACK, "localhost")
        self._idle: dict[Any, None] = {}
        """Connections without a permitted request in progress, in the order of their last permitted request."""
        self._busy: set[Any] = set()
        self._surplus: set[Any] = set()
        """Connections beyond the limit."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        if socket_path is None:
            super().__init__((host, port), _Handler)
        else:
            self._open_socket(socket_path, socket_option)

    def _open_socket(self, path: Path, option: str) -> None:
        _remove_unused_socket(path, option)
        self.address_family = socket.AF_UNIX
        super().__init__(str(path), _Handler, bind_and_activate=False)  # pyright: ignore
        previous = os.umask(0o177)
        try:
            self.server_bind()
        finally:
            os.umask(previous)
        self._socket_file = path.lstat()
        self.server_activate()

    def server_bind(self) -> None:
        if self.socket_path is None:
            super().server_bind()
            return
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", 0

    def start(self) -> None:
        """Serve in a thread until `server_close`."""
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="http", daemon=True)
        self._thread.start()

    def server_close(self) -> None:
        """Close the server and all connections."""
        if self._thread is not None:
            self.shutdown()
            self._thread.join()
        super().server_close()
        if self.socket_path is not None:
            _remove_socket(self.socket_path, self._socket_file)
        with self._lock:
            connections = [*self._idle, *self._busy, *self._surplus]
        for connection in connections:
            _shut_down(connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread. Close one that is idle, or else refuse this one, if there are too many."""
        closed = None
        with self._lock:
            is_full = len(self._idle) + len(self._busy) >= self.limits.connections
            if not is_full or self._idle:
                if is_full:
                    closed = next(iter(self._idle))
                    del self._idle[closed]
                self._idle[request] = None
            elif len(self._surplus) < MAX_SURPLUS:
                self._surplus.add(request)
            else:
                closed = request
        if closed is request:
            self.shutdown_request(request)
            return
        if closed is not None:
            _shut_down(closed)
        super().process_request(request, client_address)

    @contextlib.contextmanager
    def permitted(self, connection: Any) -> Iterator[None]:
        """Keep a connection open inside the block, and make it the last one to be closed for a new one afterwards."""
        with self._lock:
            self._idle.pop(connection, None)
            self._busy.add(connection)
        try:
            yield
        finally:
            with self._lock:
                if connection in self._busy:
                    self._busy.remove(connection)
                    self._idle[connection] = None

    def is_surplus(self, connection: Any) -> bool:
        """Return True if there were too many connections when this one was opened."""
        with self._lock:
            return connection in self._surplus

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._surplus.discard(request)
            self._idle.pop(request, None)
            self._busy.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of an error, except that of a client which has gone."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Reader(io.RawIOBase):
    """The bytes of a connection. Each request has to arrive within a time limit."""

    def __init__(self, connection: socket.socket, seconds: float):
        self._connection, self._seconds = connection, seconds
        self.wait()

    def wait(self) -> None:
        """Expect another request, which has to begin and then to arrive within the limit."""
        self._has_begun, self._deadline = False, time.monotonic() + self._seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long")
        self._connection.settimeout(left)
        count = self._connection.recv_into(buffer)
        if not self._has_begun:
            self._has_begun, self._deadline = True, time.monotonic() + self._seconds
        return count


class _Handler(BaseHTTPRequestHandler):
    """Handler of one connection."""

    server: LocalServer
    protocol_version = "HTTP/1.1"
    server_version = "camshaft"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        if self.server.socket_path is None:
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        self._is_surplus = self.server.is_surplus(self.connection)
        seconds = self.server.limits.seconds
        self._reader = _Reader(self.connection, min(seconds, _SURPLUS_SECONDS) if self._is_surplus else seconds)
        self.rfile = cast(Any, io.BufferedReader(self._reader))

    def handle_one_request(self) -> None:
        super().handle_one_request()
        self._reader.wait()

    def _serve(self) -> None:
        if self._is_surplus:
            text = f"429: {self.server.limits.connections} connections are busy; try again\n"
            self._send(Reply(HTTPStatus.TOO_MANY_REQUESTS, text.encode(), headers={"Retry-After": "1"}, close=True))
            return
        try:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query, max_num_fields=MAX_FIELDS)
        except ValueError as error:
            self._send(Reply(HTTPStatus.BAD_REQUEST, f"400: {error}\n".encode(), close=True))
            return
        if self.server.checks_host and not _HOST.match(self.headers.get("Host", "")):
            self._send(Reply(HTTPStatus.FORBIDDEN, b"403: the Host header names another machine\n", close=True))
            return
        service = self.server.service
        headers = cast(Mapping[str, str], self.headers)
        request = Request(self.command, parts.path, query, headers, b"", self._is_connected)
        if (refused := service.refuse(request) or self._refuse_body()) is not None:
            self._send(refused)
            return
        with self.server.permitted(self.connection):
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length)
            if len(body) < length:  # the client has gone
                self.close_connection = True
                return
            self._send(service.answer(request._replace(body=body)))

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = _serve

    def _refuse_body(self) -> Reply | None:
        """Return a reply to a request whose body has no known length, or is too large."""
        text = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not text.isdecimal():
            return Reply(HTTPStatus.LENGTH_REQUIRED, b"411: send the body with a Content-Length\n", close=True)
        if len(text) > 18 or int(text) > self.server.limits.body:
            option = self.server.limits.body_option
            remedy = f", or start the server with a larger {option}" if option else ""
            text = f"413: the body has more than {self.server.limits.body} bytes; send less at once{remedy}\n"
            return Reply(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text.encode(), close=True)
        return None

    def _is_connected(self) -> bool:
        poll = select.poll()
        try:
            poll.register(self.connection, select.POLLIN)
            return not poll.poll(0) or self.connection.recv(1, socket.MSG_PEEK) != b""
        except (OSError, ValueError):  # closed here
            return False

    def _send(self, reply: Reply) -> None:
        self.connection.settimeout(self.server.limits.seconds)
        self.close_connection |= reply.close
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", reply.kind)
        if self.close_connection:
            self.send_header("Connection", "close")
        with reply.writing:
            if not isinstance(reply.body, bytes):
                self._send_parts(reply.body)
                return
            self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(reply.body)

    def _send_parts(self, parts: Iterator[bytes]) -> None:
        is_chunked = self.request_version != "HTTP/1.0"
        if is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.close_connection = True
        self.end_headers()
        for part in filter(None, parts):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part) if is_chunked else part)
        if is_chunked:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests, which contain keys."""


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has just been closed
        connection.shutdown(socket.SHUT_RDWR)


def _remove_unused_socket(path: Path, option: str) -> None:
    """Remove the socket that a killed server left behind. Raise ConfigError if a server still has it."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            _remove_socket(path, found)
            return
        except OSError:  # a server that is busy, or a socket of another type
            pass
    raise ConfigError(f"{path} is the socket of another program; set another {option}")


def _remove_socket(path: Path, found: os.stat_result) -> None:
    """Remove a socket unless another one has taken its place."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(path.lstat(), found):
            path.unlink()
