"""What a worker process that somebody else started does for itself, so that it ends clean and can be looked into.

    lead_group()                 # its children end with it, whatever it dies of
    stacks_on_signal(file)       # and then, from another process of the machine: read_stacks(pid, file)

The worker processes of `local.py` need the second alone: how they are started does the rest.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import socket
import struct
import subprocess
import tempfile
import time
from pathlib import Path

STACK_SIGNAL = signal.SIGUSR1
WRITE_SECONDS = 1.0
"""How long a process may take to write its stacks."""
_SIOCGIFADDR = 0x8915
_GUARD = 'read _; kill -s KILL -- "-$0"; sleep 10; rm -f "$1"'
"""Waits until the pipe from the process breaks, then ends its group; its stacks may be read a little longer."""

_KEPT: list[object] = []
"""Files that stay open as long as the process lives."""


def lead_group() -> None:
    """Make this process the head of a process group, and end the group when the process ends."""
    pid = os.getpid()
    if os.getpgid(0) != pid:
        os.setpgid(0, 0)
    guard = ["/bin/sh", "-c", _GUARD, str(pid), str(stack_file(pid))]
    silent = subprocess.DEVNULL
    _KEPT.append(subprocess.Popen(guard, stdin=subprocess.PIPE, stdout=silent, stderr=silent, start_new_session=True))


def stacks_on_signal(file: Path) -> None:
    """Write the stacks of all threads to `file` at a signal, and when this process crashes."""
    stacks = file.open("w", encoding="utf-8")
    _KEPT.append(stacks)
    faulthandler.enable(stacks)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)


def read_stacks(pid: int, file: Path) -> str:
    """The stacks of a process of this machine, now, or those that it left when it crashed; "" if there are none."""
    try:
        os.kill(pid, STACK_SIGNAL)
    except ProcessLookupError:
        return _written(file)
    deadline = time.monotonic() + WRITE_SECONDS
    text, before = "", ""
    while time.monotonic() < deadline and not (text and text == before):  # until no more is being written
        time.sleep(0.05)
        text, before = _written(file), text
    return text


def _written(file: Path) -> str:
    return file.read_text(encoding="utf-8").strip() if file.exists() else ""


def stack_file(pid: int) -> Path:
    """Where a process writes its stacks that has no folder for them."""
    return Path(tempfile.gettempdir()) / f"camshaft-stacks-{pid}.txt"


def interface_of(address: str) -> str | None:
    """The network interface that has this address, for libraries that want to be told its name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
