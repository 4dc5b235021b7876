"""The live page of runs: an HTTP server for one person on this machine.

    with PageServer(["checkpoints"]) as server:
        print(server.url)                       # contains the token
        server.serve_forever()

The server listens on the loopback interface or on a Unix socket. Each request needs the token, in the URL at first and
in a cookie afterwards, and a Host header that names this machine; every other request gets status 403. Runs and files
are addressed by their position in the server's own list, never by a path. There are at most `MAX_CONNECTIONS`
connections: a further one replaces the one that has been without a permitted request for the longest time.
"""

import contextlib
import hmac
import json
import math
import os
import re
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from camshaft.errors import CamshaftError, ConfigError
from camshaft.tracking.run_folder import RunFolder, find_runs
from camshaft.view import data
from camshaft.view.differences import differing_keys, ignored_keys, key_columns
from camshaft.view.ranking import ORDERS, Ranking

STATIC = Path(__file__).parent / "static"
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/uPlot.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/uPlot.css": ("uPlot.min.css", "text/css; charset=utf-8"),
}
"""Paths of the server -> file in the folder `static`, and its type."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
SEARCH_SECONDS = 10.0
"""Time between two searches for new runs."""
MAX_CONNECTIONS = 64
"""Maximum number of connections. A browser opens six."""
MAX_FIELDS = 1000
"""Maximum number of parameters of a request."""
MAX_DIGITS = 18
"""Maximum number of digits of a parameter, which fit into 64 bits."""
VIEWS = ("/runs", "/curves", "/phases", "/config", "/responses", "/ranked")
"""Paths of the data of the page."""
_HOST = re.compile(r"^(localhost|127\.0\.0\.1|\[::1\])(:\d+)?$")


class _QueryError(CamshaftError):
    """A parameter of a request is invalid."""


class Page:
    """The runs of a page and the data of its views. Calls are serialized, because they read files incrementally."""

    def __init__(self, folders: Sequence[str | Path]):
        self.folders = folders
        self.runs: list[RunFolder] = []
        self._rankings: dict[int, Ranking] = {}
        self._lock = threading.Lock()
        self._searched_at = -SEARCH_SECONDS

    def answer(self, path: str, query: dict[str, list[str]]) -> Any:
        """Return the JSON value of a path of the page, or None for an unknown one."""
        with self._lock:
            self._search()
            numbers = [number for number in _integers(query, "run") if number < len(self.runs)]
            runs = [self.runs[number] for number in numbers]
            if path == "/runs":
                return self.overview()
            if path == "/curves":
                first, last = (_integers(query, name)[:1] for name in ("first", "last"))
                return self.curves(runs, *first, *last) if first and last else self.curves(runs)
            if path == "/phases":
                return [data.phases(run) for run in runs]
            if path == "/config" and runs:
                return configs(runs)
            step, order = _integers(query, "step"), query.get("order", [""])[0]
            if path == "/responses" and runs and step:
                return data.responses(runs[0], step[0])
            if path == "/ranked" and runs and order in ORDERS:
                ranking = self._rankings.setdefault(numbers[0], Ranking(runs[0]))
                return {"order": order, "rows": ranking.rows(order)}
            return None

    def overview(self) -> dict[str, Any]:
        now = time.time()
        runs = [data.overview(run, now) for run in self.runs]
        return {"now": now, "runs": runs, "keys": key_columns(self.runs)}

    def curves(self, runs: Sequence[RunFolder], first: float = -math.inf, last: float = math.inf) -> dict[str, Any]:
        for run in runs:
            run.metrics.poll()
        names = tuple(dict.fromkeys(name for run in runs for name in run.metrics.names))
        return {
            "layout": data.layout(names),
            "descriptions": data.descriptions(names),
            "runs": [data.curves(run, first=first, last=last) for run in runs],
        }

    def _search(self) -> None:
        """Add runs that have appeared. The positions of earlier ones remain; folders that are gone have no metrics."""
        if time.monotonic() - self._searched_at < SEARCH_SECONDS:
            return
        self._searched_at = time.monotonic()
        known = {run.path.resolve() for run in self.runs}
        existing = [folder for folder in self.folders if Path(folder).expanduser().is_dir()]
        self.runs += [run for run in find_runs(*existing) if run.path.resolve() not in known]


def _integers(query: dict[str, list[str]], name: str) -> list[int]:
    texts = [text for text in query.get(name, []) if text.isdecimal()]
    if any(len(text) > MAX_DIGITS for text in texts):
        raise _QueryError(f"{name}: the number is too large; it can have {MAX_DIGITS} digits")
    return [int(text) for text in texts]


def configs(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Return the description of the first run, and the values of the config keys in which the runs differ."""
    first = runs[0]
    info = {name: value for name, value in first.info().items() if name != "config"}
    contents = [run.config() for run in runs]
    return {
        "info": info,
        "config": {key: str(value) for key, value in first.config().items()},
        "ignored": list(ignored_keys(first.config())),
        "names": [run.name for run in runs],
        "differences": {key: list(map(str, values)) for key, values in differing_keys(contents).items()},
    }


class _Handler(BaseHTTPRequestHandler):
    """Handler of one connection."""

    server: "PageServer"
    protocol_version = "HTTP/1.1"
    server_version = "camshaft"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        try:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query, max_num_fields=MAX_FIELDS)
        except ValueError as error:
            self._send(HTTPStatus.BAD_REQUEST, f"400: {error}\n".encode())
            return
        if not self._is_allowed(query):
            self._send(HTTPStatus.FORBIDDEN, b"403: open the URL that camshaft view has printed\n")
            return
        self.server.keep(self.connection)
        if parts.path in FILES:
            name, kind = FILES[parts.path]
            self._send(HTTPStatus.OK, (STATIC / name).read_bytes(), kind)
        else:
            try:
                value = self.server.page.answer(parts.path, query)
            except CamshaftError as error:
                status = HTTPStatus.BAD_REQUEST if isinstance(error, _QueryError) else HTTPStatus.NOT_FOUND
                self._send(status, _json({"error": str(error)}), "application/json")
                return
            if value is None:
                self._send(HTTPStatus.FORBIDDEN, b"403: no such page\n")
            else:
                self._send(HTTPStatus.OK, _json(value), "application/json")

    def _forbid(self) -> None:
        self.close_connection = True  # the body of the request is not read
        self._send(HTTPStatus.FORBIDDEN, b"403: the page only reads\n")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = _forbid

    def _is_allowed(self, query: dict[str, list[str]]) -> bool:
        host = self.headers.get("Host", "")
        if self.server.socket_path is None and not _HOST.match(host):
            return False
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            cookie = None
        tokens = [*query.get("token", []), *([] if cookie is None else [cookie.value])]
        return any(hmac.compare_digest(token.encode(), self.server.token.encode()) for token in tokens)

    def _send(self, status: HTTPStatus, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if status is HTTPStatus.OK:
            cookie = f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            self.send_header("Set-Cookie", cookie)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests, whose paths can contain the token."""


def _remove_unused_socket(path: Path) -> None:
    """Remove the socket that a killed server left behind."""
    if path.is_symlink() or not path.is_socket() or path.stat().st_uid != os.geteuid():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise ConfigError(f"{path} is the socket of another program; set another --socket")


class PageServer(ThreadingHTTPServer):
    """Server of the page on a loopback port, or on a Unix socket with mode 0600."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, folders: Sequence[str | Path], port: int = 0, socket_path: Path | None = None):
        self.page = Page(folders)
        self.token = secrets.token_urlsafe(24)
        self.socket_path = socket_path
        self._connections: dict[Any, None] = {}
        """Open connections, in the order of their last permitted request."""
        self._lock = threading.Lock()
        if socket_path is None:
            super().__init__(("127.0.0.1", port), _Handler)
        else:
            _remove_unused_socket(socket_path)
            self.address_family = socket.AF_UNIX
            super().__init__(str(socket_path), _Handler, bind_and_activate=False)  # pyright: ignore
            previous = os.umask(0o177)
            try:
                self.server_bind()
            finally:
                os.umask(previous)
            self.server_activate()
        self.cookie = f"camshaft_{self.server_port}"
        """Name of the cookie. Cookies of all ports of a host are sent to each of them."""

    def server_bind(self) -> None:
        if self.socket_path is None:
            super().server_bind()
            return
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", 0

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread. Close the oldest one if there are too many."""
        with self._lock:
            oldest = next(iter(self._connections), None) if len(self._connections) == MAX_CONNECTIONS else None
            self._connections.pop(oldest, None)
            self._connections[request] = None
        if oldest is not None:
            with contextlib.suppress(OSError):  # it has just been closed
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def keep(self, request: Any) -> None:
        """Make this connection the last one to be closed for a new one."""
        with self._lock:
            if self._connections.pop(request, request) is None:
                self._connections[request] = None

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of an error, except that of a client which has gone."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        super().server_close()
        if self.socket_path is not None:
            self.socket_path.unlink(missing_ok=True)

    @property
    def url(self) -> str:
        """URL of the page with its token. With a Unix socket, the port is that of the tunnel."""
        port = self.server_port if self.socket_path is None else "<port>"
        return f"http://127.0.0.1:{port}/?token={self.token}"


def _json(value: Any) -> bytes:
    return json.dumps(value, default=str, allow_nan=False).encode()
