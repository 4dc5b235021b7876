import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from rich.console import Console
from support.command_line import camshaft, sft_args
from support.forked_python import fork_python
from support.ppo_runs import ppo_config

from camshaft.config import TrainerConfig
from camshaft.controller.placement import check_device
from camshaft.data import StatefulLoader
from camshaft.dataproto import DataProto
from camshaft.errors import ConfigError
from camshaft.tracking import RunInfo, Tracker
from camshaft.tracking.jsonl import read_metrics
from camshaft.tracking.run_folder import RunFolder
from camshaft.tracking.terminal import log_to_console
from camshaft.trainer.session import load_hook, run_length, session
from camshaft.view.advice import advise


@pytest.fixture
def trainer(tmp_path: Path) -> TrainerConfig:
    return ppo_config(tmp_path, {"trainer.total_epochs": 3, "trainer.seed": 5}).trainer


def loader() -> StatefulLoader:
    """Return a loader of three epochs of two steps."""
    return StatefulLoader(DataProto.from_dict({"x": torch.arange(9)}), 4, total_epochs=3)


def test_the_level_of_the_logger_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("camshaft")
    monkeypatch.setattr(logger, "level", logging.ERROR)
    with log_to_console(Console(), seed=0):
        assert logger.level == logging.INFO
    assert logger.level == logging.ERROR


@pytest.mark.parametrize(("limit", "steps"), [(None, 6), (4, 4), (6, 6)])
def test_run_length_is_total_steps_or_the_data(limit: int | None, steps: int, trainer: TrainerConfig) -> None:
    assert run_length(trainer.model_copy(update={"total_training_steps": limit}), loader()) == steps


def test_more_steps_than_data_is_reported(trainer: TrainerConfig, caplog: pytest.LogCaptureFixture) -> None:
    assert run_length(trainer.model_copy(update={"total_training_steps": 50}), loader()) == 6
    assert "total_training_steps=50" in caplog.text
    assert "the data has only 6 steps (trainer.total_epochs=3 with 2 steps each)" in caplog.text


def test_steps_without_a_limit_of_epochs_are_all_made(trainer: TrainerConfig) -> None:
    unlimited = trainer.model_copy(update={"total_training_steps": 50, "total_epochs": None})
    endless = StatefulLoader(DataProto.from_dict({"x": torch.arange(9)}), 4, total_epochs=None)
    assert run_length(unlimited, endless) == 50
    assert [next(iter(endless))["x"].shape[0] for _ in range(50)] == [4] * 50


@pytest.mark.parametrize(
    ("epochs", "limit", "total", "keys"),
    [
        (3, None, 6, "epochs=6"),
        (None, 6, 6, "steps=12"),
        (9, 6, 6, "steps=12"),
        (3, 50, 6, "epochs=6"),
        (3, 4, 4, "steps=8, epochs=6"),
    ],
)
def test_the_keys_that_limit_the_run_are_suggested(
    epochs: int | None, limit: int | None, total: int, keys: str, trainer: TrainerConfig, capsys: pytest.CaptureFixture
) -> None:
    changed = trainer.model_copy(update={"total_epochs": epochs, "total_training_steps": limit})
    for from_python in (True, False):
        with session(changed, from_python=from_python) as run:
            (Path(trainer.default_local_dir) / "latest_checkpointed_iteration.txt").write_text("6")
            run.say_results(total, 2)
    out = capsys.readouterr().out
    assert f"run.resume({keys})" in out
    assert out.rstrip().endswith(f" {keys.replace(',', '')}")


def test_a_session_seeds_libraries_and_removes_its_log_handler(trainer: TrainerConfig) -> None:
    root = logging.getLogger("camshaft")
    before = list(root.handlers)

    def draw(count: int) -> torch.Tensor:
        with session(trainer):
            assert len(root.handlers) == len(before) + 2  # the console and log.txt
            return torch.rand(count)

    assert torch.equal(draw(3), draw(3))
    with pytest.raises(RuntimeError, match="negative"):
        draw(-1)
    assert root.handlers == before


class RecordingTracker(Tracker):
    """Records its arguments."""

    runs: ClassVar[list[RunInfo]] = []

    def __init__(self, run: RunInfo):
        self.runs.append(run)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        pass

    def finish(self) -> None:
        pass


def test_trackers_receive_the_config_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "recorders", sys.modules[__name__])
    overrides = {
        "trainer.logger": "[recorders:RecordingTracker]",
        "+ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY": "hunter2",
        "+custom_reward_function.reward_kwargs.api_key": "hunter2",
        "trainer.default_hdfs_dir": "hdfs://me:hunter2@host/runs",
    }
    config = ppo_config(tmp_path, overrides)
    with session(config.trainer) as run, run.tracking(config, 3, None):
        pass
    (info,) = RecordingTracker.runs
    assert info.config["trainer"]["seed"] == config.trainer.seed
    assert info.config["trainer"]["default_hdfs_dir"] == "hdfs://me:***@host/runs"
    assert "hunter2" not in str(info)


@pytest.mark.skipif(torch.cuda.is_available(), reason="requires a machine without CUDA")
def test_a_missing_device_is_a_config_error(trainer: TrainerConfig) -> None:
    with (
        pytest.raises(ConfigError, match=r"trainer\.device=cpu"),
        session(trainer.model_copy(update={"device": "cuda"})),
    ):
        pass


def test_an_unknown_device_is_a_config_error(trainer: TrainerConfig) -> None:
    wrong = trainer.model_copy(update={"device": "toaster"})
    with pytest.raises(ConfigError, match=r"device=toaster is not a device of this torch build"), session(wrong):
        pass


def test_each_rank_needs_a_separate_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    check_device("cuda", 2)
    message = r"the run has 3 ranks, and each needs a cuda device, .* has 2; use trainer\.n_gpus_per_node=2"
    with pytest.raises(ConfigError, match=message):
        check_device("cuda", 3)


def test_an_unwritable_folder_is_a_config_error(trainer: TrainerConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = trainer.model_copy(update={"default_local_dir": str(tmp_path / "file")})
    with pytest.raises(ConfigError, match="is not writable"), session(config):
        pass


def test_a_run_that_fails_before_its_first_step_shows_its_error(
    trainer: TrainerConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(trainer.default_local_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    with pytest.raises(ConfigError, match="no reward"), session(trainer):
        raise ConfigError("no reward")
    assert "to resume" not in capsys.readouterr().out
    assert "ConfigError: no reward" in (folder / "log.txt").read_text()
    run = RunFolder(folder)
    assert run.state() == "failed"
    assert [advice.title for advice in advise(run, now=0.0)] == ["Run failed"]
    (folder / "run.json").write_text('{"status": "finished", "argv": []}')
    with pytest.raises(ConfigError, match="no reward"), session(trainer):
        raise ConfigError("no reward")
    assert RunFolder(folder).state() == "finished"  # of the run whose results the folder contains


FULL_DISK = """
import os, resource, sys
from camshaft.tracking.terminal import continue_without_reader
from camshaft.tracking.record import log_to_file
from pathlib import Path
folder = Path(sys.argv[1])
streams = sys.stdout, sys.stderr
try:
    with continue_without_reader(folder / "driver.log"), log_to_file(folder):
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        full = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT)
        os.lseek(full, 10_000, os.SEEK_SET)  # further writes fail
        for descriptor in (1, 2):
            os.dup2(full, descriptor)
        for _ in range(2):
            print("lost", flush=True)
        sys.stdout.buffer.write(b"lost at the end")
        raise KeyError("the first error")
except KeyError:
    os._exit(3 if (sys.stdout, sys.stderr) == streams else 1)
"""


def test_a_full_disk_behind_the_output_does_not_end_a_run(tmp_path: Path) -> None:
    assert fork_python(["-c", FULL_DISK, str(tmp_path)]).wait(120) == 3
    assert (tmp_path / "log.txt").read_text().count("standard output cannot be written: File too large") == 1


def test_the_suggested_export_folder_does_not_exist(
    trainer: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(trainer.default_local_dir)

    def suggestion() -> str:
        with session(trainer) as run:
            (folder / "latest_checkpointed_iteration.txt").write_text("2")
            run.say_results(2, 2)
        return next(line.split()[-1] for line in capsys.readouterr().out.splitlines() if line.startswith("export"))

    first = suggestion()
    (tmp_path / first).mkdir(parents=True)
    assert suggestion() == f"{first}-2"


def test_a_run_from_python_suggests_python_calls(
    trainer: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with session(trainer, from_python=True) as run:
        (Path(trainer.default_local_dir) / "latest_checkpointed_iteration.txt").write_text("2")
        run.say_results(2, 2)
        run.say_how_to_resume()
    out = capsys.readouterr().out
    assert "export         run.export('models/" in out
    assert "train longer   run.resume(epochs=6)" in out
    assert f"Call camshaft.load_run({trainer.default_local_dir!r}).resume() to resume." in out
    assert "command" not in out


HOOKS = """
from numbers_beside import OFFSET

def count(step, batch, metrics):
    return {"rows": len(batch), "next_step": step + OFFSET}

def _private(step, batch, metrics): ...
"""


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with one public hook, and the module that it imports."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "numbers_beside.py").write_text("OFFSET = 1\n", encoding="utf-8")
    path = tmp_path / "my_hooks.py"
    path.write_text(HOOKS, encoding="utf-8")
    return path


def test_hooks_of_the_command_line_add_metrics(hooks: Path, tmp_path: Path) -> None:
    overrides = {"on_step": f"[{hooks}:count,json:dumps]", "trainer.total_training_steps": 2}
    wrong = camshaft("sft", *sft_args(tmp_path, overrides))
    assert wrong.status == 2
    assert "the hook json:dumps cannot be called" in wrong.err
    assert "a hook has the parameters step, batch and metrics" in wrong.err
    run = camshaft("sft", *sft_args(tmp_path, {**overrides, "on_step": hooks}))
    assert run.status == 0, run.err
    lines = read_metrics(tmp_path / "sft" / "metrics.jsonl")
    assert [line["next_step"] for line in lines] == [2, 3]
    assert all(line["rows"] > 0 for line in lines)


def test_a_hook_that_does_not_exist_lists_those_of_its_file(hooks: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"my_hooks\.py has no hook 'cuont'; it defines count\. Set trainer.on_step="):
        load_hook(f"{hooks}:cuont")
    with pytest.raises(ConfigError, match="file not found"):
        ppo_config(tmp_path, {"trainer.on_step": "nowhere.py:count"})
    with pytest.raises(ConfigError, match=r"Set file\.py:function, or package\.module:function"):
        ppo_config(tmp_path, {"trainer.on_step": "count"})
