import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from camshaft import stop as stop_module
from camshaft.stop import STOP_SIGNALS, handle_stop_signals
from camshaft.subprocesses import block_stop_signals


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_requests_a_stop_and_restores_handlers(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    signal.signal(number, signal.SIG_DFL)  # under nohup, SIGHUP is ignored
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    with handle_stop_signals() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert stop.requested == number
        assert stop.status == 0
        stop.acknowledge(3, 9)
        assert stop.status == 128 + number
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before
    assert f"camshaft: {number.name}: finishing the current step and saving" in capfd.readouterr().err


def test_immediate_repeats_of_a_signal_count_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_module, "SAME_SECONDS", 60.0)
    with handle_stop_signals() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == signal.SIGTERM


def test_a_second_signal_ends_the_process_at_once() -> None:
    program = "from camshaft import stop\nimport os, time\nstop.SAME_SECONDS = 0.0\n"
    program += "with stop.handle_stop_signals() as stop:\n    os.kill(os.getpid(), 10)\n    time.sleep(0.1)\n"
    program += "    assert stop.requested\n    os.kill(os.getpid(), 15)\n    time.sleep(60)\n"
    start = time.monotonic()
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGTERM
    assert time.monotonic() - start < 60


def test_a_signal_does_not_wait_for_the_reader_of_the_output() -> None:
    program = "from camshaft.stop import handle_stop_signals\nimport os\n"
    program += "with handle_stop_signals() as stop:\n    os.kill(os.getpid(), 15)\n    os._exit(stop.requested)\n"
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, check=False, stderr=writer, timeout=60).returncode == signal.SIGTERM
    os.close(reader)
    os.close(writer)


def test_no_signal_handler_outside_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGTERM)
    handlers = []

    def run() -> None:
        with handle_stop_signals() as stop:
            handlers.append((stop.requested, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [(None, before)]


def test_workers_ignore_stop_signals_but_their_children_do_not() -> None:
    program = "import os, signal, subprocess, sys, time\nfrom camshaft.stop import ignore_stop_signals\n"
    program += "ignore_stop_signals()\nos.kill(os.getpid(), signal.SIGTERM)\nos.kill(os.getpid(), signal.SIGUSR1)\n"
    program += "child = subprocess.Popen(['sleep', '60'])\nchild.terminate()\nsys.exit(child.wait() + 20)\n"
    with block_stop_signals():
        worker = subprocess.Popen([sys.executable, "-c", program])
    for number in STOP_SIGNALS:  # before its first line runs
        worker.send_signal(number)
    assert worker.wait(60) == 20 - signal.SIGTERM
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
