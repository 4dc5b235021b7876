"""The table of commands: help, exit status, sweeps."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.command_line import camshaft
from support.ppo_runs import ppo_args
from support.run_folders import make_run

from camshaft.cli import COMMANDS, main
from camshaft.config import EvalConfig, GenerateConfig, PPOConfig, RMConfig, SFTConfig, compose
from camshaft.config.short_names import short_names
from camshaft.config.tree import leaf_fields
from camshaft.errors import BatchError
from camshaft.plugins import import_attribute


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_prints_help(command, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):  # argparse exits, commands with a config return
        assert main([command.name, "--help"]) == 0
    assert f"usage: camshaft {command.name}" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["--help"]])
def test_help_lists_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert main(argv) == 0
    out = capsys.readouterr().out
    assert all(command.name in out and command.help.split()[0] in out for command in COMMANDS)


@pytest.mark.parametrize("argv", [["--seed=1", "ppo"], ["--"]])
def test_an_invalid_option_exits_with_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert "usage: camshaft" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize(
    ("command", "schema", "need"),
    [
        ("ppo", PPOConfig, " reward="),
        ("sft", SFTConfig, " model="),
        ("rm", RMConfig, " model="),
        ("generate", GenerateConfig, " out="),
        ("eval", EvalConfig, " data="),
    ],
)
def test_help_is_short_and_names_required_keys(command: str, schema, need: str, option: str, capfd) -> None:
    assert main([command, "trainer.seed=1", option]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert len(out.splitlines()) <= 42
    for part in ("key=value", need, "-m ", "--cfg job", "--config-dir", "camshaft config show", "explain"):
        assert part in out
    named = re.findall(r"([a-z_]+(?:\.[a-z_]+)*)=", out)
    assert {"key"} <= set(named)
    assert set(named) - {"key"} <= {*leaf_fields(schema), *short_names(schema)}


Statuses = Callable[..., list[int]]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Statuses:
    """Replace training by a list of exit statuses; returns the seeds of the runs."""

    def replace(*statuses: int) -> list[int]:
        seeds: list[int] = []

        def train(config: PPOConfig, *_: object) -> int:
            seeds.append(config.trainer.seed)
            return statuses[len(seeds) - 1]

        monkeypatch.setattr("camshaft.trainer.loop.run", train)
        return seeds

    return replace


def sweep(folder: Path, seeds: str) -> list[str]:
    return ["-m", *ppo_args(folder), f"trainer.seed={seeds}", "trainer.default_local_dir=out/${trainer.seed}"]


def test_the_exit_status_comes_from_the_run(trained: Statuses, tmp_path: Path) -> None:
    seeds = trained(3)
    assert main(["ppo", *ppo_args(tmp_path, {"trainer.seed": 5})]) == 3
    assert seeds == [5]


@pytest.mark.slow
def test_a_sweep_runs_every_config_and_returns_the_largest_status(trained: Statuses, tmp_path: Path) -> None:
    seeds = trained(0, 1, 0)
    assert main(["ppo", *sweep(tmp_path, "1,2,3")]) == 1
    assert seeds == [1, 2, 3]


def test_a_run_stopped_by_a_signal_ends_its_sweep(trained: Statuses, tmp_path: Path) -> None:
    seeds = trained(1, 143, 0)
    assert main(["ppo", *sweep(tmp_path, "1,2,3")]) == 143
    assert seeds == [1, 2]


def test_a_sweep_ends_with_a_table_of_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(config: PPOConfig, *_: object) -> int:
        make_run(Path(config.trainer.default_local_dir), changes={"trainer.seed": config.trainer.seed})
        if config.trainer.seed == 3:
            raise BatchError("the third run fails")
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("camshaft.trainer.loop.run", train)
    assert main(["ppo", *sweep(tmp_path, "1,2,3,4")]) == 1
    out, err = capfd.readouterr()
    header, *lines = out.splitlines()[-4:]
    assert header.split() == ["run", "seed", "state", "step", "phase", "for", "reward", "validation"]
    assert [line.split()[:3] for line in lines] == [[f"out/{seed}", str(seed), "finished"] for seed in (1, 2, 3)]
    assert "the third run fails" in err


def test_only_a_folder_that_was_created_for_a_number_is_removed(
    trained: Statuses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs write nothing."""
    monkeypatch.chdir(tmp_path)
    trained(1, 1)
    own = tmp_path / "own"
    own.mkdir()
    assert main(["ppo", *ppo_args(tmp_path, {"trainer.default_local_dir": own})]) == 1
    assert own.is_dir()
    unnamed = {"trainer.experiment_name": "null", "trainer.default_local_dir": "unnamed/${trainer.experiment_name}"}
    assert main(["ppo", *ppo_args(tmp_path, unnamed)]) == 1
    assert list((tmp_path / "unnamed").iterdir()) == []


def test_cfg_job_starts_no_run(trained: Statuses, tmp_path: Path, capfd) -> None:
    seeds = trained()
    assert main(["ppo", "--cfg", "job", *ppo_args(tmp_path)]) == 0
    assert seeds == []
    assert "seed:" in capfd.readouterr().out


@pytest.mark.parametrize("value", ["~/m", "a=b", "#1"])
def test_an_interpolated_value_needs_no_quotes(value: str, tmp_path: Path) -> None:
    copied = [f"trainer.project_name='{value}'", "trainer.experiment_name=${trainer.project_name}"]
    (config,) = compose([*ppo_args(tmp_path), *copied], PPOConfig)
    assert config.trainer.experiment_name == value


def test_plan_also_prints_a_config(tmp_path: Path, capfd) -> None:
    assert main(["plan", "--device", "h100", "--cfg", "job", *ppo_args(tmp_path)]) == 0
    assert "seed:" in capfd.readouterr().out


@pytest.mark.parametrize("arguments", ["config show", "config explain data.train_batch_size", "--help"])
def test_a_reader_that_ends_early_ends_the_command(arguments: str) -> None:
    """The reader has ended before the command writes."""
    script = f"set -o pipefail; (sleep 1; $0 -m camshaft {arguments}) | true"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    run = subprocess.run(
        ["bash", "-c", script, sys.executable], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stderr) == (141, "")


@pytest.mark.parametrize("ranks", ["-1", "two"])
def test_an_invalid_number_of_ranks_is_rejected(ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["check-engine", "reference", "--ranks", ranks])
    assert "argument --ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (BatchError("no rows"), 1, "camshaft: BatchError: no rows\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_of_a_run_become_one_message(error, status: int, message: str, monkeypatch, tmp_path: Path) -> None:
    def train(*_: object) -> int:
        raise error

    monkeypatch.setattr("camshaft.trainer.loop.run", train)
    run = camshaft("ppo", *ppo_args(tmp_path))
    assert (run.status, run.err) == (status, message)


def test_unexpected_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def train(*_: object) -> int:
        raise ZeroDivisionError("in the run")

    monkeypatch.setattr("camshaft.trainer.loop.run", train)
    with pytest.raises(ZeroDivisionError, match="in the run"):
        main(["ppo", *ppo_args(tmp_path)])


def test_every_target_of_the_table_exists() -> None:
    assert all(callable(import_attribute(command.target)) for command in COMMANDS)
