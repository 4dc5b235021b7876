"""Every command of the README runs, in order, in an empty folder: in this process, and as typed in bash."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.pages import ROOT, bash, commands, run_here, script

import camshaft


def check_promised_files(folder: Path) -> None:
    promised = ("reward.png", "runs/digits/samples/step_40.parquet", "models/digits/model.safetensors")
    assert all((folder / name).exists() for name in promised), sorted(str(path) for path in folder.rglob("*"))


def check_learning(folder: Path) -> None:
    rewards = camshaft.load_run(folder / "runs" / "digits").history["critic/score/mean"]
    assert len(rewards) == 40
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.9


def shorten(args: list[str]) -> list[str]:
    """Return the arguments with one rule of the contract suite; tests/contracts runs all."""
    return [*args, "--rule", "step"] if args[0] == "check-engine" and "--rule" not in args else args


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("fork_server")
def test_every_command_of_the_readme_runs_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_here(commands(tmp_path, script(tmp_path, "README.md")), monkeypatch, shorten)
    check_promised_files(tmp_path)
    check_learning(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_command_of_the_readme_runs_in_bash(tmp_path: Path) -> None:
    python = shlex.quote(sys.executable)
    functions = [f'camshaft() {{ {python} -m camshaft "$@"; }}', f'python3() {{ {python} "$@"; }}']
    bash(tmp_path, [*functions, *script(tmp_path, "README.md")], 280)
    check_promised_files(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_demo_runs_in_a_short_form(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/arithmetic/demo.py"), "--out", "out", "--sft-steps", "3"]
    process = subprocess.run([*command, "--steps", "2"], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert process.returncode == 0, f"{process.stdout[-3000:]}\n{process.stderr[-3000:]}"
    assert "held-out sums right" in process.stdout
    assert (tmp_path / "out" / "curves.png").stat().st_size > 10_000
    assert len((tmp_path / "out" / "ppo" / "metrics.jsonl").read_text().splitlines()) == 3
