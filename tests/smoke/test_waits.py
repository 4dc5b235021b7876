"""Processes that stop answering are named in the log within seconds, and end the run at the configured limit."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clock import EventClock
from support.command_line import Forked, finished
from support.interrupting import NAME
from support.ppo_runs import ppo_args
from support.processes import MARK, command_line, marked, parent, still_running
from support.same_run import RANKS

from camshaft import subprocesses

pytestmark = [pytest.mark.timeout(200), pytest.mark.alone]

GENERATE = "trainer.worker_timeouts.generate"
RUN: dict[str, Any] = {
    "trainer.total_training_steps": 9,
    "trainer.total_epochs": 9,
    "trainer.logger": f"[jsonl,{NAME}]",
    GENERATE: 60,
}
GENERATOR: dict[str, Any] = {"actor_rollout_ref.rollout.name": "process"}


def is_rank(pid: int) -> bool:
    return "forkserver" in command_line(parent(pid))


def is_generator(pid: int) -> bool:
    return "camshaft.rollout.process.child" in command_line(pid)


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EventClock:
    """Return the clock of the waits of the driver, which exceed the limit with the first event."""
    clock = EventClock(tmp_path / "events", seconds=100.0)
    monkeypatch.setattr(subprocesses, "time", clock)
    return clock


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Mark the processes of a run, and report its waits after half a second."""
    mark = f"waits-{os.getpid()}-{time.monotonic()}"
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setattr(subprocesses, "REPORT_SECONDS", 0.5)
    monkeypatch.setattr(subprocesses, "REPORT_FACTOR", 0.0)
    monkeypatch.setattr(subprocesses.Wait, "longest", {})
    yield mark
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("overrides", "is_victim", "target"),
    [
        pytest.param(RANKS, is_rank, "of 2 (", id="rank"),
        pytest.param(GENERATOR, is_generator, "the generator's process", id="generator", marks=pytest.mark.slow),
    ],
)
def test_a_suspended_process_is_named_and_ends_the_run(
    overrides: dict[str, Any], is_victim: Any, target: str, mark: str, clock: EventClock, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "hold").write_text("1")
    process = Forked("ppo", *ppo_args(tmp_path, {**RUN, **overrides, "trainer.default_local_dir": run}))
    deadline = time.monotonic() + 100
    while not (run / "metrics.jsonl").exists() or '"step": 1,' not in (run / "metrics.jsonl").read_text():
        assert process.poll() is None, finished(process)
        assert time.monotonic() < deadline
        time.sleep(0.02)
    victim = [pid for pid in marked(mark) if is_victim(pid)][-1]
    os.kill(victim, signal.SIGSTOP)
    (run / "hold").unlink()
    begin, earlier = time.monotonic(), len(process.output())
    while "no answer from" not in " ".join(process.output()[earlier:].split()):
        assert time.monotonic() < begin + 200
        time.sleep(0.05)
    clock.advance()
    result = finished(process, 30)
    assert result.status == 1
    warning = " ".join(result.out[earlier:].split())
    assert f"process {victim} (suspended; `kill -CONT {victim}` resumes it)" in warning
    assert target in warning
    assert f"the limit is {GENERATE}=60" in warning
    assert f"process {victim} (suspended" in result.err
    assert f"If the call is only slow, increase the limit {GENERATE}=60" in result.err
    assert "Traceback" not in result.err
    assert still_running(marked(mark)) == []
