"""A server that answers as it is told to, for what a real one does not do when asked.

with fake_server(lambda path, body: (200, {"choices": []})) as fake:
    fake.url, fake.asked                    # every path that was asked for
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answers = Callable[[str, Any], tuple[int, Any]]
HANG_UP = 0
"""A status that is none: the connection ends without an answer."""


@dataclass
class Fake:
    url: str
    asked: list[str] = field(default_factory=list)


@contextmanager
def fake_server(answers: Answers) -> Iterator[Fake]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fake.asked.append(self.path)
            status, told = answers(self.path, json.loads(text) if text else None)
            if status == HANG_UP:
                self.close_connection = True
                return
            data = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        fake = Fake(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()
