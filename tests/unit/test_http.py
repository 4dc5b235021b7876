"""The server core: permitted requests only, and limits on connections, bytes and time."""

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from camshaft.errors import ConfigError
from camshaft.http import MAX_SURPLUS, LocalServer, Reply, Request, ServerLimits, bearer_token, json_reply

SECONDS = 0.6
LIMITS = ServerLimits(connections=8, body=1000, seconds=SECONDS, body_option="max_size")
LONG = b"x" * 100


class Echo:
    """Sends bodies back, holds requests of `/held` until `release` is set, and counts what it was asked."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.refused, self.answered = 0, 0
        self.sent: list[str] = []
        self.connected: list[bool] = []

    def refuse(self, request: Request) -> Reply | None:
        assert request.body == b""
        if bearer_token(request) == "key":
            return None
        self.refused += 1
        return Reply(401, b"the key is wrong\n")

    def answer(self, request: Request) -> Reply:
        self.answered += 1

        @contextlib.contextmanager
        def writing() -> Iterator[None]:
            yield
            self.sent.append(request.path)

        if request.path == "/held":
            self.release.wait(30)
            self.connected.append(request.is_connected())
        if request.path == "/parts":
            return Reply(200, iter([b"one,", b"", b"two"]), writing=writing())
        if request.path == "/endless":
            return Reply(200, (LONG * 10_000 for _ in range(1000)), writing=writing())
        return json_reply({"method": request.method, "body": request.body.decode()}, writing=writing())


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def port(echo: Echo) -> Iterator[int]:
    with LocalServer(echo, LIMITS) as server:
        server.start()
        yield server.server_port
        echo.release.set()


def ask(port: int, method: str = "POST", path: str = "/", body: Any = b"", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.request(method, path, body, {"Authorization": "Bearer key", **headers})
        reply = connection.getresponse()
        return reply.status, reply.read()


def connect(port: int, data: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=20)
    client.sendall(data)
    return client


def head(length: int, path: str = "/", key: str = "key", host: str = "127.0.0.1", version: str = "1.1") -> bytes:
    lines = (
        f"POST {path} HTTP/{version}",
        f"Host: {host}",
        f"Authorization: Bearer {key}",
        f"Content-Length: {length}",
    )
    return "\r\n".join([*lines, "", ""]).encode()


def rest(client: socket.socket) -> bytes:
    """Return everything until the server closes the connection."""
    with client, contextlib.suppress(ConnectionError):
        return b"".join(iter(lambda: client.recv(65536), b""))
    return b""


def test_a_body_is_read_and_a_reply_written(port: int, echo: Echo) -> None:
    assert ask(port, body=b"hello") == (200, b'{"method": "POST", "body": "hello"}')
    assert ask(port, "GET") == (200, b'{"method": "GET", "body": ""}')
    assert ask(port, "HEAD") == (200, b"")
    wait_for(lambda: echo.sent == ["/"] * 3)


def test_several_requests_share_a_connection(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        for number in range(5):
            connection.request("POST", "/", f"{number}", {"Authorization": "Bearer key"})
            assert f'"{number}"'.encode() in connection.getresponse().read()


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", ""])
def test_a_foreign_host_is_refused(host: str, port: int, echo: Echo) -> None:
    assert b"403" in rest(connect(port, head(0, host=host)))[:20]
    assert echo.answered == 0


@pytest.mark.parametrize("name", ["Bearer wrong", "Basic key", "Bearer", "Bearer key2", "key", ""])
def test_a_wrong_key_is_refused_before_the_body(name: str, port: int, echo: Echo) -> None:
    assert ask(port, **{"Authorization": name})[0] == 401
    with connect(port, head(900, key="wrong")) as client:  # no byte of the body
        assert client.recv(100).startswith(b"HTTP/1.1 401")
    assert (echo.answered, echo.refused) == (0, 2)


def test_a_large_body_is_refused_unread(port: int, echo: Echo) -> None:
    assert ask(port, body=b"x" * 1000)[0] == 200
    for length in (1001, 10**15, int("9" * 400)):
        reply = rest(connect(port, head(length)))
        assert reply.startswith(b"HTTP/1.1 413")
        assert (
            b"the body has more than 1000 bytes; send less at once, or start the server with a larger max_size" in reply
        )
    assert echo.answered == 1


@pytest.mark.parametrize("lines", ["Transfer-Encoding: chunked", "Content-Length: -1", "Content-Length: ten"])
def test_a_body_without_length_is_refused(lines: str, port: int, echo: Echo) -> None:
    request = f"POST / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer key\r\n{lines}\r\n\r\n"
    assert rest(connect(port, request.encode())).startswith(b"HTTP/1.1 411")
    assert echo.answered == 0


@pytest.mark.parametrize("part", [b"", b"POST / HT", head(10), head(10) + b"12345"], ids=["no", "line", "head", "body"])
def test_a_request_that_stops_is_dropped(part: bytes, port: int, echo: Echo) -> None:
    start = time.monotonic()
    assert rest(connect(port, part)) == b""
    assert SECONDS * 0.9 < time.monotonic() - start < 15
    assert echo.answered == 0


def test_a_request_that_trickles_is_dropped(port: int, echo: Echo) -> None:
    start = time.monotonic()
    with connect(port) as client, contextlib.suppress(ConnectionError):
        for byte in head(1000) + b"x" * 1000:
            client.sendall(bytes([byte]))
            time.sleep(SECONDS / 10)  # always within the limit of a single wait
            if time.monotonic() - start > 15:
                pytest.fail("the connection is still open")
    assert echo.answered == 0


def test_an_end_of_a_request_that_never_comes_is_no_request(port: int, echo: Echo) -> None:
    with connect(port, head(10) + b"12345") as client:
        client.shutdown(socket.SHUT_WR)
        assert client.recv(10) == b""
    assert echo.answered == 0


def test_a_reply_that_nobody_reads_is_dropped(port: int, echo: Echo) -> None:
    with connect(port, head(0, "/endless")) as client:
        wait_for(lambda: echo.answered == 1)
        time.sleep(3 * SECONDS)
        client.settimeout(10)
        with contextlib.suppress(ConnectionError):
            while client.recv(2**20):
                pass
    assert echo.sent == []


@pytest.mark.parametrize(("version", "body"), [("1.1", b"4\r\none,\r\n3\r\ntwo\r\n0\r\n\r\n"), ("1.0", b"one,two")])
def test_parts_are_sent(version: str, body: bytes, port: int, echo: Echo) -> None:
    with connect(port, head(0, "/parts", version=version)) as client:
        received = b""
        while not received.endswith(body):
            received += client.recv(1000)
    wait_for(lambda: echo.sent == ["/parts"])


def test_idle_connections_give_way_and_busy_ones_do_not(port: int, echo: Echo) -> None:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(port, head(0, "/held"))) for _ in range(LIMITS.connections - 1)]
        wait_for(lambda: echo.answered == len(held))
        silent = stack.enter_context(connect(port))
        assert ask(port)[0] == 200  # in place of the silent one
        assert silent.recv(1) == b""
        wait_for(lambda: (last := hold(port)) is not None and held.append(stack.enter_context(last)) is None)
        wait_for(lambda: echo.answered == len(held) + 1)
        refused = rest(connect(port, head(0))).decode()  # all are busy
        assert refused.startswith("HTTP/1.1 429")
        assert "Retry-After: 1\r\n" in refused
        assert refused.endswith("429: 8 connections are busy; try again\n")
        echo.release.set()
        assert all(client.recv(12) == b"HTTP/1.1 200" for client in held)


def test_few_connections_beyond_the_limit_get_an_answer(echo: Echo) -> None:
    with LocalServer(echo, ServerLimits(LIMITS.connections)) as server, contextlib.ExitStack() as stack:
        server.start()
        for _ in range(LIMITS.connections):
            stack.enter_context(connect(server.server_port, head(0, "/held")))
        wait_for(lambda: echo.answered == LIMITS.connections)
        silent = list[socket.socket]()
        for number in range(1, MAX_SURPLUS + 1):
            silent.append(stack.enter_context(connect(server.server_port)))
            wait_for(lambda number=number: len(server._surplus) == number)
        assert rest(connect(server.server_port, head(0))) == b""
        silent[0].close()
        wait_for(lambda: rest(connect(server.server_port, head(0))).startswith(b"HTTP/1.1 429"))
        echo.release.set()


def hold(port: int) -> socket.socket | None:
    """Return the connection of a held request, or None if the server has refused it, because others were still busy."""
    client = connect(port, head(0, "/held"))
    client.settimeout(0.2)
    with contextlib.suppress(ConnectionError):
        try:
            client.recv(1)
        except TimeoutError:
            client.settimeout(20)
            return client
    client.close()
    return None


def test_a_client_that_has_gone_is_noticed(port: int, echo: Echo) -> None:
    with connect(port, head(0, "/held")) as here:
        connect(port, head(0, "/held")).close()
        wait_for(lambda: echo.answered == 2)
        echo.release.set()
        wait_for(lambda: len(echo.connected) == 2)
        assert sorted(echo.connected) == [False, True]
        assert here.recv(12) == b"HTTP/1.1 200"


def test_a_closed_server_leaves_no_connection(echo: Echo) -> None:
    with LocalServer(echo, LIMITS) as server:
        server.start()
        silent = connect(server.server_port)
        assert server.server_address[0] == "127.0.0.1"
        assert ask(server.server_port)[0] == 200
    assert rest(silent) == b""
    with pytest.raises(ConnectionRefusedError):
        connect(server.server_port)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_socket_of_a_busy_server_is_not_removed(echo: Echo, tmp_path: Path) -> None:
    path = tmp_path / "busy.sock"
    with socket.socket(socket.AF_UNIX) as busy, contextlib.ExitStack() as stack:
        busy.bind(str(path))
        busy.listen(0)
        for _ in range(4):  # more than the queue holds
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(str(path))
        failed: list[Exception] = []

        def start() -> None:
            try:
                LocalServer(echo, LIMITS, socket_path=path, socket_option="--socket")
            except ConfigError as error:
                failed.append(error)

        thread = threading.Thread(target=start, daemon=True)
        thread.start()
        thread.join(30)
        assert [str(error) for error in failed] == [f"{path} is the socket of another program; set another --socket"]
    assert path.is_socket()


def test_a_server_leaves_the_socket_that_replaced_its_own(echo: Echo, tmp_path: Path) -> None:
    path = tmp_path / "page.sock"
    with LocalServer(echo, LIMITS, socket_path=path):
        path.rename(tmp_path / "moved.sock")
        second = LocalServer(echo, LIMITS, socket_path=path)
    assert path.is_socket()
    second.server_close()
    assert not path.exists()
