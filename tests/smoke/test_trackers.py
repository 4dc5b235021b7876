"""Complete runs with the trackers of the ecosystem, and with trackers that fail."""

import functools
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import wandb
from mlflow.tracking import MlflowClient
from support.command_line import camshaft, sft_args
from support.interrupting import NAME, run_until
from support.ppo_runs import ppo_args
from support.wandb_file import exit_codes, history
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from camshaft.errors import CheckpointError
from camshaft.plugins import install_command
from camshaft.roles import ActorRolloutRefWorker, SupervisedWorker
from camshaft.tracking import RunInfo, Tracker
from camshaft.tracking.jsonl import read_metrics


class FullDisk(Tracker):
    """A tracker that starts and then fails every write."""

    def __init__(self, run: RunInfo):
        pass

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        raise OSError("no space left on device")

    def finish(self) -> None:
        raise OSError("no space left on device")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "full_disk", sys.modules[__name__])
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    yield
    wandb.teardown()  # ends the process that wandb started for the run


def test_all_trackers_record_the_metrics_of_the_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    overrides = {
        "trainer.logger": "[console,jsonl,tensorboard,tracking,mlflow]",
        "trainer.total_training_steps": 2,
        "trainer.test_freq": 2,
        "trainer.log_val_generations": 3,
    }
    result = camshaft("ppo", *ppo_args(tmp_path, overrides))
    assert (result.status, result.err) == (0, "")
    assert capfd.readouterr() == ("", "")
    library_lines = [line for line in result.out.splitlines() if "wandb" in line or "mlflow" in line.lower()]
    assert len(library_lines) >= 2, result.out
    assert "step 2/2" in result.out

    run = tmp_path / "run"
    lines = {line.pop("step"): line for line in read_metrics(run / "metrics.jsonl")}
    assert list(lines) == [1, 2]
    assert all(line.pop("timing/at") for line in lines.values())  # trackers record the time themselves
    logged = {line.pop("step"): line for line in history(run)}
    (table,) = run.glob("wandb/offline-run-*/files/media/table/val/*.json")
    assert len(json.loads(table.read_text())["data"]) == 3
    logged = {step: {name: line[name] for name in line if "generations" not in name} for step, line in logged.items()}
    assert logged == {step: pytest.approx(line) for step, line in lines.items()}

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    for name, value in lines[2].items():
        assert events.Scalars(name)[-1].value == pytest.approx(value), name
    client = MlflowClient(tracking_uri=(run / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("camshaft_examples")
    assert experiment is not None
    (tracked,) = client.search_runs([experiment.experiment_id])
    assert {name.replace("_at_", "@"): value for name, value in tracked.data.metrics.items()} == pytest.approx(lines[2])
    assert tracked.data.params["actor_rollout_ref.rollout.name"] == "torch"
    (table,) = run.glob("mlruns/*/*/artifacts/validation/step_2.json")
    assert len(json.loads(table.read_text())["data"]) == 3


@pytest.fixture(autouse=True)
def _file_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let MLflow read the files that a run in another process has written."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def runs_of(folder: Path) -> list[str]:
    """Return the final status of each run according to MLflow."""
    client = MlflowClient(tracking_uri=(folder / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("camshaft_examples")
    assert experiment is not None
    return [run.info.status for run in client.search_runs([experiment.experiment_id])]


def test_a_run_that_an_error_ends_has_failed(tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, **_): raise ValueError"
    )
    overrides = {
        "trainer.logger": "[wandb,mlflow]",
        "custom_reward_function.path": tmp_path / "raises.py",
        "custom_reward_function.on_error": "raise",
    }
    result = camshaft("ppo", *ppo_args(tmp_path, overrides))
    assert result.status == 1
    assert "RewardError" in result.err
    assert runs_of(tmp_path / "run") == ["FAILED"]
    assert exit_codes(tmp_path / "run") == [1]


@pytest.mark.parametrize(
    ("trainer", "args_of", "role"),
    [
        ("ppo", ppo_args, ActorRolloutRefWorker),
        pytest.param("sft", sft_args, SupervisedWorker, marks=pytest.mark.slow),
    ],
)
def test_a_failed_background_save_fails_the_run(
    trainer: str, args_of: Callable[..., list[str]], role: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @functools.wraps(role.wait_for_checkpoint)
    def fails(self: object) -> None:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(role, "wait_for_checkpoint", fails)
    more = {"trainer.default_local_dir": tmp_path / "run", "trainer.total_training_steps": 1}
    result = camshaft(trainer, *args_of(tmp_path, {**more, "trainer.logger": "[mlflow]"}))
    assert result.status == 1
    assert "the disk is full" in result.err
    assert runs_of(tmp_path / "run") == ["FAILED"]


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "args_of"), [("ppo", ppo_args), ("sft", sft_args)])
def test_a_stopped_run_is_killed_and_resumes_to_the_end(
    trainer: str, args_of: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    more = {"trainer.total_training_steps": 3, "trainer.resume_mode": "auto", "trainer.default_local_dir": run}
    args = [trainer, *args_of(tmp_path, {**more, "trainer.logger": f"[jsonl,mlflow,{NAME}]"})]
    assert run_until(1, run, args, monkeypatch, signal.SIGTERM).status == 143
    assert runs_of(run) == ["KILLED"]
    assert camshaft(*args).status == 0
    assert runs_of(run) == ["FINISHED"]


def test_a_tracker_that_fails_every_write_does_not_stop_a_run(tmp_path: Path) -> None:
    overrides = {"trainer.logger": "[full_disk:FullDisk,jsonl]", "trainer.total_training_steps": 3}
    result = camshaft("sft", *sft_args(tmp_path, overrides))
    assert result.status == 0
    output = " ".join(result.out.split())
    assert output.count("OSError: no space left on device. The run continues") == 1
    assert "failed in 3 of 3 calls" in output
    assert [line["step"] for line in read_metrics(tmp_path / "sft" / "metrics.jsonl")] == [1, 2, 3]


def test_a_missing_library_is_an_error_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    args = ppo_args(tmp_path, {"trainer.logger": "[console,trackio]"})
    (tmp_path / "actor" / "model.safetensors").unlink()  # which would receive another status
    result = camshaft("ppo", *args)
    assert result.status == 2
    assert install_command("trackio") in result.err
