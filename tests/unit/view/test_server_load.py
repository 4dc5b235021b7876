"""The page remains available and quiet while clients hang, go away or send nonsense."""

import contextlib
import http.client
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from support.run_folders import make_run

from camshaft.http import MAX_FIELDS
from camshaft.view.server import MAX_CONNECTIONS

SLOW_CLIENTS = 150


class Page:
    """A process of `camshaft view`."""

    def __init__(self, folder: Path, errors: Path):
        self._errors = errors
        with errors.open("w") as file:
            command = [sys.executable, "-m", "camshaft", "view", str(folder)]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
        assert self.process.stdout is not None
        url = urlsplit(self.process.stdout.readline())
        assert url.port is not None, errors.read_text()
        self.port, self.token = url.port, parse_qs(url.query.strip())["token"][0]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def ask(self, path: str) -> tuple[int, bytes]:
        """Return the status and the body of the reply to a request with the token."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            connection.request("GET", f"{path}{'&' if '?' in path else '?'}token={self.token}")
            reply = connection.getresponse()
            return reply.status, reply.read()

    def errors(self) -> str:
        return self._errors.read_text()

    def count_threads(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "first", steps=3000)
    page = Page(folder, folder / "errors.txt")
    yield page
    page.process.kill()
    page.process.communicate()


@contextlib.contextmanager
def clients(page: Page, count: int, request: bytes) -> Iterator[list[socket.socket]]:
    """Open connections that have sent a part of a request."""
    with contextlib.ExitStack() as stack:
        sockets = []
        for _ in range(count):
            sockets.append(stack.enter_context(page.connect()))
            sockets[-1].sendall(request)
        yield sockets


@pytest.mark.parametrize("request_part", [b"", b"GET /runs HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "], ids=["silent", "slow"])
def test_the_page_answers_beside_slow_clients(request_part: bytes, page: Page) -> None:
    with clients(page, SLOW_CLIENTS, request_part) as slow:
        assert page.ask("/runs")[0] == 200
        wait_for(lambda: page.count_threads() <= MAX_CONNECTIONS + 10)
        assert slow[0].recv(1) == b""  # the oldest connection has been closed
        slow[-1].settimeout(0.1)
        with pytest.raises(TimeoutError):
            slow[-1].recv(1)
    assert page.errors() == ""


def test_permitted_connections_outlive_slow_clients(page: Page) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=20)
    with contextlib.closing(connection):
        for _ in range(4):
            connection.request("GET", f"/runs?token={page.token}")
            assert connection.getresponse().read().startswith(b"{")
            with clients(page, MAX_CONNECTIONS // 2, b"GET /runs HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") as others:
                assert others[-1].recv(12) == b"HTTP/1.1 403"


def test_clients_that_go_away_leave_no_traceback(page: Page) -> None:
    request = f"GET /curves?run=0&token={page.token} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
    for _ in range(30):
        with page.connect() as client:
            client.sendall(request * 5)
            # Close with a reset instead of the regular end of a connection.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert page.ask("/runs")[0] == 200
    wait_for(lambda: page.count_threads() < 10)
    assert page.errors() == ""


@pytest.mark.parametrize(
    "path",
    [
        f"/curves?run={'1' * 5000}",
        f"/responses?run=0&step={'9' * 19}",
        f"/curves?run=0&first={'9' * 400}&last=1",
        f"/runs?{'run=0&' * MAX_FIELDS}run=0",
    ],
    ids=["run", "step", "zoom", "many"],
)
def test_oversized_parameters_are_bad_requests(path: str, page: Page) -> None:
    assert page.ask(path)[0] == 400
    assert page.errors() == ""


def test_an_invalid_path_is_a_bad_request(page: Page) -> None:
    with page.connect() as client:
        client.sendall(b"GET http://[ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 400"
    assert page.errors() == ""


def test_concurrent_requests_are_all_answered(page: Page) -> None:
    answers: list[tuple[int, bytes]] = []
    threads = [threading.Thread(target=lambda: answers.append(page.ask("/curves?run=0"))) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [status for status, _ in answers] == [200] * 40
    assert {len(json.loads(body)["runs"]) for _, body in answers} == {1}


def wait_for(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
