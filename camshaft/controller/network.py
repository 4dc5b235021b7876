"""Monitor the daemons of a cluster, and find the network interface with an address.

    monitor = PortMonitor()
    monitor.add("the Ray daemon of 10.0.0.2", "10.0.0.2", 40123)
    monitor.error()             # None, or a message about the first daemon that does not answer

A thread of the monitor connects to each port at short intervals, which detects a dead machine or a dead head within
seconds. Ray itself declares a machine dead after fifteen seconds and does not detect the death of its head.
"""

import fcntl
import socket
import struct
import threading
import time
from dataclasses import dataclass

HEARTBEAT_SECONDS = 0.5
"""Interval, in seconds, between two connections to a port."""
MISSED_HEARTBEATS = 3
"""Number of consecutive failed connections after which a daemon is reported as dead."""
PROBE_SECONDS = 1.0
"""Time limit, in seconds, for a port to accept a connection."""
_SIOCGIFADDR = 0x8915


def accepts_connections(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=PROBE_SECONDS):
            return True
    except OSError:
        return False


@dataclass
class _Daemon:
    name: str
    host: str
    port: int
    failures: int = 0
    """Number of consecutive failed connections."""
    first_failure: float = 0.0
    """Time of the first of these failures."""


class PortMonitor:
    """Monitor that connects to ports in a thread until `stop` is called."""

    def __init__(self) -> None:
        self._daemons: list[_Daemon] = []
        self._stop_event = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, name: str, host: str, port: int) -> None:
        self._daemons.append(_Daemon(name, host, port))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="port-monitor", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the monitor. `error` then keeps returning its last result."""
        self._stop_event.set()

    def error(self) -> str | None:
        """Return a message about the first dead daemon, or None."""
        for daemon in self._daemons:
            if daemon.failures >= MISSED_HEARTBEATS:
                seconds = time.monotonic() - daemon.first_failure
                address = f"{daemon.name} ({daemon.host}:{daemon.port})"
                return f"{address} has not answered for {seconds:.0f} s: it is dead or disconnected"
        return None

    def probe(self) -> str | None:
        """Connect to all ports now, and return a message about the first daemon that does not answer, or None."""
        for daemon in self._daemons:
            if not accepts_connections(daemon.host, daemon.port):
                return f"{daemon.name} ({daemon.host}:{daemon.port}) does not answer: it is dead or disconnected"
        return None

    def _run(self) -> None:
        while not self._stop_event.wait(HEARTBEAT_SECONDS):
            for daemon in list(self._daemons):
                if accepts_connections(daemon.host, daemon.port):
                    daemon.failures = 0
                else:
                    daemon.first_failure = daemon.first_failure if daemon.failures else time.monotonic()
                    daemon.failures += 1


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this address. gloo requires the name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # the interface has no address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None
