"""A stopped run without a name is resumed by the arguments that its last lines contain."""

import importlib.util
import os
import re
import signal
from pathlib import Path

import pytest
from support.ppo_runs import ppo_args

from camshaft.cli import main
from camshaft.config import load_ppo
from camshaft.config.checks.backends import required_libraries
from camshaft.errors import ConfigError
from camshaft.trainer.loop import run
from camshaft.trainer.ppo import PPOTrainer


def words(folder: Path) -> list[str]:
    """Return the arguments of a run without a name, which stops itself after its second step."""
    stopping = folder / "stopping.py"
    stopping.write_text(
        "import os, signal\n"
        "def compute_score(solution_strs, **arguments):\n"
        "    if not os.path.exists('resuming'):\n"
        f"        os.kill({os.getpid()}, signal.SIGTERM)\n"
        "    return [0.0] * len(solution_strs)\n"
    )
    settings = {
        "custom_reward_function.path": stopping,
        "custom_reward_function.batched": True,
        "trainer.resume_mode": "auto",
        "trainer.logger": "[jsonl]",
        "trainer.total_training_steps": 3,
        "data.max_response_length": 2,
    }
    return [word for word in ppo_args(folder, settings) if not word.startswith("trainer.default_local_dir")]


@pytest.mark.slow
def test_stopped_run_without_a_name_prints_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = words(tmp_path)
    assert main(["ppo", *arguments]) == 128 + signal.SIGTERM
    out = capfd.readouterr().out
    (argument,) = re.findall(r"^Run the same command with (trainer\.default_local_dir=\S+) to resume\.$", out, re.M)
    assert f"run folder: {argument.partition('=')[2]}" in out
    (tmp_path / "resuming").touch()
    assert main(["ppo", *arguments, argument]) == 0
    assert re.search(r"resumed\s+from", capfd.readouterr().out)
    (folder,) = (tmp_path / "checkpoints" / "camshaft_examples").iterdir()
    assert (folder / "metrics.jsonl").read_text().count('"step": 3') == 1
    assert main(["ppo", *arguments]) == 0  # another run of the same command starts over
    assert "resumed" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("settings", "library"),
    [
        ({"actor_rollout_ref.rollout.name": "vllm"}, "vllm"),
        ({"actor_rollout_ref.rollout.name": "sglang"}, "sglang"),
        ({"actor_rollout_ref.rollout.name": "server"}, "vllm"),
        (
            {
                "actor_rollout_ref.rollout.name": "process",
                "actor_rollout_ref.rollout.engine_kwargs.rollout": "vllm",
            },
            "vllm",
        ),
        ({"actor_rollout_ref.actor.strategy": "megatron"}, "megatron"),
        ({"critic.strategy": "torchtitan"}, "torchtitan"),
        ({"actor_rollout_ref.model.lora_rank": "8"}, "peft"),
        ({"critic.model.lora_rank": "8"}, "peft"),
        ({"trainer.controller": "ray"}, "ray"),
    ],
)
def test_missing_library_is_an_error_before_the_run(
    settings: dict[str, str], library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_ppo(ppo_args(tmp_path, settings))
    installed = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == library else installed(name))
    (key, value) = next(iter(settings.items()))
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}={value} requires '{library}', which is not installed"):
        run(config, PPOTrainer.open)
    assert not (tmp_path / "run").exists()


def test_running_server_needs_no_local_library(tmp_path: Path) -> None:
    url = "actor_rollout_ref.rollout.engine_kwargs.vllm_server_base_url"
    config = load_ppo(ppo_args(tmp_path, {"actor_rollout_ref.rollout.name": "server", url: "http://127.0.0.1:9"}))
    assert list(required_libraries(config)) == []
