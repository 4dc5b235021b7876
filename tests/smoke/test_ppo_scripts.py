"""The scripts in examples/ppo_trainer: two run to completion, and every script has a config that passes all checks."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import wandb
from omegaconf import OmegaConf
from support.command_line import camshaft, sft_args
from support.ppo_runs import ppo_args
from support.wandb_file import history
from transformers import AutoModelForCausalLM

from camshaft.config import load_ppo, load_sft
from camshaft.errors import ConfigError
from camshaft.machine import Machine
from camshaft.tracking.jsonl import read_metrics

SCRIPTS = Path(__file__).parents[2] / "examples" / "ppo_trainer"

TINY: dict[str, Any] = {
    "data.train_batch_size": 8,
    "data.max_prompt_length": 16,
    "data.max_response_length": 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "actor_rollout_ref.rollout.name": "torch",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "trainer.device": "cpu",
    "trainer.n_gpus_per_node": 1,
    "trainer.total_training_steps": 2,
}
"""Overrides that make the scripts for a 7B model on eight GPUs fit into a test."""

PLACES = ("data.train_files", "data.val_files", "actor_rollout_ref.model.path", "critic.model.path")


def places(folder: Path) -> dict[str, str]:
    """Return the paths of an existing model and data."""
    return {key: value for key, _, value in (word.partition("=") for word in ppo_args(folder)) if key in PLACES}


def started(script: str, folder: Path, overrides: dict[str, Any], python: str) -> subprocess.CompletedProcess[str]:
    """Run the script in `folder` as a user would; `python` is the interpreter behind `python3`."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "python3").write_text(f'#!/bin/sh\n{python} "$@"\n')
    (bin_folder / "python3").chmod(0o755)
    environment = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "WANDB_MODE": "offline"}
    command = ["bash", str(SCRIPTS / script), *(f"{key}={value}" for key, value in overrides.items())]
    return subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=280, check=False
    )


def args_of(script: str, folder: Path, overrides: dict[str, Any]) -> list[str]:
    """Return the command-line arguments of a script for PPO."""
    module, *args = command_of(script, folder, overrides)
    assert module == "camshaft.trainer.main_ppo"
    return args


def command_of(script: str, folder: Path, overrides: dict[str, Any]) -> list[str]:
    """Return the module that a script runs, and its command-line arguments."""
    process = started(script, folder, overrides, f"printf '%s\\n' > {shlex.quote(str(folder / 'words'))}")
    assert process.returncode == 0, process.stderr
    option, *words = (folder / "words").read_text().splitlines()
    assert option == "-m"
    return words


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "separate", [pytest.param(False, id="here"), pytest.param(True, id="in bash", marks=pytest.mark.slow)]
)
def test_the_command_line_of_the_specification_runs(
    separate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, overrides = "run_deepseek7b_llm.sh", places(tmp_path) | TINY
    if separate:
        process = started(script, tmp_path, overrides, shlex.quote(sys.executable))
        assert process.returncode == 0, f"{process.stdout[-3000:]}\n{process.stderr[-3000:]}"
    else:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("WANDB_MODE", "offline")
        result = camshaft("ppo", *args_of(script, tmp_path, overrides))
        wandb.teardown()  # ends the process that wandb started for the run
        assert result.status == 0, result.err
    run = tmp_path / "checkpoints" / "verl_example_gsm8k" / "deepseek_llm_7b_function_rm"
    metrics = history(run)  # of wandb, in offline mode
    assert [line["step"] for line in metrics] == [0, 1, 2]  # validation before the first step and after every step
    assert all("val/reward/mean" in line for line in metrics)
    assert all(line["actor/grad_norm"] > 0 and line["critic/grad_norm"] > 0 for line in metrics[1:])
    exported = camshaft("export", str(run), str(tmp_path / "out"))
    assert exported.status == 0, exported.err
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.hidden_size == 32


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_the_tiny_script_needs_no_setup_and_accepts_overrides(tmp_path: Path) -> None:
    steps = {"trainer.total_training_steps": 2, "trainer.save_freq": 2}
    process = started("run_tiny_cpu.sh", tmp_path, steps, shlex.quote(sys.executable))
    assert process.returncode == 0, f"{process.stdout[-3000:]}\n{process.stderr[-3000:]}"
    run = tmp_path / "checkpoints" / "camshaft_examples" / "tiny"
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [0, 1, 2]
    assert (run / "global_step_2" / "actor" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "script", sorted(path.name for path in SCRIPTS.glob("*.sh") if not re.search("tiny|sft", path.name))
)
def test_every_script_passes_the_checks_of_the_config(script: str, tmp_path: Path) -> None:
    paths = places(tmp_path)
    paths |= {"reward_model.model.path": paths["critic.model.path"]}
    gpus = Machine("cuda", 8, frozenset({"vllm"}))
    assert load_ppo(args_of(script, tmp_path / "there", paths), machine=gpus)
    with pytest.raises(ConfigError) as caught:
        load_ppo(args_of(script, tmp_path / "missing", {}), machine=gpus)
    assert len(re.findall("(file|folder) not found", str(caught.value))) > 2  # keys of data and models


def test_the_script_of_supervised_fine_tuning_passes_the_checks_of_the_config(tmp_path: Path) -> None:
    script, gpus = "run_qwen2.5_0.5b_sft.sh", Machine("cuda", 8)
    used = [word for word in sft_args(tmp_path) if word.startswith(("data.train_files", "model.path"))]
    overrides = dict(word.split("=", 1) for word in used)
    overrides["data.val_files"] = overrides["data.train_files"]
    module, *args = command_of(script, tmp_path / "there", overrides)
    assert module == "camshaft.trainer.main_sft"
    assert load_sft(args, machine=gpus).trainer.experiment_name == "qwen2.5_0.5b_sft"
    with pytest.raises(ConfigError, match=r"3 errors(?s:.*)not found"):
        load_sft(command_of(script, tmp_path / "missing", {})[1:], machine=gpus)


def test_the_command_of_the_skypilot_task_is_valid(tmp_path: Path) -> None:
    task = OmegaConf.to_container(OmegaConf.load(SCRIPTS.parent / "cluster" / "skypilot.yaml"))
    assert isinstance(task, dict)
    assert task["resources"].keys() == {"accelerators", "disk_size", "use_spot"}
    files = places(tmp_path)
    reward = tmp_path / "reward.py"
    reward.write_text("def score(response): return 0.0\n", encoding="utf-8")
    given = {"MODEL": files["actor_rollout_ref.model.path"], "DATA": files["data.train_files"], "REWARD": str(reward)}
    assert task["envs"].keys() == {*given, "BUCKET"}
    words = tmp_path / "words"
    record = f"camshaft() {{ printf '%s\\n' \"$@\" > {shlex.quote(str(words))}; }}\n"
    command = record + task["run"].replace("source .venv/bin/activate\n", "")
    subprocess.run(["bash", "-euc", command], env={**os.environ, **given}, check=True, timeout=30)
    name, *args = words.read_text().splitlines()
    assert name == "ppo"
    config = load_ppo(args, machine=Machine("cuda", 1, frozenset({"vllm"})))
    assert config.trainer.default_hdfs_dir == "/checkpoints/grpo"
