"""Whole runs with the trackers of the ecosystem, and with trackers that fail."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import wandb
from mlflow.tracking import MlflowClient
from support.command_line import camshaft, sft_words
from support.ppo_runs import ppo_words
from support.wandb_file import history
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from camshaft.tracking import RunInfo, Tracker
from camshaft.tracking.jsonl import read_metrics


class FullDisk(Tracker):
    """Starts, and takes nothing."""

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
    wandb.teardown()  # ends the process that it has beside the run's


def test_all_trackers_have_what_the_file_has_and_the_screen_has_a_line_each(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted = {
        "trainer.logger": "[console,jsonl,tensorboard,tracking,mlflow]",
        "trainer.total_training_steps": 2,
        "trainer.test_freq": 2,
        "trainer.log_val_generations": 3,
    }
    ended = camshaft("ppo", *ppo_words(tmp_path, wanted))
    assert (ended.status, ended.err) == (0, "")
    assert capfd.readouterr() == ("", "")
    told = [line for line in ended.out.splitlines() if "wandb" in line or "mlflow" in line.lower()]
    assert len(told) >= 2, ended.out
    assert "step 2/2" in ended.out

    run = tmp_path / "run"
    lines = {line.pop("step"): line for line in read_metrics(run / "metrics.jsonl")}
    assert list(lines) == [1, 2]
    logged = {line.pop("step"): line for line in history(run)}
    (table,) = run.glob("wandb/offline-run-*/files/media/table/val/*.json")
    assert len(json.loads(table.read_text())["data"]) == 3
    logged = {step: {name: line[name] for name in line if "generations" not in name} for step, line in logged.items()}
    assert logged == {step: pytest.approx(line) for step, line in lines.items()}

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    for name, value in lines[2].items():
        assert events.Scalars(name)[-1].value == pytest.approx(value), name
    client = MlflowClient(tracking_uri=(run / "mlruns").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("camshaft_examples").experiment_id])
    assert {name.replace("_at_", "@"): value for name, value in found.data.metrics.items()} == pytest.approx(lines[2])
    assert found.data.params["actor_rollout_ref.rollout.name"] == "torch"
    (table,) = run.glob("mlruns/*/*/artifacts/validation/step_2.json")
    assert len(json.loads(table.read_text())["data"]) == 3


def test_a_tracker_that_takes_nothing_does_not_stop_a_run(tmp_path: Path) -> None:
    words = {"trainer.logger": "[full_disk:FullDisk,jsonl]", "trainer.total_training_steps": 3}
    ended = camshaft("sft", *sft_words(tmp_path, words))
    assert ended.status == 0
    said = " ".join(ended.out.split())
    assert said.count("OSError: no space left on device. The run goes on") == 1
    assert "failed in 3 of 3 calls" in said
    assert [line["step"] for line in read_metrics(tmp_path / "sft" / "metrics.jsonl")] == [1, 2, 3]


def test_a_missing_library_is_told_before_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    words = ppo_words(tmp_path, {"trainer.logger": "[console,trackio]"})
    (tmp_path / "actor" / "model.safetensors").unlink()  # which would be told otherwise
    ended = camshaft("ppo", *words)
    assert ended.status == 2
    assert "pip install 'camshaft[trackio]'" in ended.err
