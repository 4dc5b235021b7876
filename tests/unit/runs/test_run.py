"""Runs of the command line are read without torch, and compared."""

import json
import math
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support.command_line import camshaft, sft_args
from support.ppo_runs import ppo_config

from camshaft import load_run
from camshaft.config import load_sft
from camshaft.dataproto import DataProto
from camshaft.errors import ConfigError, RewardError
from camshaft.runs import start
from camshaft.runs.launch import Launch, as_hooks
from camshaft.runs.run import Text
from camshaft.runs.start import Objects, recorded_values
from camshaft.tracking import RunInfo, Tracking
from camshaft.tracking.record import RECORD, log_to_file
from camshaft.tracking.run_folder import RunFolderError
from camshaft.trainer.session import call_hooks

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    """Return a folder with two runs of `camshaft sft`."""
    for name, lr in (("low", 1e-4), ("high", 1e-2)):
        keys = {"optim.lr": lr, "trainer.default_local_dir": home / name, "trainer.total_training_steps": 2}
        done = camshaft("sft", *sft_args(home, keys))
        assert done.status == 0, done.err
    return home


def test_runs_of_the_command_line_are_compared(home: Path) -> None:
    low, high = load_run(home / "low"), load_run(str(home / "high"))
    lines = {line.partition("  ")[0]: line.split()[1:] for line in low.compare(high).splitlines()}
    assert lines["optim.lr"] == ["0.0001", "0.01"]
    assert "trainer.default_local_dir" not in lines
    assert [float(value) for value in lines["train/loss"][:2]] == pytest.approx(
        [run.metrics()["train/loss"] for run in (low, high)], rel=1e-3
    )
    assert low.history["step"] == [1, 2]
    assert repr(Text("a\nb")) == "a\nb"


def test_recorded_values_are_those_that_the_user_set(home: Path) -> None:
    values = recorded_values("sft", load_run(home / "low").config)
    assert values["optim.lr"] == 1e-4
    assert values["trainer.total_training_steps"] == 2
    assert not {"strategy", "trainer.device", "trainer.save_freq", "trainer.resume_mode"} & values.keys()


def test_reading_a_run_needs_no_torch(home: Path) -> None:
    code = f"""
import sys, camshaft
run = camshaft.load_run({str(home / "low")!r})
run.history, repr(run), run.compare(run), run.status
assert not {{"torch", "transformers", "pyarrow", "cloudpickle"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_the_display_has_status_and_metrics(home: Path) -> None:
    run = load_run(home / "low")
    lines = repr(run).splitlines()
    assert lines[1] == "finished, step 2"
    first, last = next(line.split()[1:] for line in lines if line.startswith("train/loss"))
    assert [float(first), float(last)] == pytest.approx([run.metrics(step)["train/loss"] for step in (1, 2)], rel=1e-3)


def copy_of(home: Path, folder: Path, **facts: object) -> Path:
    """Write the record and two steps of a run to `folder`."""
    record = json.loads((home / "low" / "run.json").read_text(encoding="utf-8"))
    (folder / "run.json").write_text(json.dumps(record | facts), encoding="utf-8")
    lines = [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": "nan", "val/loss": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def test_missing_values_are_nan(home: Path, tmp_path: Path) -> None:
    history = load_run(copy_of(home, tmp_path)).history
    with pytest.raises(KeyError, match="has not logged 'loss'; the nearest are train/loss, val/loss"):
        _ = history["loss"]
    with pytest.raises(KeyError, match="the nearest are train/loss"):
        _ = history["train/los"]
    assert "loss" not in history
    assert math.isnan(history["val/loss"][0])
    assert history["val/loss"][1] == 1.0
    assert math.isnan(history["train/loss"][1])


def test_a_run_whose_process_is_gone_is_killed(home: Path, tmp_path: Path) -> None:
    assert load_run(copy_of(home, tmp_path, status="running", pid=2**22 + 1)).status == "killed"


@pytest.mark.parametrize("error", [RewardError("no score for http://me:pass@host"), ValueError("no score")])
def test_a_failed_run_has_its_error(error: Exception, tmp_path: Path) -> None:
    with suppress(type(error)), log_to_file(tmp_path), Tracking([RECORD], RunInfo("p", "e", tmp_path, 3)):
        raise error
    run = load_run(tmp_path)
    message = "no score for http://me:***@host" if isinstance(error, RewardError) else "ValueError: no score"
    assert run.error == message
    assert repr(run).splitlines()[1:] == ["failed, step 0", message]
    assert message in (tmp_path / "log.txt").read_text(encoding="utf-8")


def test_an_interrupted_run_has_no_error(tmp_path: Path) -> None:
    with suppress(KeyboardInterrupt), Tracking([RECORD], RunInfo("p", "e", tmp_path, 3)):
        raise KeyboardInterrupt
    assert (load_run(tmp_path).status, load_run(tmp_path).error) == ("stopped", None)


def test_ctrl_c_before_a_resumed_run_has_begun_ends_the_program(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, launch = load_sft(sft_args(tmp_path)), Launch("sft", {})
    folder = copy_of(home, tmp_path)

    def interrupt(*_: object) -> int:
        if begun:
            copy_of(home, folder, started=1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(start, "_status", interrupt)
    begun = False
    with pytest.raises(KeyboardInterrupt):
        start._train(config, launch, folder)
    begun = True
    start._train(config, launch, folder)


@pytest.mark.parametrize("shared", [False, True])
def test_a_failed_start_removes_only_its_own_inputs(shared: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    launch, rows = Launch("sft", {"trainer.default_local_dir": str(folder)}), [{"prompt": "a", "response": "b"}]
    with suppress(ConfigError), start._written_objects(launch, Objects("m", None, rows, rows)):
        assert len([*(folder / "inputs").iterdir()]) == 2
        if shared:
            (folder / "run.json").write_text("{}", encoding="utf-8")  # of another run
        raise ConfigError("no model")
    assert [path.name for path in folder.rglob("*")] == ["run.json"] * shared
    assert folder.exists() == shared


def test_python_objects_that_no_key_accepts_are_named() -> None:
    with pytest.raises(ConfigError, match="algorithm is a Python object; pass a name, or 'module:function'"):
        start.start("ppo", Objects("m", None, "d.jsonl", None), {"algorithm": len})
    with pytest.raises(ConfigError, match="on_step=5; pass a function or a list of functions"):
        start.start("ppo", Objects("m", None, "d.jsonl", None, on_step=5), {})  # pyright: ignore[reportArgumentType]
    assert (as_hooks(None), as_hooks(len), as_hooks([len])) == ((), (len,), (len,))
    with pytest.raises(ConfigError, match="on_step: the hook returned 7"):
        call_hooks([lambda *_: 7], 1, DataProto(), {})  # pyright: ignore[reportArgumentType]


def test_a_run_from_python_has_no_command_to_restart(tmp_path: Path) -> None:
    launch = Launch("ppo", {"trainer.max_restarts": 1})
    with pytest.raises(ConfigError, match=r"has no command that could run again, as trainer\.max_restarts requires"):
        start._status(ppo_config(tmp_path, {"trainer.max_restarts": 1}), launch)


def test_a_resumed_run_gets_other_functions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(start, "_train", lambda *_: None)
    monkeypatch.setattr(start, "_parse", lambda launch: launch)
    launch = Launch("ppo", {"custom_reward_function.path": "old.py"}, environment=dict, tools=len)
    _, resumed = start.resume(tmp_path, launch, Launch("ppo", {}, reward=len, environment="game.py:Game", tools=[]))
    assert (resumed.reward, resumed.environment, resumed.tools) == (len, None, [])
    assert "custom_reward_function.path" not in resumed.values
    assert resumed.values["actor_rollout_ref.rollout.multi_turn.environment"] == "game.py:Game"
    _, again = start.resume(tmp_path, resumed, Launch("ppo", {}))
    assert (again.reward, again.values) == (len, resumed.values)


def test_out_none_uses_the_default_folder() -> None:
    values = start._values("sft", Objects("m", None, [{}], None), {"out": None}, {})
    assert "trainer.default_local_dir" not in values


def test_what_a_run_lacks_is_named(home: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not the folder of a run \(it contains no run.json\)"):
        load_run(tmp_path)
    run = load_run(copy_of(home, tmp_path))
    with pytest.raises(ConfigError, match="has no responses"):
        run.responses()
    with pytest.raises(ConfigError, match="contains no checkpoint to resume from"):
        run.resume()
    with pytest.raises(ConfigError, match="contains no checkpoint; set"):
        run.export(tmp_path / "export")
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="contains no metrics"):
        _ = load_run(tmp_path).history
    assert "finished, step 0" in repr(load_run(tmp_path))
    with pytest.raises(RunFolderError, match="is not a folder"):
        load_run(tmp_path / "missing")
