"""Worker processes on one machine; the controller contract covers what all backends share."""

import errno
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import time
from concurrent import futures
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
import torch
from support import ranks  # noqa: F401  (preloads the fork server)
from support.command_line import restore_ctrl_c
from support.processes import parent, still_running

from camshaft import subprocesses
from camshaft.contracts.controller.roles import Toy
from camshaft.controller import (
    Dispatch,
    Worker,
    local,
    prepare_call,
    process_pool,
    register,
    shutdown,
    spawn,
    submit,
    workers,
)
from camshaft.dataproto import DataProto
from camshaft.errors import RolloutError, WorkerError

ROOT = Path(__file__).parents[3]

DRIVER = """
import sys, time
from camshaft.controller import local, spawn, submit
from camshaft.contracts.controller.roles import Toy

if __name__ == "__main__":
    local.PRELOAD[:] = ["camshaft.controller.local"]  # each of these drivers starts a fork server of its own
    toy = spawn(Toy, world_size=2, timeout=60)
    pids = [*toy.pids(), *toy.start_child()]
    {then}
"""

BETWEEN_CALLS = "print(*pids, flush=True); time.sleep(60)"
IN_A_CALL = "call = submit(toy.stall, 1); time.sleep(0.3); print(*pids, flush=True); call.result()"


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """Start the fork server before the tests, so that its imports do not count against their time limits."""
    shutdown(spawn(Toy, world_size=2))


def start_driver(folder: Path, then: str) -> tuple[subprocess.Popen[str], list[int]]:
    script = folder / "driver.py"
    script.write_text(DRIVER.format(then=then))
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    driver = subprocess.Popen(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=restore_ctrl_c,
    )
    assert driver.stdout is not None
    return driver, [int(pid) for pid in driver.stdout.readline().split()]


@pytest.mark.parametrize(
    "then",
    [
        pytest.param(IN_A_CALL, id="in a call"),
        pytest.param(BETWEEN_CALLS, id="between calls", marks=pytest.mark.slow),
    ],
)
def test_no_process_is_left_when_the_driver_is_killed(tmp_path: Path, then: str):
    driver, pids = start_driver(tmp_path, then)
    with driver:
        assert len(pids) == 4
        driver.kill()
        assert still_running(pids) == []
    assert list(tmp_path.glob(".camshaft-tmp-*/*")) == []


@pytest.mark.slow
def test_no_process_is_left_without_a_shutdown(tmp_path: Path):
    driver, pids = start_driver(tmp_path, "print(*pids, flush=True)")
    with driver:
        assert len(pids) == 4
        driver.communicate(timeout=30)
        assert driver.returncode == 0
        assert still_running(pids) == []


def test_ranks_keep_the_folder_of_a_running_driver(monkeypatch: pytest.MonkeyPatch):
    """On a busy machine, ranks see that the driver has closed their sockets before it kills them."""
    kill = local.kill_group
    monkeypatch.setattr(local, "kill_group", lambda group: (time.sleep(0.2), kill(group)))
    toy = spawn(Toy, world_size=2)
    with pytest.raises(WorkerError, match="weights of layer 3"):
        toy.fail_everywhere()
    shutdown(spawn(Toy, world_size=2))


def test_ranks_ignore_the_signals_that_stop_the_driver():
    with workers(Toy, world_size=2) as toy:
        for pid in toy.pids():
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGHUP)
        assert toy.sum_over_ranks(1.0) == 3.0


@pytest.mark.slow
def test_an_interrupt_on_the_driver_ends_all_ranks(tmp_path: Path):
    driver, pids = start_driver(tmp_path, IN_A_CALL)
    with driver:
        assert len(pids) == 4
        driver.send_signal(signal.SIGINT)
        _, errors = driver.communicate(timeout=30)
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert still_running(pids) == []


def processor_seconds(pid: int) -> float:
    """Return the time that a process has computed, which does not depend on other programs."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_ranks_of_a_fork_server_import_nothing_again():
    with workers(Toy, world_size=2) as toy:
        assert max(map(processor_seconds, toy.pids())) < 1.0  # an import of torch takes longer


def test_ranks_share_the_cores_and_see_the_environment_of_today(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TOY", "today")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    with workers(Toy, world_size=2) as toy:
        assert toy.environment() == [("today", "0", threads), ("today", "1", threads)]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with workers(Toy, world_size=2) as toy:
        assert toy.environment() == [("today", "0", 3), ("today", "1", 3)]
    monkeypatch.setenv("OMP_NUM_THREADS", "2,1")  # one number per level of nesting
    with workers(Toy, world_size=2) as toy:
        assert toy.environment() == [("today", "0", 2), ("today", "1", 2)]


def test_more_threads_than_cores_are_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setenv("OMP_NUM_THREADS", str(cores + 1))
    with workers(Toy, world_size=2), workers(Toy, world_size=1):
        (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"OMP_NUM_THREADS={cores + 1}: 2 ranks have {2 * cores + 2} threads on {cores} cores")
    assert warning.endswith(f"or set OMP_NUM_THREADS={max(1, cores // 2)}")
    caplog.clear()
    for enough in ("1", ""):
        monkeypatch.setenv("OMP_NUM_THREADS", enough)
        with workers(Toy, world_size=2):
            assert not caplog.records


def test_a_long_wait_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(subprocesses, "REPORT_SECONDS", 0.3)
    monkeypatch.setattr(subprocesses.Wait, "longest", {})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # too many threads are reported too
    with workers(Toy, world_size=2, name="critic") as toy, caplog.at_level(logging.WARNING):
        pid = toy.pids()[1]
        toy.stall(1, seconds=1.1)
        first, second = (record.getMessage() for record in caplog.records)
        toy.stall(1, seconds=1.1)
    assert first.startswith(f"critic.stall: no answer from rank(s) 1 of 2 (process {pid}) for 0 s; the limit is ")
    assert "in stall" not in first
    assert "in stall" in second
    assert len(caplog.records) == 2, "a call that takes as long as before is not reported"


def test_a_killed_fork_server_is_named_in_the_error():
    with workers(Toy, world_size=2) as toy:
        server = parent(toy.pids()[0])
        os.kill(server, signal.SIGKILL)
        with pytest.raises(WorkerError, match=rf"the fork server \(process {server}\), which has started the worker"):
            toy.stall(1, seconds=60)
    with workers(Toy, world_size=2) as toy:  # a new fork server starts
        assert len(toy.pids()) == 2


class Waiting(Worker):
    """A role whose method waits for another process."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait(self) -> None:
        wait = subprocesses.Wait("load_weights", RolloutError)
        while True:
            time.sleep(0.1)
            wait.check(lambda: "the generator's process 7")


@pytest.mark.alone
def test_the_error_names_the_process_that_a_rank_waits_for():
    message = (
        r"^Waiting.wait raised on rank . of 2: camshaft.errors.RolloutError: load_weights: no answer from the "
        r"generator's process 7 for 1.\d s. If the call is only slow, increase the limit spawn\(..., timeout=2\)"
    )
    with workers(Waiting, world_size=2, timeout=2) as role, pytest.raises(WorkerError, match=message):
        role.wait()


class Held(Worker):
    """A role with a call that ends when a file exists, and calls that may follow it."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def hold(self, batch: DataProto, file: Path) -> DataProto:
        while not file.exists():
            time.sleep(0.01)
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def follow(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, keeps_seats=True)
    def receive(self) -> None: ...

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def rebuild(self) -> None: ...


@pytest.mark.parametrize("name", ["receive", "rebuild"])
def test_a_call_does_not_wait_for_those_in_progress_to_be_submitted(name: str, tmp_path: Path) -> None:
    """Unless a call that may have changed the seats of the ranks was submitted in between."""
    batch, file = DataProto.from_dict({"x": torch.arange(4.0)}), tmp_path / "go"
    with workers(Held, world_size=2, timeout=60) as role:
        prepare_call(role.follow)
        held, between = submit(role.hold, batch, file), submit(getattr(role, name))
        with futures.ThreadPoolExecutor(1) as pool:
            submitting = pool.submit(submit, role.follow, batch)
            is_immediate = bool(futures.wait([submitting], 5.0 if name == "receive" else 0.5).done)
            file.touch()
            assert len(submitting.result().result()) == len(held.result()) == 4
        between.result()
    assert is_immediate == (name == "receive")


def test_the_exit_of_the_driver_completes_an_interrupted_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_pool, "_LIVE", set())
    toy = spawn(Toy, world_size=2)
    pids = toy.pids()
    with monkeypatch.context() as patch:
        patch.setattr(local, "kill_group", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            toy.fail_everywhere()
    assert still_running(pids, 0.0) == pids
    process_pool._terminate_all()
    assert still_running(pids) == []


def test_a_local_role_class_is_an_error():
    class Hidden(Worker):
        pass

    with pytest.raises(WorkerError, match=r"Hidden.__init__: an argument cannot be sent .* top level"):
        spawn(Hidden, world_size=2)


def test_a_crash_in_native_code_shows_the_stack():
    toy = spawn(Toy, world_size=2)
    with pytest.raises(WorkerError, match=r"died in crash \(SIGSEGV\)") as exc_info:
        toy.crash(1)
    assert "in crash" in str(exc_info.value)


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), MemoryError("no memory")], ids=repr)
def test_an_error_of_the_message_exchange_is_raised(error: Exception, monkeypatch: pytest.MonkeyPatch):
    toy = spawn(Toy, world_size=2, timeout=60)
    monkeypatch.setattr(local, "receive", Mock(side_effect=error))
    message = (
        rf"Toy.pids: the driver cannot exchange messages with rank . of 2: {type(error).__name__}: .*{error.args[-1]}"
    )
    with pytest.raises(WorkerError, match=message) as exc_info:
        toy.pids()
    assert exc_info.value.__cause__ is error


class Unreadable(Worker):
    """A role whose rank cannot read requests after the first one."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def read_no_more(self) -> None:
        receive = local.receive

        def fail(descriptor: int) -> NoReturn:
            receive(descriptor)  # the rank must not end before the driver has the results of this call
            raise MemoryError

        local.receive = fail


def test_a_rank_that_cannot_read_a_request_exits():
    role = spawn(Unreadable, world_size=2, timeout=60)
    role.read_no_more()
    with pytest.raises(WorkerError, match=r"rank . of 2 of Unreadable .* died in read_no_more \(exit code 1\)"):
        role.read_no_more()


def test_several_groups_run_at_once():
    with workers(Toy, factor=2.0, world_size=2) as first, workers(Toy, factor=5.0, world_size=2) as second:
        assert first.sum_over_ranks(1.0) == second.sum_over_ranks(1.0) == 3.0
        assert not set(first.pids()) & set(second.pids())
        shutdown(first)
        assert second.sum_over_ranks(1.0) == 3.0


def test_tensors_outside_a_batch_are_sent():
    with workers(Toy, world_size=2) as toy:
        (_, first), (_, second) = toy.echo([torch.ones(2), {"x": torch.zeros(3)}])
        assert torch.equal(first, torch.ones(2))
        assert torch.equal(second["x"], torch.zeros(3))


class Collecting(Worker):
    """A role that measures the memory that its process shares with the fork server."""

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def shared_before_and_after(self) -> Any:
        """Return the shared memory before and after a garbage collection, in kB."""
        sizes = [self._shared()]
        gc.collect()
        return [*sizes, self._shared()]

    def _shared(self) -> int:
        rollup = Path("/proc/self/smaps_rollup").read_text()
        return int(re.findall(r"^Shared_Dirty: +(\d+) kB", rollup, re.MULTILINE)[0])


def test_garbage_collection_copies_no_memory_of_the_fork_server():
    with workers(Collecting, world_size=2) as role:
        (before, after), _ = role.shared_before_and_after()
    assert before > 20_000
    assert before - after < before / 10


UNGUARDED = """
from camshaft.contracts.controller.roles import Toy
from camshaft.controller import Options, PoolSpec, local, pools, spawn
local.PRELOAD[:] = ["camshaft.controller.local"]  # the script starts a fork server of its own
print("started", flush=True)
with pools([PoolSpec("pool", 1, 2, "cpu")], "local", Options(import_main=False)) as (pool,):
    print("pids", len(set(spawn(Toy, pool=pool, name="toy").pids())), flush=True)
"""


@pytest.mark.timeout(200)
def test_ranks_do_not_run_a_script_without_a_main_guard_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNGUARDED, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    assert done.stdout.split() == ["started", "pids", "2"]


OWN_ROLE = """
import multiprocessing
from camshaft.contracts.controller import roles

class Toy(roles.Toy):
    def __init__(self):
        super().__init__()
        self.lock = multiprocessing.RLock()
"""


@pytest.mark.timeout(200)
def test_semaphores_of_ranks_are_removed(tmp_path: Path) -> None:
    (tmp_path / "own_role.py").write_text(OWN_ROLE, encoding="utf-8")
    script = UNGUARDED.replace("camshaft.contracts.controller.roles", "own_role")
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    assert "pids 2" in done.stdout
    assert "leaked" not in done.stderr
