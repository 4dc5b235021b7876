"""Are the machines under the pools still there? Their daemons' ports are tried, again and again, in a thread.

    watch = Watch()
    watch.add("the Ray daemon of 10.0.0.2", "10.0.0.2", 40123)
    watch.trouble()             # None, or a sentence about the first that has stopped answering

A cluster takes a while to declare a machine dead (Ray: fifteen seconds), and never declares itself dead. A refused
connection says it at once.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass

HEARTBEAT_SECONDS = 0.5
"""How often each port is tried."""
MISSED_HEARTBEATS = 3
"""So many failures in a row, and what was there is taken for dead."""
PROBE_SECONDS = 1.0
"""How long a port may take to accept a connection."""


def answers(host: str, port: int) -> bool:
    """Does anybody accept a connection there?"""
    try:
        with socket.create_connection((host, port), timeout=PROBE_SECONDS):
            return True
    except OSError:
        return False


@dataclass
class _Place:
    """A port, and how it is doing."""

    name: str
    host: str
    port: int
    missed: int = 0
    """Failures since it last answered."""
    since: float = 0.0
    """When the first of them was."""


class Watch:
    """Ports that are to answer until `end`."""

    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, name: str, host: str, port: int) -> None:
        self._places.append(_Place(name, host, port))
        if self._thread is None:
            self._thread = threading.Thread(target=self._try_all, name="cluster-watch", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Look no more; what was found stays."""
        self._over.set()

    def trouble(self) -> str | None:
        for place in self._places:
            if place.missed >= MISSED_HEARTBEATS:
                silent = time.monotonic() - place.since
                where = f"{place.name} ({place.host}:{place.port})"
                return f"{where} has not answered for {silent:.0f} s: it is dead or cut off"
        return None

    def _try_all(self) -> None:
        while not self._over.wait(HEARTBEAT_SECONDS):
            for place in list(self._places):
                if answers(place.host, place.port):
                    place.missed = 0
                else:
                    place.since = place.since if place.missed else time.monotonic()
                    place.missed += 1
