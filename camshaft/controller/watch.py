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


class Watch:
    """Ports that are to answer as long as a run lasts."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, int], str] = {}
        self._missed: dict[tuple[str, int], int] = {}
        self._since: dict[tuple[str, int], float] = {}
        self._thread: threading.Thread | None = None

    def add(self, name: str, host: str, port: int) -> None:
        self._places[host, port] = name
        if self._thread is None:
            self._thread = threading.Thread(target=self._try_all, name="cluster-watch", daemon=True)
            self._thread.start()

    def clear(self) -> None:
        """Nothing is watched any more."""
        self._places, self._missed, self._since = {}, {}, {}

    def trouble(self) -> str | None:
        for place, missed in list(self._missed.items()):
            if missed >= MISSED_HEARTBEATS:
                host, port = place
                silent = time.monotonic() - self._since[place]
                return (
                    f"{self._places[place]} ({host}:{port}) has not answered for {silent:.0f} s: it is dead or cut off"
                )
        return None

    def _try_all(self) -> None:
        while True:
            for place in list(self._places):
                if answers(*place):
                    self._missed.pop(place, None)
                    self._since.pop(place, None)
                elif place in self._places:
                    self._since.setdefault(place, time.monotonic())
                    self._missed[place] = self._missed.get(place, 0) + 1
            time.sleep(HEARTBEAT_SECONDS)
