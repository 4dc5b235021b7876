"""Network checks: a monitor of the daemons of a cluster, and the interface of an address.

    monitor = PortMonitor()
    monitor.add("the Ray daemon of 10.0.0.2", "10.0.0.2", 40123)
    monitor.error()             # None, or a message about the first daemon that stopped answering

The monitor connects to each port at short intervals, in a thread. Ray declares a machine dead after fifteen seconds,
and does not detect the death of its head; a refused connection shows both at once.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import threading
import time
from dataclasses import dataclass

HEARTBEAT_SECONDS = 0.5
"""Interval between two connections to a port."""
MISSED_HEARTBEATS = 3
"""Number of consecutive failures after which a daemon is reported as dead."""
PROBE_SECONDS = 1.0
"""Time limit for a port to accept a connection."""
_SIOCGIFADDR = 0x8915


def accepts_connections(host: str, port: int) -> bool:
    """Return True if the port accepts a connection."""
    try:
        with socket.create_connection((host, port), timeout=PROBE_SECONDS):
            return True
    except OSError:
        return False


@dataclass
class _Daemon:
    """A daemon, its port and its failures."""

    name: str
    host: str
    port: int
    missed: int = 0
    """Consecutive failures."""
    since: float = 0.0
    """Time of the first of these failures."""


class PortMonitor:
    """Connects to ports until `stop`."""

    def __init__(self) -> None:
        self._daemons: list[_Daemon] = []
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, name: str, host: str, port: int) -> None:
        """Monitor one more port."""
        self._daemons.append(_Daemon(name, host, port))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="port-monitor", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop connecting; `error` keeps its result."""
        self._stopped.set()

    def error(self) -> str | None:
        """Return a message about the first dead daemon, or None."""
        for daemon in self._daemons:
            if daemon.missed >= MISSED_HEARTBEATS:
                silent = time.monotonic() - daemon.since
                address = f"{daemon.name} ({daemon.host}:{daemon.port})"
                return f"{address} has not answered for {silent:.0f} s: it is dead or cut off"
        return None

    def _run(self) -> None:
        while not self._stopped.wait(HEARTBEAT_SECONDS):
            for daemon in list(self._daemons):
                if accepts_connections(daemon.host, daemon.port):
                    daemon.missed = 0
                else:
                    daemon.since = daemon.since if daemon.missed else time.monotonic()
                    daemon.missed += 1


def interface_of(address: str) -> str | None:
    """Return the network interface with this address, which gloo expects by name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # the interface has no address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None
