"""The live page of runs: an HTTP server for one person on this machine.

    with PageServer(["checkpoints"]) as server:
        print(server.url)                       # contains the token
        server.serve_forever()

`camshaft/http.py` limits who can connect, and how much. Each request needs the token, in the URL at first and in a
cookie afterwards; every other request gets status 403. Runs and files are addressed by their position in the server's
own list, never by a path.
"""

import hmac
import math
import secrets
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any

from camshaft.errors import CamshaftError
from camshaft.http import LocalServer, Reply, Request, ServerLimits, json_reply
from camshaft.tracking.run_folder import RunFolder, find_runs
from camshaft.view import data
from camshaft.view.differences import differing_keys, ignored_keys, key_columns
from camshaft.view.lanes import lanes
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
MAX_DIGITS = 18
"""Maximum number of digits of a parameter, which fit into 64 bits."""


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
            if path == "/lanes":
                return [lanes(run) for run in runs]
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


class PageServer(LocalServer):
    """Server of the page on a loopback port, or on a Unix socket with mode 0600."""

    def __init__(self, folders: Sequence[str | Path], port: int = 0, socket_path: Path | None = None):
        self.page = Page(folders)
        self.token = secrets.token_urlsafe(24)
        super().__init__(self, ServerLimits(MAX_CONNECTIONS), port, socket_path, "--socket")
        self.cookie = f"camshaft_{self.server_port}"
        """Name of the cookie. Cookies of all ports of a host are sent to each of them."""

    @property
    def url(self) -> str:
        """URL of the page with its token. With a Unix socket, the port is that of the tunnel."""
        port = self.server_port if self.socket_path is None else "<port>"
        return f"http://127.0.0.1:{port}/?token={self.token}"

    def refuse(self, request: Request) -> Reply | None:
        if request.method != "GET":
            return _forbidden("the page only reads", close=True)
        try:
            cookie = SimpleCookie(request.headers.get("Cookie", "")).get(self.cookie)
        except CookieError:
            cookie = None
        tokens = [*request.query.get("token", []), *([] if cookie is None else [cookie.value])]
        if any(hmac.compare_digest(token.encode(), self.token.encode()) for token in tokens):
            return None
        return _forbidden("open the URL that camshaft view has printed")

    def answer(self, request: Request) -> Reply:
        if request.path in FILES:
            name, kind = FILES[request.path]
            return Reply(HTTPStatus.OK, (STATIC / name).read_bytes(), kind, self._headers)
        try:
            value = self.page.answer(request.path, request.query)
        except CamshaftError as error:
            status = HTTPStatus.BAD_REQUEST if isinstance(error, _QueryError) else HTTPStatus.NOT_FOUND
            return json_reply({"error": str(error)}, status, headers=HEADERS)
        return _forbidden("no such page") if value is None else json_reply(value, headers=self._headers)

    @property
    def _headers(self) -> dict[str, str]:
        return {**HEADERS, "Set-Cookie": f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"}


def _forbidden(reason: str, close: bool = False) -> Reply:
    return Reply(HTTPStatus.FORBIDDEN, f"403: {reason}\n".encode(), headers=HEADERS, close=close)
