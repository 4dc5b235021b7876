"""An HTTP server with scripted replies, for faults that a real server does not show on demand.

with fake_server(lambda path, body: (200, {"choices": []})) as fake:
    fake.url, fake.paths, fake.keys         # the URL, and the path and the Authorization header of every request
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Handler = Callable[[str, Any], tuple[int, Any]]
HANG_UP = 0
"""A status that closes the connection without a reply."""


@dataclass
class FakeServer:
    url: str
    paths: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


@contextmanager
def fake_server(reply: Handler, port: int = 0) -> Iterator[FakeServer]:
    class RequestHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fake.paths.append(self.path)
            fake.keys.append(self.headers["Authorization"])
            status, content = reply(self.path, json.loads(text) if text else None)
            if status == HANG_UP:
                self.close_connection = True
                return
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

    with ThreadingHTTPServer(("127.0.0.1", port), RequestHandler) as server:
        server.daemon_threads = True
        fake = FakeServer(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()
