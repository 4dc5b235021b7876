"""A process that somebody else started: its children end with it, and its stacks can be read."""

import os
import signal
import socket
import subprocess
import sys
import time

from support.processes import still_running

from camshaft.controller.machine import interface_of, read_stacks, stack_file

PROGRAM = """
import os, subprocess, sys, time
os.setpgid(0, 0)
from camshaft.controller.machine import lead_group, stack_file, stacks_on_signal
lead_group()
stacks_on_signal(stack_file(os.getpid()))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
def waits_here():
    time.sleep(60)
waits_here()
"""


def started() -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_children_end_with_a_process_that_is_killed():
    process, child = started()
    with process:
        process.kill()
        assert still_running([child], 5) == []


def test_stacks_are_read_from_outside_and_those_of_a_crash_too():
    process, _ = started()
    with process:
        time.sleep(0.2)
        assert "waits_here" in read_stacks(process.pid, stack_file(process.pid))
        os.kill(process.pid, signal.SIGSEGV)
        process.wait(10)
        assert "Segmentation fault" in read_stacks(process.pid, stack_file(process.pid))


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") in {name for _, name in socket.if_nameindex()}
    assert interface_of("203.0.113.7") is None
