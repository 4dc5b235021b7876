"""kill -9 of each kind of process of a run on Ray gives a readable error within ten seconds, and the run can resume.

The actor has two ranks; the critic has one rank in a separate pool; every step is saved. Every test run includes a few
cases. `make test-cluster` runs all twenty and prints the duration of each.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command_line import finished, start
from support.ppo_runs import ppo_args
from support.processes import MARK, marked, still_running
from support.same_run import ACTOR

from camshaft import storage
from camshaft.tracking import deterministic
from camshaft.tracking.jsonl import read_metrics

pytestmark = [pytest.mark.timeout(900), pytest.mark.alone]

STEPS = 14
SECONDS = 10.0
"""Time limit for the error message."""
RUN_SECONDS = 300.0
"""Time limit of a run, which has six processes of Ray and four of camshaft to start."""
SHARDED: dict[str, Any] = {
    f"{ACTOR}.strategy": "fsdp",
    "critic.strategy": "fsdp",
    "actor_rollout_ref.resource_pool": "actors",
    "critic.resource_pool": "critics",
    "+trainer.resource_pools.actors.n_gpus_per_node": 2,
    "+trainer.resource_pools.critics.n_gpus_per_node": 1,
    "trainer.controller": "ray",
    "trainer.cpus_per_rank": 0.5,
    "ray_kwargs.ray_init": "{include_dashboard:false,object_store_memory:134217728}",
    "trainer.total_training_steps": STEPS,
    "trainer.total_epochs": STEPS,
    "trainer.save_freq": 1,
    "trainer.logger": "[jsonl]",
    "trainer.resume_mode": "auto",
}
KINDS = {
    "actor": "rank 1 of 2 of actor_rollout_ref",
    "critic": "rank 0 of 1 of critic",
    "reward": "the reward function failed",
    "raylet": "the Ray daemon of machine",
    "gcs": "the head of the Ray cluster",
    "driver": "",
}
"""Expected part of the message."""
CASES = [(kind, seed) for seed in range(4) for kind in KINDS][:20]
ALWAYS = [("actor", 0)]


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    """Return a folder with an uninterrupted run in its folder `whole`."""
    result = finished(start("-m", "camshaft", *run_args(home, home / "whole")), RUN_SECONDS)
    assert result.status == 0, result.err
    return home


def run_args(home: Path, run: Path) -> list[str]:
    return ["ppo", *ppo_args(home, {**SHARDED, "trainer.default_local_dir": run})]


def numbers(run: Path) -> dict[int, dict[str, float]]:
    return {int(row["step"]): deterministic(row) for row in read_metrics(run / "metrics.jsonl")}


def victim(kind: str, mark: str, driver: int) -> int:
    """Return the process of this kind that belongs to the run."""
    if kind == "driver":
        return driver
    for pid in marked(mark):
        args = command(pid)
        try:
            output = os.readlink(f"/proc/{pid}/fd/1")
        except OSError:
            continue
        ranks = {"actor": "actors_rank1.log", "critic": "critics_rank0.log"}
        if kind in ranks and output.endswith(ranks[kind]) and args[0].startswith("ray::"):
            return pid
        if kind in ("raylet", "gcs") and args[0].endswith({"raylet": "/raylet", "gcs": "/gcs_server"}[kind]):
            return pid
        if kind == "reward" and any("camshaft.rewards.worker" in word for word in args):
            return pid
    raise AssertionError(f"no process of kind {kind}")


def killed(home: Path, run: Path, kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, float]:
    """Return the run's exit status, its output, and the time from the kill to the error message in seconds."""
    mark = f"{kind}-{seed}-{os.getpid()}"
    monkeypatch.setenv(MARK, mark)
    log = run.with_suffix(".err")
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "camshaft", *run_args(home, run)], stdout=subprocess.DEVNULL, stderr=file
        )
    monkeypatch.delenv(MARK)
    try:
        wait_for(lambda: '"step": 1,' in text_of(run / "metrics.jsonl") or process.poll() is not None, RUN_SECONDS)
        time.sleep(random.Random(seed).uniform(0.0, 2.0))
        os.kill(victim(kind, mark, process.pid), signal.SIGKILL)
        at = time.monotonic()
        wait_for(lambda: "camshaft: " in log.read_text() or process.poll() is not None, 60)
        seconds = time.monotonic() - at
        status = process.wait(60)
    finally:
        process.kill()
    workers = [pid for pid in marked(mark) if any(word in command(pid)[0] for word in ("ActorHost", "python"))]
    assert still_running(workers) == []
    assert still_running(marked(mark)) == []  # Ray's agents check for their daemon periodically
    return status, log.read_text(), seconds


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def text_of(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:  # the process has just exited
        return [""]


@pytest.mark.parametrize(
    ("kind", "seed"),
    [pytest.param(*case, marks=pytest.mark.slow if case in ALWAYS else pytest.mark.cluster) for case in CASES],
)
def test_a_run_resumes_after_any_killed_process(
    kind: str, seed: int, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    status, output, seconds = killed(home, run, kind, seed, monkeypatch)
    message = next((line for line in output.splitlines() if line.startswith("camshaft: ")), "")
    print(f"{kind:6} {seed}  {seconds:5.1f} s  status {status:2}  {message}")  # noqa: T201
    if status == 0:
        # An idle reward worker is replaced, and a run that is almost finished no longer needs a daemon.
        assert kind in ("reward", "raylet", "gcs")
        assert numbers(run) == numbers(home / "whole")
    elif kind != "driver":
        assert seconds < SECONDS
        assert status == 1
        assert KINDS[kind] in message
        assert output.count("Traceback") <= 1
    resumed = finished(start("-m", "camshaft", *run_args(home, run)), RUN_SECONDS)
    assert resumed.status == 0, resumed.err
    assert numbers(run) == numbers(home / "whole")


@pytest.mark.cluster
def test_ranks_end_with_their_driver_without_guards(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, mark = tmp_path / "run", f"guards-{os.getpid()}"
    monkeypatch.setenv(MARK, mark)
    process = start("-m", "camshaft", *run_args(home, run), "trainer.total_training_steps=1000")
    monkeypatch.delenv(MARK)
    try:
        wait_for(lambda: '"step": 1,' in text_of(run / "metrics.jsonl") or process.poll() is not None, RUN_SECONDS)
        guards = [pid for pid in marked(mark) if command(pid)[0] == "/bin/sh"]
        assert len(guards) == 4  # that of the cluster, and one per rank
        for pid in guards:
            os.kill(pid, signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    ranks = [pid for pid in marked(mark) if "ActorExecutor" in command(pid)[0]]
    assert still_running(ranks) == []
    assert still_running(marked(mark)) == []  # Ray's agents wait a minute for the head of their cluster


@pytest.mark.cluster
def test_a_stopped_run_saves_and_leaves_no_process(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, mark = tmp_path / "run", f"stop-{os.getpid()}"
    monkeypatch.setenv(MARK, mark)
    process = start("-m", "camshaft", *run_args(home, run), "trainer.save_freq=-1")
    monkeypatch.delenv(MARK)
    wait_for(lambda: '"step": 1,' in text_of(run / "metrics.jsonl") or process.poll() is not None, RUN_SECONDS)
    for kind in ("actor", "critic"):
        os.kill(victim(kind, mark, process.pid), signal.SIGTERM)  # ranks ignore the signal
    process.send_signal(signal.SIGTERM)
    result = finished(process)
    assert result.status == 143, result.err
    ((step, _),) = storage.step_folders(run)
    assert max(numbers(run)) == step < STEPS
    assert still_running(marked(mark)) == []
    resumed = finished(start("-m", "camshaft", *run_args(home, run)), RUN_SECONDS)
    assert resumed.status == 0, resumed.err
    assert numbers(run) == numbers(home / "whole")
