"""Files of the working directory do not replace installed packages, in any process of a run.

The working directory is a downloaded folder with modules that have the names of installed packages. The user's own
modules in it are still imported.
"""

import ipaddress
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.command_line import ROOT
from support.ppo_runs import ppo_args
from support.processes import listening_addresses, marked, still_running

SHADOWED = ("yaml", "queue", "tokenizers", "torch", "numpy", "socket", "tempfile", "safetensors", "ray")
"""Names of installed modules and of modules of the standard library."""
RUN_FILE = "import os, sys\nopen(os.path.join(os.path.dirname(__file__), 'RAN'), 'a').write(__name__ + str(sys.argv))\n"
REWARD = """
import os, sys
import torch
import helper

def compute_score(solution_str, **sample):
    assert "site-packages" in torch.__file__
    return helper.score(solution_str)
"""
COMMANDS = {
    "console script": [str(Path(sys.executable).with_name("camshaft"))],
    "module": [sys.executable, "-m", "camshaft"],
    "module of a trainer": [sys.executable, "-m", "camshaft.trainer.main_ppo"],
}
SMALL_RUN: dict[str, Any] = {
    "actor_rollout_ref.rollout.name": "process",
    "custom_reward_function.path": "my_rewards",
    "trainer.n_gpus_per_node": 2,
    "trainer.total_training_steps": 1,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with modules that shadow installed packages, and modules of the user."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(RUN_FILE)
    (folder / "my_rewards.py").write_text(REWARD)
    (folder / "helper.py").write_text("def score(text):\n    return len(text) % 3 / 3\n")
    return folder


def start_in(folder: Path, command: Sequence[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def check(folder: Path, process: subprocess.Popen[str], seconds: float) -> str:
    """Wait for the process, and fail unless it succeeds without running a file of the folder."""
    out, _ = process.communicate(timeout=seconds)
    ran = folder / "RAN"
    assert not ran.exists(), ran.read_text()
    assert process.returncode == 0, out
    return out


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_file_of_the_working_directory_runs(command: list[str], folder: Path) -> None:
    arguments = ["config", "explain", "trainer.nnodes"] if "trainer" not in command[-1] else ["--help"]
    check(folder, start_in(folder, [*command, *arguments]), 60)


@pytest.mark.slow
def test_no_process_of_a_run_imports_files_of_the_working_directory(folder: Path, tmp_path: Path) -> None:
    """Ranks, their fork server, the generator's process and the reward workers."""
    run = ppo_args(tmp_path, {**SMALL_RUN, "actor_rollout_ref.actor.strategy": "fsdp", "critic.strategy": "fsdp"})
    check(folder, start_in(folder, [*COMMANDS["module"], "ppo", *run]), 200)


@pytest.mark.slow
@pytest.mark.alone
def test_a_ray_run_listens_only_on_the_loopback_interface(folder: Path, tmp_path: Path, mark: str) -> None:
    """A cluster that the run starts is unreachable from other machines, and its workers import installed packages."""
    ray = {"trainer.controller": "ray", "actor_rollout_ref.rollout.name": "torch"}
    strategies = {"actor_rollout_ref.actor.strategy": "fsdp", "critic.strategy": "fsdp"}
    run = ppo_args(tmp_path, {**SMALL_RUN, **strategies, **ray})
    process = start_in(folder, [*COMMANDS["console script"], "ppo", *run])
    addresses: set[str] = set()
    while process.poll() is None:
        addresses |= listening_addresses(marked(mark))
        time.sleep(0.2)
    check(folder, process, 200)
    assert still_running(marked(mark)) == []  # the stacks of a rank are removed ten seconds after it has ended
    assert addresses  # Ray's daemons were seen
    assert [address for address in addresses if not ipaddress.ip_address(address).is_loopback] == []
