"""Messages between processes, and children that end with their parent."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.processes import command_line, still_running

from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import WorkerError
from camshaft.subprocesses import (
    GroupGuard,
    Limit,
    MessageReader,
    Wait,
    describe_exit,
    is_running,
    kill_group,
    limit_waits,
    pack,
    receive,
    send,
    start_python,
    unpack,
    without_watcher,
)

# -- messages --------------------------------------------------------------------------------------


def through_a_socket(value: object) -> object:
    parent, child = socket.socketpair()
    with parent, child:
        thread = threading.Thread(target=send, args=(parent.fileno(), pack(value)))
        thread.start()
        received = unpack(receive(child.fileno()))
        thread.join()
    return received


def test_a_batch_survives_a_message():
    tokens = Ragged.from_rows([[1, 2, 3], [], [4]])
    batch = DataProto.from_dict(
        {"tokens": tokens, "half": torch.ones(3, 2, dtype=torch.bfloat16), "uid": ["a", None, {"b": 1}]}, {"step": 3}
    )
    received = through_a_socket(batch)
    assert isinstance(received, DataProto)
    assert torch.equal(received["tokens"].values, tokens.values)
    assert received["tokens"].lengths.tolist() == [3, 0, 1]
    assert torch.equal(received["half"], batch["half"])
    assert list(received["uid"]) == ["a", None, {"b": 1}]
    assert received.meta_info == {"step": 3}


def test_messages_may_exceed_the_buffer_of_a_socket():
    values = np.random.default_rng(0).standard_normal(3_000_000)
    received = through_a_socket({"values": values, "none": np.empty(0)})
    assert isinstance(received, dict)
    assert np.array_equal(received["values"], values)
    assert received["none"].size == 0


@pytest.mark.parametrize("size", [2, 1_000_000])
def test_received_arrays_are_writable(size: int):
    received = through_a_socket([np.zeros(size), DataProto.from_dict({"x": torch.zeros(size)})])
    assert isinstance(received, list)
    received[0][0] = 1.0
    received[1]["x"][0] = 1.0
    assert received[0][:2].tolist() == [1.0, 0.0]


def test_pack_does_not_copy_buffers():
    values = np.zeros(1000)
    _, buffer = pack(values)
    values[0] = 5.0
    assert np.frombuffer(buffer)[0] == 5.0


def test_a_slice_is_sent_without_its_base():
    batch = DataProto.from_dict({"x": torch.zeros(1000, 100)}).chunk(10)[3]
    assert sum(len(frame) for frame in pack(batch)) < 1000 * 100 * 4 / 10 + 2000


def test_a_closed_connection_is_an_error():
    parent, child = socket.socketpair()
    with child:
        parent.sendall(b"\0\0\0")
        parent.close()
        with pytest.raises(BrokenPipeError):
            receive(child.fileno())


@pytest.mark.parametrize("size", [1, 3, 8, 1000])
def test_a_reader_assembles_messages_from_any_chunks(size: int):
    messages = [{"score": 1.0}, ["x" * 100], None, np.arange(50)]
    data = b"".join(message_bytes(message) for message in messages)
    reader = MessageReader()
    received = [message for i in range(0, len(data), size) for message in reader.feed(data[i : i + size])]
    assert received[:3] == messages[:3]
    assert np.array_equal(received[3], messages[3])


def message_bytes(value: object) -> bytes:
    parent, child = socket.socketpair()
    with parent, child:
        send(parent.fileno(), pack(value))
        return child.recv(2**16)


# -- exits -----------------------------------------------------------------------------------------

SLEEPS = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
WATCHES = f"import sys; from camshaft.subprocesses import end_with; end_with(int(sys.argv[1])); {SLEEPS}"
PARENT = """
import os, sys, time
from camshaft.subprocesses import GroupGuard, start_python
process = start_python(["-c", sys.argv[1], str(os.getpid())])
guard = GroupGuard(process.pid) if sys.argv[2] == "guard" else None
print(process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("child", "guard"), [(WATCHES, ""), (SLEEPS, "guard")], ids=["watching", "guarded"])
def test_a_child_and_its_children_end_with_a_killed_parent(child: str, guard: str):
    command = [sys.executable, "-c", PARENT, child, guard]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        assert still_running(pids, 0) == pids
        process.kill()
        assert still_running(pids) == []


def test_a_guard_ignores_stop_signals():
    command = [sys.executable, "-c", PARENT, SLEEPS, "guard"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        pattern = re.compile(rf"/bin/sh -c .* ({pids[0]}|{pids[1]}) 0 ", re.DOTALL)
        processes = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
        (guard,) = (pid for pid in processes if pattern.fullmatch(command_line(pid)))
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT):
            os.kill(guard, number)
        assert still_running([guard], 0.2) == [guard]
        process.kill()
        assert still_running([*pids, guard]) == []


GRACE_PARENT = """
import sys, time
from camshaft.subprocesses import GroupGuard, start_python
process = start_python(["-c", sys.argv[1], sys.argv[2]])
guard = GroupGuard(process.pid, grace_seconds=float(sys.argv[3]))
print(process.pid, flush=True)
time.sleep(60)
"""
TIDIES = """
import os, signal, subprocess, sys, time
from pathlib import Path
def tidy(*_):
    time.sleep(0.5)
    os.remove(sys.argv[1])
    time.sleep({seconds})
    child.kill()
    os._exit(0)
child = subprocess.Popen(["sleep", "60"])
signal.signal(signal.SIGTERM, tidy)
print(child.pid, flush=True)
Path(sys.argv[1]).touch()
time.sleep(60)
"""
"""A leader that removes a file when it is terminated, and some time later ends its child and itself."""


@pytest.mark.alone
@pytest.mark.parametrize(("grace_seconds", "seconds"), [(60.0, 0.0), (2.0, 60.0), (0.0, 0.0)])
def test_a_guard_lets_a_group_end_by_itself(grace_seconds: float, seconds: float, tmp_path: Path):
    file = tmp_path / "left"
    command = [sys.executable, "-c", GRACE_PARENT, TIDIES.format(seconds=seconds), str(file), str(grace_seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        while not file.exists():
            time.sleep(0.02)
        process.kill()
        assert still_running(pids, 30.0) == []
    assert file.exists() == (grace_seconds == 0.0)


VARIABLE_PARENT = """
import os, sys, time
from camshaft.subprocesses import VariableGuard, start_python
mark = sys.argv[1]
guard = VariableGuard("GUARDED", mark, seconds=0.0)
sleep = ["-c", "import time; time.sleep(60)"]
for value in (mark, mark + "2", ""):
    print(start_python(sleep, {**os.environ, "GUARDED": value}).pid, flush=True)
time.sleep(60)
"""


def test_processes_with_a_variable_end_with_a_killed_parent():
    command = [sys.executable, "-c", VARIABLE_PARENT, uuid.uuid4().hex]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        marked, *others = [int(process.stdout.readline()) for _ in range(3)]
        try:
            process.kill()
            assert still_running([marked]) == []
            assert still_running(others, 0.5) == others
        finally:
            for pid in others:
                kill_group(pid)


def test_a_cancelled_guard_does_not_kill_the_group():
    with start_python(["-c", "input()"], stdin=subprocess.PIPE) as process:
        guard = GroupGuard(process.pid)
        guard.cancel()
        assert still_running([process.pid], 1) == [process.pid]
        process.communicate(b"\n")


def test_a_process_whose_state_cannot_be_read_is_running(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
    assert is_running(os.getpid())


def test_a_killed_group_includes_grandchildren():
    with start_python(["-c", SLEEPS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        kill_group(process.pid)
        assert process.wait(5) == -signal.SIGKILL
        assert still_running([grandchild]) == []
    kill_group(process.pid)  # a process group that has exited is not an error


def test_exit_codes_are_described():
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-signal.SIGSEGV) == "SIGSEGV"
    assert describe_exit(-(signal.SIGRTMIN + 3)) == f"signal {signal.SIGRTMIN + 3}"
    assert describe_exit(-signal.SIGKILL) == "SIGKILL, which the kernel sends when the machine is out of memory"


def test_the_watching_thread_is_left_out_of_stacks():
    stacks = "Thread 1:\n  File x in _watch_process\n\nThread 2:\n  File y in train"
    assert without_watcher(stacks) == "Thread 2:\n  File y in train"


def test_the_module_needs_only_the_standard_library():
    code = "import sys, camshaft.subprocesses; assert not {'numpy', 'torch', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_reports_of_a_wait_become_rarer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    clock = [0.0]
    monkeypatch.setattr("camshaft.subprocesses.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(Wait, "longest", {})
    ages: list[float] = []
    for end in (100.0, 200.0):
        caplog.clear()
        clock[0] = 0.0
        wait = Wait("critic.update_critic", WorkerError, Limit(500.0, "trainer.worker_timeout=500"))
        while clock[0] < end:
            clock[0] += 1.0
            wait.check(lambda: "rank 1", lambda short: f"frames, short: {short}")
            ages += [clock[0]] * len(caplog.records)
            caplog.clear()
        wait.finish()
    assert ages == [11, 21, 41, 81, 151], "the second wait is compared with the first one, which took 100 s"


def test_a_wait_ends_at_its_limit_or_that_of_its_call():
    waits: list[Wait] = []
    with limit_waits(Limit(0.0, "the limit of the call")):
        waits.append(Wait("load_weights", WorkerError, Limit(9.0, "the limit of the wait")))
        waits.append(Wait("load_weights", WorkerError))
    waits.append(Wait("load_weights", WorkerError, Limit(0.0, "the limit of the wait")))
    waits.append(Wait("load_weights", WorkerError))
    errors = []
    time.sleep(0.01)
    for wait in waits[:3]:
        with pytest.raises(WorkerError, match=r"^load_weights: no answer from rank 1 for 0.0 s") as error:
            wait.check(lambda: "rank 1", lambda short: "the stacks")
        errors.append(str(error.value).partition("the limit")[2])
    assert errors == [f" the limit of the {name}\n\nthe stacks" for name in ("call", "call", "wait")]
    waits[3].check(lambda: "rank 1")
