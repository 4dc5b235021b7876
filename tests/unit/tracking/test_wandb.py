"""The real wandb library in offline mode; the tests' reader reads back the files."""

import json
import math
import sys

import pytest
import wandb
from support.wandb_file import exit_codes, history, records, run_record

from camshaft.errors import ConfigError
from camshaft.tracking import RunInfo, Tracking, check_trackers

ROW = {"prompt": "1+1=", "response": "2 | `2`\n", "ground_truth": "2", "score": 1.0}


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # of a user without an account
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_MODE", "offline")


@pytest.fixture(autouse=True, scope="module")
def no_process_is_left():
    yield
    wandb.teardown()


def info(folder, resumed_step=None):
    config = {"actor": {"lr": 1e-6, "kinds": ("a", "b"), "path": None}}
    return RunInfo("my-project", "my-run", folder, total_steps=9, resumed_step=resumed_step, config=config)


def test_a_run_has_its_names_config_and_metrics(tmp_path):
    with Tracking(["wandb"], info(tmp_path)) as tracking:
        tracking.log({"critic/score/mean": 1 / 3, "val-core/x/reward/mean@4": 2}, step=0)
        tracking.log({"critic/score/mean": -0.5}, step=7)
    run = run_record(tmp_path)
    assert (run.project, run.display_name) == ("my-project", "my-run")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["actor"] == {"lr": 1e-6, "kinds": ["a", "b"], "path": None}
    assert history(tmp_path) == [
        {"step": 0, "critic/score/mean": 1 / 3, "val-core/x/reward/mean@4": 2.0},
        {"step": 7, "critic/score/mean": -0.5},
    ]


@pytest.mark.parametrize(("error", "code"), [(ValueError, 1), (KeyboardInterrupt, 255)])
def test_a_run_that_did_not_finish_is_marked(error, code, tmp_path):
    with pytest.raises(error), Tracking(["wandb"], info(tmp_path)):
        raise error
    assert exit_codes(tmp_path) == [code]
    with Tracking(["wandb"], info(tmp_path, resumed_step=0)) as tracking:
        tracking.ending = "stopped"
    with Tracking(["wandb"], info(tmp_path, resumed_step=0)):
        pass
    assert sorted(exit_codes(tmp_path)) == sorted([code, 255, 0])


def test_values_that_are_not_finite_are_kept(tmp_path):
    with Tracking(["wandb"], info(tmp_path)) as tracking:
        tracking.log({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}, step=1)
    (line,) = history(tmp_path)
    assert math.isnan(float(line["a"]))
    assert [float(line[name]) for name in "bcd"] == [math.inf, -math.inf, 1.0]


def test_only_a_resumed_run_keeps_its_id(tmp_path):
    ids = []
    for resumed, steps in ((None, (1, 2, 3)), (2, (3, 4)), (None, (1,))):
        with Tracking(["wandb"], info(tmp_path, resumed)) as tracking:
            for step in steps:
                tracking.log({"x": float(step)}, step)
        ids.append((tmp_path / "wandb_run_id.txt").read_text().strip())
    assert ids[0] == ids[1] != ids[2]
    written = [record.run.run_id for record in records(tmp_path) if record.WhichOneof("record_type") == "run"]
    assert sorted(written) == sorted(ids)


def test_responses_of_a_validation_are_a_table(tmp_path):
    with Tracking(["wandb"], info(tmp_path)) as tracking:
        tracking.log_generations([ROW, ROW | {"score": 0.0}], step=3)
        tracking.log({"val/reward/mean": 0.5}, step=3)
    (line,) = history(tmp_path)  # one entry for the step
    assert line["val/reward/mean"] == 0.5
    (file,) = tmp_path.glob("wandb/offline-run-*/files/media/table/val/*.json")
    table = json.loads(file.read_text())
    assert table["columns"] == list(ROW)
    assert table["data"] == [["1+1=", "2 | `2`\n", "2", 1.0], ["1+1=", "2 | `2`\n", "2", 0.0]]


def test_the_library_prints_nothing(tmp_path, capfd, caplog):
    with Tracking(["wandb"], info(tmp_path)) as tracking:
        tracking.log({"x": 1.0}, step=1)
        tracking.log_generations([ROW], step=2)
    assert capfd.readouterr() == ("", "")
    assert [record.levelname for record in caplog.records if record.name.startswith("camshaft")] in ([], ["INFO"])


def test_a_missing_account_is_an_error_without_a_prompt(monkeypatch, capfd):
    monkeypatch.delenv("WANDB_MODE")
    wandb.teardown()  # wandb remembers the mode
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    with pytest.raises(ConfigError, match=r"requires an API key.*wandb login.*WANDB_API_KEY.*WANDB_MODE=offline"):
        check_trackers(["wandb"])
    wandb.teardown()
    assert capfd.readouterr() == ("", "")
