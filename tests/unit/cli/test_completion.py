"""Completion in real shells: commands, keys by section, values and files."""

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from camshaft.cli import COMMANDS, main
from camshaft.cli.completion import COMMAND_SCHEMAS, SCRIPTS
from camshaft.config.schema.algorithm import ESTIMATORS
from camshaft.config.short_names import RECIPES, short_names
from camshaft.config.tree import leaf_fields

DRIVER = """
source "$1"; shift
COMP_LINE=$1 COMP_POINT=${#1} COMP_WORDS=($1) COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
[[ $1 == *' ' ]] && COMP_CWORD=$(( COMP_CWORD + 1 ))
TIMEFORMAT='%U %S'
time _camshaft 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "camshaft.bash"
    with pytest.MonkeyPatch.context() as patch, open(path, "w") as out:
        patch.setattr("sys.stdout", out)
        assert main(["completion", "bash"]) == 0
    return path


def complete(script: Path, line: str, folder: Path | None = None) -> list[str]:
    """Return what bash completes at the end of a line."""
    command = ["bash", "--norc", "-c", DRIVER, "bash", str(script), line]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, check=True)
    seconds = sum(map(float, result.stderr.split()[-2:]))
    assert seconds < 0.2
    return [word for word in result.stdout.splitlines() if word]


def test_commands_are_completed(script: Path) -> None:
    assert set(complete(script, "camshaft ")) == {*(command.name for command in COMMANDS), "--help", "--version"}
    checks = [command.name for command in COMMANDS if command.name.startswith("check")]
    assert "check-tinker" in checks
    assert complete(script, "camshaft check") == checks


@pytest.mark.parametrize("command", COMMAND_SCHEMAS)
def test_all_keys_of_a_command_are_completed(script: Path, command: str) -> None:
    schema = COMMAND_SCHEMAS[command]
    sections = {key.partition(".")[0] for key in leaf_fields(schema)}
    words = set(complete(script, f"camshaft {command} "))
    assert words >= {f"{name}=" for name in short_names(schema)}
    assert words >= {f"{name}." if f"{name}." in words else f"{name}=" for name in sections}
    key = next(key for key in leaf_fields(schema) if key.count(".") == 1)
    assert f"{key}=" in complete(script, f"camshaft {command} {key[:-1]}")


def test_keys_are_completed_one_section_at_a_time(script: Path) -> None:
    assert complete(script, "camshaft ppo algorithm.kl") == ["algorithm.kl_penalty=", "algorithm.kl_ctrl."]
    assert complete(script, "camshaft ppo lr=1e-5 algorithm.kl_ctrl.t") == [
        "algorithm.kl_ctrl.type=", "algorithm.kl_ctrl.target_kl=",
    ]  # fmt: skip
    assert complete(script, "camshaft sft algorithm.kl") == []


def test_values_of_keys_are_completed(script: Path) -> None:
    algorithms = {*ESTIMATORS, *RECIPES} - {"gae"}
    assert set(complete(script, "camshaft ppo algorithm=")) == algorithms
    assert complete(script, "camshaft ppo algorithm.kl_ctrl.type=ad") == ["adaptive"]
    assert complete(script, "camshaft ppo data.shuffle=") == ["true", "false"]
    assert complete(script, "camshaft ppo rollout=s") == ["server", "sglang"]


def test_files_are_completed_after_keys_of_paths(script: Path, tmp_path: Path) -> None:
    for name in ("math.py", "my data.jsonl"):
        (tmp_path / name).touch()
    assert complete(script, "camshaft ppo data=m", tmp_path) == ["math.py", "my data.jsonl"]
    assert complete(script, "camshaft ppo reward=ma", tmp_path) == ["math.py", "math"]
    assert complete(script, "camshaft ppo steps=m", tmp_path) == []
    assert complete(script, "camshaft checkpoints ma", tmp_path) == ["math.py"]


def test_options_and_actions_of_other_commands_are_completed(script: Path) -> None:
    assert complete(script, "camshaft config ") == ["explain", "show", "docs", "--help"]
    assert complete(script, "camshaft export --d") == ["--dtype"]
    assert complete(script, "camshaft plan --d") == ["--device"]
    assert complete(script, "camshaft doctor --d") == ["--deep"]
    assert set(complete(script, "camshaft completion ")) == {*SCRIPTS, "--help"}


def test_the_tab_key_completes_in_an_interactive_bash(script: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    try:
        os.write(terminal, f"source {script}\n".encode())
        os.write(terminal, b"camshaft ppo lr=1 reward_w\t")
        output, deadline = b"", time.monotonic() + 20
        while b"reward_weights=" not in output and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.1)[0]:
                output += os.read(terminal, 4096)
        assert b"reward_weights=" in output
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_of_other_shells_are_valid(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "reward_weights=" in text
    if shutil.which(shell):
        (tmp_path / "script").write_text(text)
        assert subprocess.run([shell, "-n", tmp_path / "script"], check=False).returncode == 0
