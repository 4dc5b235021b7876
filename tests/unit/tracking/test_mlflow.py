"""The real mlflow library with a file store, read back through its client."""

import json
import math
import socket
from collections.abc import Callable

import pytest
from mlflow.tracking import MlflowClient

from camshaft.errors import ConfigError
from camshaft.tracking import RunInfo, Tracking, bounded
from camshaft.tracking.mlflow import metric_name

ROW = {"prompt": "1+1=", "response": "2", "ground_truth": "2", "score": 1.0}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def info(folder, resumed_step=None):
    config = {"actor": {"lr": 1e-6, "files": ("a", "b"), "path": None}, **{f"key{i}": i for i in range(150)}}
    return RunInfo("my-project", "my-run", folder, total_steps=9, resumed_step=resumed_step, config=config)


def log(folder, steps, resumed_step=None, value: Callable[[int], float] = float):
    with Tracking(["mlflow"], info(folder, resumed_step)) as tracking:
        for step in steps:
            tracking.log({"critic/score/mean": value(step), "val-core/x/reward/mean@4": 2}, step)


def runs(store):
    client = MlflowClient(tracking_uri=store.as_uri())
    experiment = client.get_experiment_by_name("my-project")
    assert experiment is not None
    return client, client.search_runs([experiment.experiment_id])


def history(store, name="critic/score/mean"):
    client, (run,) = runs(store)
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]


def test_a_run_has_its_names_config_and_metrics(tmp_path, capfd):
    log(tmp_path, [0, 3])
    _, (run,) = runs(tmp_path / "mlruns")
    assert (run.info.run_name, run.info.status) == ("my-run", "FINISHED")
    assert len(run.data.params) == 153
    assert [run.data.params[f"actor.{name}"] for name in ("lr", "files", "path")] == ["1e-06", '["a", "b"]', "null"]
    assert history(tmp_path / "mlruns") == [(0, 0.0), (3, 3.0)]
    assert history(tmp_path / "mlruns", "val-core/x/reward/mean_at_4") == [(0, 2.0), (3, 2.0)]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError, "FAILED"), (SystemExit, "FAILED"), (KeyboardInterrupt, "KILLED")]
)
def test_run_status_shows_the_ending_until_it_resumes(error, status, tmp_path):
    with pytest.raises(error), Tracking(["mlflow"], info(tmp_path)):
        raise error
    _, (run,) = runs(tmp_path / "mlruns")
    assert run.info.status == status
    with Tracking(["mlflow"], info(tmp_path, resumed_step=0)) as tracking:
        _, (run,) = runs(tmp_path / "mlruns")
        assert run.info.status == "RUNNING"
        tracking.ending = "stopped"
    _, (run,) = runs(tmp_path / "mlruns")
    assert run.info.status == "KILLED"


def test_values_that_are_not_finite_are_kept(tmp_path):
    log(tmp_path, [1, 2], value=lambda step: math.nan if step == 1 else math.inf)
    (_, first), (_, second) = history(tmp_path / "mlruns")
    assert math.isnan(first)
    assert second == math.inf


def test_a_resumed_run_keeps_its_id_and_logs_steps_once(tmp_path):
    log(tmp_path, [1, 2, 3, 4])
    log(tmp_path, [3, 4, 5], resumed_step=2)
    assert history(tmp_path / "mlruns") == [(step, float(step)) for step in range(1, 6)]


def test_a_run_from_the_start_is_another_one(tmp_path):
    log(tmp_path, [1])
    log(tmp_path, [1])
    assert len(runs(tmp_path / "mlruns")[1]) == 2


def test_responses_of_a_validation_are_an_artifact(tmp_path):
    with Tracking(["mlflow"], info(tmp_path)) as tracking:
        tracking.log_generations([ROW], step=3)
    (file,) = tmp_path.glob("mlruns/*/*/artifacts/validation/step_3.json")
    assert json.loads(file.read_text()) == {"columns": list(ROW), "data": [["1+1=", "2", "2", 1.0]]}


def test_the_store_is_the_one_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "shared").as_uri())
    log(tmp_path / "run", [1])
    assert history(tmp_path / "shared") == [(1, 1.0)]
    assert not (tmp_path / "run" / "mlruns").exists()


def test_invalid_mlflow_names_are_converted():
    assert metric_name("val-aux/open ai/gsm8k/maj@4/mean") == "val-aux/open ai/gsm8k/maj_at_4/mean"
    assert metric_name("a,b(c)\u00e9") == "a_b_c__"


def test_an_unreachable_server_is_an_error_in_bounded_time(tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free.getsockname()[1]}")
        monkeypatch.setattr(bounded, "START_SECONDS", 1.0)
        with pytest.raises(ConfigError, match=r"'mlflow' failed to start: .*the tracker did not start within 1 s"):
            Tracking(["mlflow"], info(tmp_path))
