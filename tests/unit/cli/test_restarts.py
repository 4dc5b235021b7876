"""Which failures let a command run again, how often, and after which pauses."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.ppo_runs import ppo_args, ppo_config

from camshaft.checkpoint.manager import LATEST
from camshaft.cli import restarts
from camshaft.cli.restarts import restarting
from camshaft.config import load_ppo
from camshaft.errors import (
    CamshaftError,
    ClusterError,
    ConfigError,
    DivergenceError,
    EngineError,
    GeneratorError,
    IdleError,
    NoAnswerError,
    RewardError,
    WorkerError,
)
from camshaft.stop import Stop
from camshaft.tracking.run_folder import INFO, RunFolder, process_start
from camshaft.view.advice import advise


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of the pauses, which take no time, and keep this process from being replaced."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(restarts, "_command", [])
    return slept


def run_folder(folder: Path, **facts: Any) -> Path:
    run = folder / "run"
    run.mkdir()
    pid = os.getpid()
    (run / INFO).write_text(json.dumps({"argv": [], "pid": pid, "pid_start": process_start(pid), **facts}))
    return run


def fail(
    folder: Path, error: CamshaftError, number: int = 3, resume_mode: str = "auto", saves: int | None = None
) -> None:
    """Fail in a run, after it has saved the step `saves`."""
    settings = {"trainer.max_restarts": number, "trainer.resume_mode": resume_mode}
    with restarting(ppo_config(folder, settings), ["a=1"], Stop()):
        if saves is not None:
            (folder / "run" / LATEST).write_text(str(saves))
        raise error


def raised_on_a_rank(cause: BaseException) -> WorkerError:
    error = WorkerError("update_actor raised on rank 0 of 2")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        WorkerError("rank 1 of 2 died"),
        GeneratorError("the generator's process died"),
        raised_on_a_rank(GeneratorError("the generator's process died")),
        raised_on_a_rank(RuntimeError("Connection closed by peer")),
        raised_on_a_rank(NoAnswerError("generate_sequences: no answer from the generator's process")),
        ClusterError("the cluster has 1 of 2 machines"),
    ],
)
def test_a_failure_of_a_process_runs_the_command_again(
    error: CamshaftError, tmp_path: Path, pauses: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(tmp_path)
    fail(tmp_path, error)
    assert restarts._command == [sys.executable, *sys.orig_argv[1:], f"trainer.default_local_dir={run}"]
    assert pauses == [10.0]
    assert str(error) in (output := capsys.readouterr().err)
    assert "the run resumes in 10 s (restart 1 of 3 since the last saved step)" in output
    (entry,) = RunFolder(run).info()["restarts"]
    assert entry["cause"] == f"{type(error).__name__}: {error}"
    assert entry["saved"] is None


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("unknown key"),
        RewardError("the reward function failed"),
        DivergenceError("the loss is not finite"),
        IdleError("nothing was trained"),
        raised_on_a_rank(EngineError("wrong shape")),
        raised_on_a_rank(KeyError("name")),
    ],
)
def test_an_error_that_would_come_back_ends_the_run(error: CamshaftError, tmp_path: Path, pauses: list[float]) -> None:
    run_folder(tmp_path)
    with pytest.raises(type(error)):
        fail(tmp_path, error)
    assert not pauses
    assert not restarts._command


def test_restarts_count_until_a_step_is_saved(tmp_path: Path, pauses: list[float]) -> None:
    run, error = run_folder(tmp_path), WorkerError("rank 1 of 2 died")
    for _ in range(3):
        fail(tmp_path, error)
    with pytest.raises(WorkerError):
        fail(tmp_path, error)
    assert pauses == [10.0, 20.0, 40.0]
    (run / LATEST).write_text("7")
    fail(tmp_path, error)
    assert pauses == [10.0, 20.0, 40.0, 10.0]
    (advice,) = advise(RunFolder(run), time.time())
    assert advice.title == "Run restarted"
    assert [line.partition(", ")[2] for line in advice.text.splitlines()[1:]] == [
        "last saved step none, pause 10 s: WorkerError: rank 1 of 2 died",
        "last saved step none, pause 20 s: WorkerError: rank 1 of 2 died",
        "last saved step none, pause 40 s: WorkerError: rank 1 of 2 died",
        "last saved step 7, pause 10 s: WorkerError: rank 1 of 2 died",
    ]


def test_pauses_have_a_limit(tmp_path: Path, pauses: list[float]) -> None:
    run_folder(tmp_path)
    for _ in range(9):
        fail(tmp_path, WorkerError("rank 1 of 2 died"), number=9)
    assert pauses == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0, 600.0]


def test_a_run_that_has_not_started_is_not_restarted(tmp_path: Path, pauses: list[float]) -> None:
    run_folder(tmp_path, pid=1)
    with pytest.raises(WorkerError):
        fail(tmp_path, WorkerError("rank 1 of 2 died"))
    assert not pauses


def test_a_run_that_starts_over_resumes_from_its_own_checkpoint(tmp_path: Path, pauses: list[float]) -> None:
    run, error = run_folder(tmp_path), WorkerError("rank 1 of 2 died")
    folder = f"trainer.default_local_dir={run}"
    fail(tmp_path, error, resume_mode="disable")
    assert restarts._command == [sys.executable, *sys.orig_argv[1:], folder]
    fail(tmp_path, error, resume_mode="disable", saves=7)
    resume = ["trainer.resume_mode=auto", "trainer.resume_from_path=null"]
    assert restarts._command == [sys.executable, *sys.orig_argv[1:], folder, *resume]
    repeated = ppo_args(tmp_path, {"trainer.resume_mode": "disable"})
    assert load_ppo([*repeated, *resume]).trainer.resume_mode == "auto"


def test_a_run_does_not_resume_from_the_checkpoint_of_another_run(tmp_path: Path, pauses: list[float]) -> None:
    run = run_folder(tmp_path)
    (run / LATEST).write_text("10")  # of an earlier run in this folder
    fail(tmp_path, WorkerError("rank 1 of 2 died"), resume_mode="disable")
    assert restarts._command == [sys.executable, *sys.orig_argv[1:], f"trainer.default_local_dir={run}"]


def test_after_a_stop_signal_nothing_restarts(
    tmp_path: Path, pauses: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder(tmp_path)
    stop = Stop()
    with restarting(ppo_config(tmp_path, {"trainer.max_restarts": 3}), ["a=1"], stop):
        stop.request(signal.SIGUSR1)
        raise WorkerError("rank 1 of 2 died")
    assert stop.status == 128 + signal.SIGUSR1
    assert not pauses
    assert not restarts._command
    assert f"SIGUSR1: the run does not restart (exit status {stop.status})" in capsys.readouterr().err
