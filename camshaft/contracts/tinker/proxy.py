"""A proxy with transport faults, between a client and a server.

    with FaultProxy("http://127.0.0.1:8080", random_faults(seed=0)) as proxy:
        client = Client(proxy.url, key, base, is_patient=True)

A lost request does not reach the server. A lost answer leaves the client without a reply after the server has executed
the request. The client sees a closed connection in both cases. A repeated request reaches the server twice.
"""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Callable, Mapping
from enum import Enum
from types import TracebackType
from typing import Self

from camshaft.contracts.tinker.client import Answer, send
from camshaft.http import LocalServer, Reply, Request, ServerLimits

LIMITS = ServerLimits(connections=256, body=2**28, seconds=120.0)
DELAY_SECONDS = 0.02


class Fault(Enum):
    """A disturbance of one request."""

    LOSE_REQUEST = "the request is lost"
    LOSE_ANSWER = "the answer is lost"
    REPEAT = "the request arrives twice"
    DELAY = "the request arrives later"
    SPLIT = "the body arrives in two parts"


Faults = Callable[[Request], Fault | None]
"""The fault of each request."""
RATES: Mapping[Fault, float] = {
    Fault.LOSE_ANSWER: 0.1,
    Fault.LOSE_REQUEST: 0.05,
    Fault.REPEAT: 0.05,
    Fault.DELAY: 0.05,
    Fault.SPLIT: 0.05,
}


def random_faults(seed: int, rates: Mapping[Fault, float] = RATES) -> Faults:
    """Return faults with these probabilities."""
    generator, lock = random.Random(seed), threading.Lock()
    kinds = [*rates, None]
    weights = [*rates.values(), 1 - sum(rates.values())]

    def fault(_: Request) -> Fault | None:
        with lock:
            return generator.choices(kinds, weights)[0]

    return fault


def first(path: str, fault: Fault) -> Faults:
    """Return faults that disturb only the first request whose path ends with `path`."""
    used = threading.Event()

    def choose(request: Request) -> Fault | None:
        if used.is_set() or not request.path.endswith(path):
            return None
        used.set()
        return fault

    return choose


class FaultProxy:
    """A server on a free port that passes requests on."""

    def __init__(self, url: str, faults: Faults):
        self.target, self.faults = url, faults
        self.num_faults = 0
        self._server = LocalServer(self, LIMITS)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.server_close()

    def refuse(self, request: Request) -> Reply | None:
        """Permit all requests; the server decides."""
        return None

    def answer(self, request: Request) -> Reply:
        """Pass a request on, with its fault."""
        fault = self.faults(request)
        self.num_faults += fault is not None
        if fault is Fault.LOSE_REQUEST:
            raise ConnectionAbortedError(fault.value)  # closes the connection of the client
        if fault is Fault.DELAY:
            time.sleep(DELAY_SECONDS)
        answer = self._send(request, DELAY_SECONDS if fault is Fault.SPLIT else 0.0)
        if fault is Fault.REPEAT:
            answer = self._send(request, 0.0)
        if fault is Fault.LOSE_ANSWER:
            raise ConnectionAbortedError(fault.value)
        return Reply(answer.status, answer.body, answer.kind)

    def _send(self, request: Request, pause: float) -> Answer:
        names = ("X-API-Key", "Content-Type")
        headers = {name: request.headers[name] for name in names if name in request.headers}
        try:
            return send(self.target, request.method, request.path, request.body or None, headers, pause)
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionAbortedError(f"the server does not answer: {error}") from error
