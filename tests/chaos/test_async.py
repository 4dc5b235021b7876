"""Asynchronous runs whose processes are killed in a named state go on or resume, and equal an undisturbed run.

`make chaos` kills processes of such a run at random moments.
"""

import os
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow.parquet
import pytest
from support import faulty_rollouts, interrupting
from support.clock import EventClock
from support.command_line import Forked, Run, finished
from support.command_line import start as start_python
from support.ppo_runs import ppo_args
from support.processes import MARK, marked, still_running
from support.shared_folders import shared_folder

from camshaft import subprocesses
from camshaft.tracking.run_folder import RunFolder
from chaos.chaos import ASYNC, SETTINGS, differences, kill, kill_and_restart, logged, victims

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]

Process = Forked | subprocess.Popen[str]
STEPS, AT, ROWS = 6, 4, 24
RUN: dict[str, Any] = {
    **SETTINGS,
    **ASYNC,
    "async_training.max_staleness": 1,
    "actor_rollout_ref.worker_cls": interrupting.HOLDING,
    "custom_reward_function.path": interrupting.__file__,
    "data.train_max_samples": ROWS,
    "trainer.logger": f"[jsonl,{interrupting.NAME}]",
    "trainer.total_training_steps": STEPS,
}


@pytest.fixture(autouse=True)
def _import_of_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")


@cache
def home() -> Path:
    return shared_folder("chaos_async_home", lambda folder: ppo_args(folder))


def start(
    run: Path, monkeypatch: pytest.MonkeyPatch, overrides: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Process, str]:
    """Start the command, and return it with the mark of its processes."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv(interrupting.FOLDER, str(run))
    arguments = ["ppo", *ppo_args(home(), {**RUN, **overrides, "trainer.default_local_dir": run})]
    # A fork of this process can neither run its command again nor start Ray.
    is_forked = not overrides.keys() & {"trainer.max_restarts", "trainer.controller"}
    return Forked(*arguments) if is_forked else start_python("-m", "camshaft", *arguments), mark


def undisturbed() -> Path:
    def write(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            result = ended(*start(folder / "run", monkeypatch))
            assert result.status == 0, result

    return shared_folder("chaos_async", write) / "run"


@contextmanager
def held_in(
    state: str, run: Path, monkeypatch: pytest.MonkeyPatch, overrides: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[tuple[Process, str]]:
    """Start a run, yield it with the mark of its processes when step `AT` is in a state, and release it."""
    run.mkdir()
    file = run / f"hold_{state}"
    if state != "scoring":
        file.write_text(str(AT))
    process, mark = start(run, monkeypatch, overrides)
    deadline = time.monotonic() + interrupting.SECONDS
    try:
        while not (run / "held").exists():
            if state == "scoring" and logged(run) == AT - 1:  # a reward function does not know its step
                (whole := run / "whole").write_text(str(AT))
                whole.rename(file)  # the run reads it at any time
            assert process.poll() is None, finished(process)
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield process, mark
    finally:
        if not (run / "held").exists():
            process.kill()
        file.unlink()


def ended(process: Process, mark: str) -> Run:
    result = finished(process, interrupting.SECONDS)
    assert not still_running(marked(mark))
    return result


def kill_in(
    state: str,
    victim: str,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> Run:
    """Run until step `AT` is in a state, kill a process, and return how the run ended."""
    with held_in(state, run, monkeypatch, overrides) as (process, mark):
        assert process.pid is not None
        kill(victims(process.pid, mark)[victim][-1])
    return ended(process, mark)


def check(run: Path) -> None:
    assert differences(run, undisturbed(), STEPS) == []
    tables = [pyarrow.parquet.read_table(file) for file in sorted((run / "samples").glob("*.parquet"))]
    rows = pyarrow.parquet.read_table(home() / "data" / "train.parquet").num_rows
    assert rows > ROWS
    epochs = STEPS * 8 // ROWS
    expected = {f"{epoch}/{row}": 2 for epoch in range(epochs) for row in range(ROWS)}
    assert Counter(uid for table in tables for uid in table["uid"].to_pylist()) == expected


CASES = [(state, victim) for state in interrupting.STATES for victim in ("driver", "rank")]
CASES.append(("scoring", "reward worker"))
FAST = [("publishing", "rank"), ("storing", "driver")]


@pytest.mark.parametrize(
    ("state", "victim"), [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in CASES]
)
def test_a_run_that_is_killed_in_a_state_is_the_undisturbed_run(
    state: str, victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    result = kill_in(state, victim, run, monkeypatch)
    if victim == "rank":
        assert result.status == 1
        assert " died in " in result.err
        assert "Traceback" not in result.err
    if victim != "reward worker":  # the driver replaces a reward worker
        result = ended(*start(run, monkeypatch))
    assert result.status == 0, result.err
    check(run)


FULL = {
    "learning": f"/global_step_{AT}/actor",
    "saving": f"/global_step_{AT}/critic",
    "storing": f"/global_step_{AT}/trainer",
    "marking": f"/global_step_{AT + 1}/",  # the marker is written, and an old checkpoint is deleted
}
"""States in which the disk becomes full, and what cannot be written next."""
GENERATOR = {
    "process": {"actor_rollout_ref.rollout.name": "process"},
    "ranks": {"+trainer.resource_pools.rollout.n_gpus_per_node": 2},
    "ray": {"trainer.controller": "ray", "ray_kwargs.ray_init": "{include_dashboard: false, num_cpus: 2}"},
}
RESTARTED = [
    *((state, "rollout", "ranks") for state in interrupting.STATES),
    *((state, "generator", "process") for state in ("receiving", "generating", "learning")),
    ("generating", "rollout", "ray"),
]


@pytest.mark.parametrize(
    ("state", "victim", "rollout"),
    [
        pytest.param(*case, marks=() if case == ("generating", "generator", "process") else pytest.mark.slow)
        for case in RESTARTED
    ],
)
def test_a_run_goes_on_if_its_generator_is_killed(
    state: str, victim: str, rollout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    result = kill_in(state, victim, run, monkeypatch, GENERATOR[rollout])
    assert result.status == 0, result.err
    assert "starts again (restart 1 of 3 in a row)" in " ".join(result.out.split())
    check(run)


@pytest.mark.parametrize(
    "rollout", [pytest.param("process", id="process"), pytest.param("rank", marks=pytest.mark.slow)]
)
def test_three_deaths_of_a_generator_in_a_row_end_a_run_which_resumes(
    rollout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, dies = tmp_path / "run", tmp_path / "dies"
    monkeypatch.setenv(faulty_rollouts.HOLD, str(dies))
    settings = {"actor_rollout_ref.rollout.name": faulty_rollouts.DIES}
    if rollout == "process":
        settings = {**GENERATOR["process"], "+actor_rollout_ref.rollout.engine_kwargs.rollout": faulty_rollouts.DIES}
    dies.write_text(str(AT - 1))
    result = ended(*start(run, monkeypatch, settings))
    assert result.status == 1
    restarts = [f"starts again (restart {number} of 3 in a row)" for number in (1, 2, 3, 4)]
    assert [text in " ".join(result.out.split()) for text in restarts] == [True, True, True, False]
    assert "died in generate_sequences (SIGKILL" in result.err
    assert "Number of restarts of the pool 'rollout' in a row: 3." in result.err
    assert logged(run) in (AT - 1, AT)
    dies.unlink()
    result = ended(*start(run, monkeypatch, settings))
    assert result.status == 0, result.err
    check(run)


@pytest.mark.parametrize(
    "state",
    [pytest.param(state, marks=() if state == "learning" else pytest.mark.slow) for state in interrupting.STATES],
)
def test_a_command_runs_again_after_a_failure(state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    result = kill_in(state, "rank", run, monkeypatch, {"trainer.max_restarts": 3})
    assert result.status == 0, result.err
    assert "the run resumes in 10 s (restart 1 of 3 since the last saved step)" in result.err
    (restart,) = RunFolder(run).info()["restarts"]
    assert " died in " in restart["cause"]
    assert restart["saved"] in (str(AT - 1), str(AT))
    if state == "learning":
        assert "died in update_actor" in restart["cause"]
        assert restart["saved"] == str(AT - 1)
    check(run)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    result = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32M", "none", folder], capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"mounting a file system is not permitted: {result.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(file: Path) -> None:
    """Write zeros to the file until its disk is full."""
    disk = os.statvfs(file.parent)
    file.write_bytes(bytes(disk.f_bavail * disk.f_frsize))


@pytest.mark.parametrize(
    "state", [pytest.param(state, marks=() if state == "storing" else pytest.mark.slow) for state in FULL]
)
def test_a_full_disk_ends_a_run_which_resumes(state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "disk") as disk:
        run = disk / "run"
        with held_in(state, run, monkeypatch) as (process, mark):
            fill(disk / "filler")
        result = ended(process, mark)
        assert result.status == 1
        error = next(line for line in result.err.splitlines() if line.startswith("camshaft: "))
        assert "free space on the disk" in error or "save_checkpoint raised on rank 0" in error
        assert FULL[state] in error
        assert "No space left on device" in error
        (disk / "filler").unlink()
        result = ended(*start(run, monkeypatch))
        assert result.status == 0, result.err
        check(run)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_kills_change_nothing(tmp_path: Path) -> None:
    report = kill_and_restart("async", 5, tmp_path, seed=0)
    assert report.problems == []
    assert sum(report.kills.values()) == 5


WAITS = {
    "publishing": ("generate", "actor_rollout_ref.publish", f"step {AT} publishes the weights of version {AT - 1}."),
    "receiving": ("generate", "rollout.receive_weights", f"step {AT} waits for batch {AT + 1}."),
    "generating": ("generate", "rollout.generate_sequences", f"step {AT} waits for batch {AT + 1}."),
    "saving": ("save", "actor_rollout_ref.save_checkpoint", ""),
}
"""Phase of `trainer.worker_timeouts`, call, and what waits for it in each state."""


@pytest.mark.parametrize(
    "state", [pytest.param(state, marks=() if state == "generating" else pytest.mark.slow) for state in WAITS]
)
def test_a_wait_that_exceeds_its_limit_names_both_sides(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = EventClock(tmp_path / "events", seconds=10_000.0)
    monkeypatch.setattr(subprocesses, "time", clock)
    run, (phase, call, waiting) = tmp_path / "run", WAITS[state]
    limits = {f"trainer.worker_timeouts.{phase}": 5_000, "trainer.worker_timeout": 100_000}
    with held_in(state, run, monkeypatch, limits) as (process, mark):
        while state in ("receiving", "generating") and logged(run) < AT:  # the save of the step waits then
            time.sleep(0.1)
        time.sleep(1.0)
        clock.advance()
        result = ended(process, mark)
    assert result.status == 1
    assert f"{call}: no answer from rank(s) 0 of 1" in result.err
    assert f"trainer.worker_timeouts.{phase}=5000" in result.err
    assert f"At that time, {waiting}" in result.err or not waiting
    monkeypatch.setattr(subprocesses, "time", time)
    assert ended(*start(run, monkeypatch)).status == 0
    check(run)
