"""A local server with WebHDFS's REST API: a name node that redirects reads and writes to a data node.

    with WebHDFSServer() as server:
        fsspec.filesystem("webhdfs", host="127.0.0.1", port=server.port)
        server.url                             # webhdfs://127.0.0.1:PORT

Files are kept in memory. Requests and answers follow "WebHDFS REST API" of Hadoop 3: a write creates an empty file and
appends to it, each in two steps, and errors are `RemoteException` objects.
"""

import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

PREFIX = "/webhdfs/v1"


class WebHDFSServer(ThreadingHTTPServer):
    """Files and folders by path. Folders contain None. Modification times are a counter."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.port = self.server_address[1]
        self.url = f"webhdfs://127.0.0.1:{self.port}"
        self.files: dict[str, bytes | None] = {"/": None}
        self.times: dict[str, int] = {}
        self.clock = itertools.count(1_700_000_000_000, 1000)
        self.opened: list[str] = []
        """Paths of the files that were read from the data node."""

    def __enter__(self) -> "WebHDFSServer":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def write(self, path: str, content: bytes | None) -> None:
        parents = path.split("/")[1:-1]
        for depth in range(1, len(parents) + 1):
            self.files.setdefault("/" + "/".join(parents[:depth]), None)
        self.files[path] = content
        self.times[path] = next(self.clock)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WebHDFSServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(parts.path).removeprefix(PREFIX).rstrip("/") or "/"
        operation = query["op"].upper()
        if operation in ("OPEN", "CREATE", "APPEND") and "datanode" not in query:
            self._redirect(path, query)
            return
        getattr(self, f"_{operation.lower()}")(path, query, body)

    do_GET = do_PUT = do_POST = do_DELETE = _handle

    # -- data node ----------------------------------------------------------------------------------

    def _redirect(self, path: str, query: dict[str, str]) -> None:
        missing = query["op"].upper() != "CREATE" and self.server.files.get(path) is None
        if missing:
            self._error(path)
            return
        location = f"http://127.0.0.1:{self.server.port}{PREFIX}{path}?{urlencode({**query, 'datanode': '1'})}"
        self._send(307, b"", Location=location)

    def _open(self, path: str, query: dict[str, str], body: bytes) -> None:
        content = self.server.files[path]
        assert content is not None
        self.server.opened.append(path)
        start = int(query.get("offset", 0))
        self._send(200, content[start : start + int(query.get("length", len(content)))])

    def _create(self, path: str, query: dict[str, str], body: bytes) -> None:
        self.server.write(path, body)
        self._send(201, b"")

    def _append(self, path: str, query: dict[str, str], body: bytes) -> None:
        self.server.write(path, (self.server.files[path] or b"") + body)
        self._send(200, b"")

    # -- name node ----------------------------------------------------------------------------------

    def _getfilestatus(self, path: str, query: dict[str, str], body: bytes) -> None:
        if path not in self.server.files:
            self._error(path)
        else:
            self._json({"FileStatus": self._status(path, "")})

    def _liststatus(self, path: str, query: dict[str, str], body: bytes) -> None:
        if path not in self.server.files:
            self._error(path)
            return
        if self.server.files[path] is not None:
            statuses = [self._status(path, "")]
        else:
            inside = [name for name in self.server.files if name != "/" and name.rpartition("/")[0] == path.rstrip("/")]
            statuses = [self._status(name, name.rpartition("/")[2]) for name in inside]
        self._json({"FileStatuses": {"FileStatus": statuses}})

    def _mkdirs(self, path: str, query: dict[str, str], body: bytes) -> None:
        if path not in self.server.files:
            self.server.write(path, None)
        self._json({"boolean": True})

    def _delete(self, path: str, query: dict[str, str], body: bytes) -> None:
        inside = [name for name in self.server.files if name.startswith(f"{path}/")]
        if inside and query.get("recursive") != "true":
            self._json({"RemoteException": {"exception": "PathIsNotEmptyDirectoryException", "message": path}}, 403)
            return
        for name in [path, *inside]:
            self.server.files.pop(name, None)
        self._json({"boolean": True})

    def _status(self, path: str, suffix: str) -> dict[str, Any]:
        content = self.server.files[path]
        kind, size = ("DIRECTORY", 0) if content is None else ("FILE", len(content))
        time = self.server.times.get(path, 0)
        return {"pathSuffix": suffix, "type": kind, "length": size, "modificationTime": time, "permission": "644"}

    # -- answers ------------------------------------------------------------------------------------

    def _error(self, path: str) -> None:
        message = f"File does not exist: {path}"
        self._json({"RemoteException": {"exception": "FileNotFoundException", "message": message}}, 404)

    def _json(self, value: object, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode())

    def _send(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
