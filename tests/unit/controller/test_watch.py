"""Ports that stop answering."""

import socket
import time

import pytest

from camshaft.controller import watch
from camshaft.controller.watch import Watch


def test_a_port_that_is_closed_is_told_within_seconds_and_one_that_answers_is_not():
    with socket.create_server(("127.0.0.1", 0)) as there, socket.create_server(("127.0.0.1", 0)) as leaving:
        seen = Watch()
        seen.add("the one that stays", *there.getsockname())
        seen.add("the one that leaves", *leaving.getsockname())
        time.sleep(3 * watch.HEARTBEAT_SECONDS)
        assert seen.trouble() is None
        leaving.close()
        until = time.monotonic() + 10
        while seen.trouble() is None and time.monotonic() < until:
            time.sleep(0.05)
        assert "the one that leaves (127.0.0.1:" in (seen.trouble() or "")
        seen.end()


@pytest.mark.alone
def test_one_missed_heartbeat_is_none():
    with socket.create_server(("127.0.0.1", 0)) as there:
        place = there.getsockname()
    seen = Watch()
    seen.add("late", *place)
    time.sleep(watch.HEARTBEAT_SECONDS * 0.6)
    with socket.create_server(place, reuse_port=False):
        time.sleep(4 * watch.HEARTBEAT_SECONDS)
        assert seen.trouble() is None
        seen.end()
