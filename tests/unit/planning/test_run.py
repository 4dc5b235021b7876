"""`camshaft doctor key=value ...` finds what a run lacks."""

import json
import math
import resource
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command_line import camshaft
from support.forked_python import fork_python
from support.ppo_runs import ppo_args, ppo_config

from camshaft.planning import plan_process
from camshaft.planning.doctor import run
from camshaft.planning.doctor.weights import read_shapes
from camshaft.planning.plan_process import PlanUnavailable, plan_in_process
from camshaft.plugins import install_command


def doctor(folder: Path, overrides: dict[str, Any] | None = None) -> dict[str, tuple[str, str, str]]:
    """Return status, message and fix of the worst finding of each check."""
    result = camshaft("doctor", "--json", *ppo_args(folder, overrides))
    report = json.loads(result.out)
    assert result.status == (report["status"] == "FAIL")
    findings = sorted(report["findings"], key=lambda finding: ["OK", "WARN", "FAIL"].index(finding["status"]))
    return {f["check"]: (f["status"], f["message"], f["fix"]) for f in findings}


def test_a_sound_run_has_no_failure(tmp_path: Path) -> None:
    findings = doctor(tmp_path)
    assert {name for name, (status, *_) in findings.items() if status == "FAIL"} == set()
    assert "64 rows" in findings["data"][1] or "16 rows" in findings["data"][1]
    assert "GiB of tensors on each rank" in findings["forecast"][1]


@pytest.fixture
def no_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the forecast, which takes seconds."""

    def skip(*_: object) -> None:
        raise PlanUnavailable("it is skipped")

    monkeypatch.setattr(run, "plan_in_process", skip)


def memory_of(monkeypatch: pytest.MonkeyPatch, total: int, available: int) -> None:
    """Let the machine have this memory."""
    monkeypatch.setattr(run, "memory_limit", lambda: total)
    monkeypatch.setattr(run, "available_memory", lambda: available)


@pytest.mark.parametrize(
    ("available", "total", "status"),
    [
        pytest.param(1 << 30, 1 << 30, "OK", marks=pytest.mark.slow),
        pytest.param(1 << 16, 1 << 30, "WARN", marks=pytest.mark.slow),
        pytest.param(1 << 16, 1 << 16, "FAIL", marks=pytest.mark.slow),
    ],
)
def test_forecast_is_compared_with_the_memory(
    available: int, total: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_of(monkeypatch, total, available)
    found, message, fix = doctor(tmp_path)["forecast"]
    assert found == status
    assert "GiB of tensors on each rank" in message
    assert bool(fix) == (status != "OK")


@pytest.mark.slow
def test_proposed_change_ends_the_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = {
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
        "data.max_response_length": 64,
        "actor_rollout_ref.rollout.name": "hf",
        "algorithm.adv_estimator": "grpo",
    }
    plan = plan_in_process(ppo_args(tmp_path, overrides), None, 100.0)
    limit = plan["tightest"]["peak"] * 9 // 10
    memory_of(monkeypatch, limit, limit)
    status, _, fix = doctor(tmp_path, overrides)["forecast"]
    assert (status, fix[:4]) == ("FAIL", "add ")
    changes = dict(change.split("=", 1) for change in fix.removeprefix("add ").split())
    assert doctor(tmp_path, {**overrides, **changes})["forecast"][0] == "OK"


def test_unsupported_run_is_not_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_process, "start_python", fork_python)
    status, message, _ = doctor(tmp_path, {"actor_rollout_ref.actor.strategy": "fsdp1"})["forecast"]
    assert status == "OK"
    assert message.startswith("the memory is not forecast: ")
    assert "camshaft plan does not forecast the engine 'fsdp1'" in message


def test_forecast_has_a_time_limit(tmp_path: Path) -> None:
    with pytest.raises(PlanUnavailable, match="it took more than"):
        plan_in_process(ppo_args(tmp_path), None, 0.1)


def test_the_weights_for_a_rollout_on_other_devices_must_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ppo_config(tmp_path, {"actor_rollout_ref.hybrid_engine": False})
    assert [finding.status for finding in run.check_snapshot(config)] == ["OK"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, limits[1]))
    try:
        (finding,) = run.check_snapshot(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (finding.status, "cannot be mapped" in finding.message) == ("FAIL", True)
    memory_of(monkeypatch, 1 << 10, 1 << 10)
    assert [finding.status for finding in run.check_snapshot(config)] == ["FAIL"]


def without_tokenizer(folder: Path) -> None:
    for file in (folder / "actor").glob("tokenizer*"):
        file.unlink()


def damaged_header(folder: Path) -> None:
    file = folder / "actor" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(struct.pack("<Q", len(content)) + content[8:])


def truncated_weights(folder: Path) -> None:
    file = folder / "actor" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])


def missing_shard(folder: Path) -> None:
    actor = folder / "actor"
    names = read_shapes(actor)[1]
    index = {"weight_map": dict.fromkeys(names, "model.safetensors") | {"extra": "model-00002-of-00002.safetensors"}}
    (actor / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def index_without_weights(folder: Path) -> None:
    (folder / "actor" / "model.safetensors.index.json").write_text('{"metadata": {}}', encoding="utf-8")


def unreadable_data(folder: Path) -> None:
    file = folder / "data" / "train.parquet"
    file.write_bytes(file.read_bytes()[:100])


@pytest.mark.parametrize(
    ("damage", "check", "message"),
    [
        (without_tokenizer, "tokenizer", "has neither tokenizer.json nor tokenizer_config.json"),
        (damaged_header, "models", "Error while deserializing header"),
        (truncated_weights, "models", "Error while deserializing header"),
        (missing_shard, "models", "lacks model-00002-of-00002.safetensors"),
        (index_without_weights, "models", "model.safetensors.index.json has no weight_map"),
        (unreadable_data, "data", "train.parquet"),
    ],
)
@pytest.mark.usefixtures("no_forecast")
def test_damaged_file_is_found(damage: Callable[[Path], None], check: str, message: str, tmp_path: Path) -> None:
    ppo_args(tmp_path)
    damage(tmp_path)
    status, text, fix = doctor(tmp_path, {"custom_reward_function.path": "null"})[check]
    assert status == "FAIL"
    assert message in text
    assert fix


@pytest.mark.usefixtures("no_forecast")
def test_reward_file_with_a_syntax_error_is_found(tmp_path: Path) -> None:
    reward = tmp_path / "my_reward.py"
    reward.write_text("def compute_score(:\n", encoding="utf-8")
    status, message, fix = doctor(tmp_path, {"custom_reward_function.path": reward})["reward"]
    assert status == "FAIL"
    assert "invalid syntax" in message
    assert fix == f"python {reward}"


@pytest.mark.usefixtures("no_forecast")
def test_port_in_use_is_found(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        overrides = {"trainer.controller": "ray", "+ray_kwargs.ray_init.dashboard_port": port}
        status, message, _ = doctor(tmp_path, {**overrides, "+ray_kwargs.ray_init.address": "local"})["ports"]
    assert status == "FAIL"
    assert f"dashboard_port={port} is in use" in message


@pytest.mark.usefixtures("no_forecast")
def test_unreachable_cluster_is_found(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    overrides = {"trainer.controller": "ray", "+ray_kwargs.ray_init.address": f"127.0.0.1:{port}"}
    status, message, fix = doctor(tmp_path, overrides)["ports"]
    assert (status, fix) == ("FAIL", "ray start --head")
    assert f"127.0.0.1:{port}" in message


@pytest.mark.usefixtures("no_forecast")
def test_missing_vllm_is_found(tmp_path: Path) -> None:
    status, message, _ = doctor(tmp_path, {"actor_rollout_ref.rollout.name": "vllm"})["libraries"]
    assert status == "FAIL"
    assert install_command("vllm") in message


@pytest.mark.usefixtures("no_forecast")
def test_missing_device_is_found(tmp_path: Path) -> None:
    status, message, _ = doctor(tmp_path, {"trainer.device": "xpu"})["libraries"]
    assert status == "FAIL"
    assert "xpu" in message


@pytest.mark.usefixtures("no_forecast")
def test_unknown_optimizer_is_found(tmp_path: Path) -> None:
    findings = doctor(tmp_path, {"actor_rollout_ref.actor.optim.optimizer": "torch.optim:AdamW8"})
    assert findings["libraries"][0] == "FAIL"
    assert "AdamW8" in findings["libraries"][1]


def test_invalid_config_is_the_only_finding(tmp_path: Path) -> None:
    findings = doctor(tmp_path, {"trainer.seed": "abc"})
    assert list(findings) == ["config"]
    assert findings["config"][0] == "FAIL"
    assert "trainer.seed = abc" in findings["config"][1]


@pytest.mark.usefixtures("no_forecast")
def test_checkpoints_that_do_not_fit_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    status, message, _ = doctor(tmp_path, {"trainer.save_freq": 1})["checkpoints"]
    assert status == "FAIL"
    assert "a checkpoint takes" in message


def checkpoint_space(folder: Path, monkeypatch: pytest.MonkeyPatch, free: int, keys: dict[str, Any]) -> tuple[str, str]:
    """Return status and message of the check with this many free bytes."""
    usage = shutil.disk_usage(folder)._replace(free=free)
    config = ppo_config(folder, {"trainer.save_freq": 1, **keys})
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        (finding,) = run.check_checkpoint_space(config)
    return finding.status, finding.message


def test_kept_checkpoints_are_compared_with_the_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ppo_args(tmp_path)
    both = sum(math.prod(shape) for name in ("actor", "critic") for shape in read_shapes(tmp_path / name)[1].values())
    one, two = run.BYTES_PER_PARAMETER * both, {f"trainer.max_{role}_ckpt_to_keep": 2 for role in ("actor", "critic")}
    assert checkpoint_space(tmp_path, monkeypatch, 3 * one, two)[0] == "OK"
    assert checkpoint_space(tmp_path, monkeypatch, 3 * one - 1, two)[0] == "WARN"
    assert checkpoint_space(tmp_path, monkeypatch, one - 1, two)[0] == "FAIL"
    status, message = checkpoint_space(tmp_path, monkeypatch, 3 * one, {})  # both models keep all
    assert (status, "each save adds" in message) == ("WARN", True)


def test_lora_checkpoint_contains_only_the_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ppo_args(tmp_path)
    config = ppo_config(tmp_path, {"actor_rollout_ref.model.lora_rank": 2})
    from transformers import AutoModelForCausalLM

    layers = AutoModelForCausalLM.from_pretrained(tmp_path / "actor").model.layers.modules()
    sizes = [(layer.in_features, layer.out_features) for layer in layers if hasattr(layer, "in_features")]
    assert run._trained_parameters(config.actor_rollout_ref.model) == sum(2 * sum(size) for size in sizes)


def test_number_of_parameters_matches_the_model(tmp_path: Path) -> None:
    ppo_args(tmp_path)
    problems, shapes = read_shapes(tmp_path / "actor")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "actor")
    assert problems == []
    assert sum(map(math.prod, shapes.values())) == sum(p.numel() for p in model.parameters())
