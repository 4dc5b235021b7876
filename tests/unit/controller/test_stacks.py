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
from camshaft.stacks import read_stacks, stack_file

PROGRAM = """
import os, time
from camshaft.stacks import dump_stacks_on_signal, stack_file
dump_stacks_on_signal(stack_file(os.getpid()))
print(flush=True)
def waits_here():
    time.sleep(60)
waits_here()
"""


def test_stacks_of_a_running_and_a_crashed_process_are_read():
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.2)
        assert "waits_here" in read_stacks(process.pid, stack_file(process.pid))
        os.kill(process.pid, signal.SIGSEGV)
        process.wait(10)
        assert "Segmentation fault" in read_stacks(process.pid, stack_file(process.pid))


def test_a_process_that_has_just_ended_has_no_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(10)
    (tmp_path / "stacks").touch()
    monkeypatch.setattr(stacks, "_handles_signal", lambda pid: True)  # as it did a moment ago
    assert read_stacks(process.pid, tmp_path / "stacks") == ""


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") in {name for _, name in socket.if_nameindex()}
    assert interface_of("203.0.113.7") is None
