"""Stacks of another process, and the network interface of an address."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from camshaft import stacks
from camshaft.controller.network import interface_of
from camshaft.stacks import dump_stacks_on_signal, read_stacks

PROGRAM = """
import time
from camshaft.stacks import dump_stacks_on_signal
from camshaft.temporary import temporary_file
file = temporary_file()
dump_stacks_on_signal(file)
print(file, flush=True)
def waits_here():
    time.sleep(60)
waits_here()
"""


def test_stacks_of_a_running_and_a_crashed_process_are_read():
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        file = Path(process.stdout.readline().strip())
        time.sleep(0.2)
        assert "waits_here" in read_stacks(process.pid, file)
        os.kill(process.pid, signal.SIGSEGV)
        process.wait(10)
        assert "Segmentation fault" in read_stacks(process.pid, file)


def test_stacks_are_not_written_through_a_link(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("foreign")
    (tmp_path / "stacks").symlink_to(tmp_path / "notes.txt")
    with pytest.raises(OSError, match="symbolic links"):
        dump_stacks_on_signal(tmp_path / "stacks")
    assert (tmp_path / "notes.txt").read_text() == "foreign"


def test_a_process_that_has_just_ended_has_no_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(10)
    (tmp_path / "stacks").touch()
    monkeypatch.setattr(stacks, "_handles_signal", lambda pid: True)  # as it did a moment ago
    assert read_stacks(process.pid, tmp_path / "stacks") == ""


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") in {name for _, name in socket.if_nameindex()}
    assert interface_of("203.0.113.7") is None
