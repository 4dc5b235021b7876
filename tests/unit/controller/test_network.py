"""The monitor of ports that stop answering."""

import socket
import time

import pytest

from camshaft.controller import network
from camshaft.controller.network import PortMonitor


def test_only_a_closed_port_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(network, "HEARTBEAT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as open_server, socket.create_server(("127.0.0.1", 0)) as leaving:
        monitor = PortMonitor()
        monitor.add("the one that stays", *open_server.getsockname())
        monitor.add("the one that leaves", *leaving.getsockname())
        time.sleep(3 * network.HEARTBEAT_SECONDS)
        assert monitor.error() is None
        assert monitor.probe() is None
        leaving.close()
        assert "the one that leaves (127.0.0.1:" in (monitor.probe() or "")
        deadline = time.monotonic() + 120
        while monitor.error() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "the one that leaves (127.0.0.1:" in (monitor.error() or "")
        monitor.stop()


@pytest.mark.alone
def test_one_missed_heartbeat_is_not_reported():
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
    monitor = PortMonitor()
    monitor.add("late", *place)
    time.sleep(network.HEARTBEAT_SECONDS * 0.6)
    with socket.create_server(place, reuse_port=False):
        time.sleep(4 * network.HEARTBEAT_SECONDS)
        assert monitor.error() is None
        monitor.stop()
