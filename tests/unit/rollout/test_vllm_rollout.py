"""Errors of the vLLM rollout that need no vLLM; tests/vllm_rollout has the tests with vLLM."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from camshaft.config.engine import LoRAConfig
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.errors import RolloutError
from camshaft.models.tiny import make_tiny_model
from camshaft.plugins import install_command
from camshaft.rollout import build_rollout
from camshaft.rollout.vllm.adapters import adapter_arguments


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="requires an environment without vLLM")
def test_missing_vllm_error_names_the_package(tmp_path: Path) -> None:
    config = RolloutEngineConfig(model_path=str(make_tiny_model(tmp_path / "model")))
    with pytest.raises(RolloutError, match=re.escape(install_command("vllm")) + r".*rollout.name=torch"):
        build_rollout("vllm", config)


def test_tensor_parallel_size_must_divide_the_ranks(tmp_path: Path) -> None:
    config = RolloutEngineConfig(model_path=str(make_tiny_model(tmp_path / "model")), tensor_model_parallel_size=2)
    with pytest.raises(RolloutError, match=r"number of ranks \(1\) is not divisible by .*=2; .* divisor of 1"):
        build_rollout("vllm", config)


@pytest.mark.parametrize("device", ["cuda:1", "cuda"])
def test_single_process_must_use_the_first_device(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    config = RolloutEngineConfig(model_path=str(make_tiny_model(tmp_path / "model")), device=device)
    with pytest.raises(RolloutError, match=r"device is cuda:1, but .* uses cuda:0; .*CUDA_VISIBLE_DEVICES=1"):
        build_rollout("vllm", config)


def test_adapter_arguments_have_rank_and_layers(tmp_path: Path) -> None:
    config = RolloutEngineConfig(model_path=str(make_tiny_model(tmp_path / "model")), device="cuda", dtype="bfloat16")
    assert adapter_arguments(config) == {}
    lora = LoRAConfig(rank=9, target_modules=("q_proj", "mlp.up_proj"))
    arguments = adapter_arguments(config.model_copy(update={"lora": lora}))
    assert (arguments["enable_lora"], arguments["max_lora_rank"], arguments["max_loras"]) == (True, 16, 1)
    assert arguments["lora_target_modules"] == ["q_proj", "up_proj"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora": LoRAConfig(rank=600)}, r"up to rank 512, got 600; set actor_rollout_ref\.model\.lora_rank=512"),
        (
            {"device": "cuda"},
            r"dtype=float32 is .* half precision on cuda; set actor_rollout_ref.rollout.dtype=bfloat16",
        ),
    ],
)
def test_unsupported_adapters_are_rejected(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = RolloutEngineConfig(model_path=str(make_tiny_model(tmp_path / "model")), lora=LoRAConfig(rank=4))
    with pytest.raises(RolloutError, match=message):
        adapter_arguments(config.model_copy(update=change))


def test_quantization_is_rejected(tmp_path: Path) -> None:
    config = RolloutEngineConfig(
        model_path=str(make_tiny_model(tmp_path / "model")), engine_kwargs={"quantization": "fp8"}
    )
    with pytest.raises(RolloutError, match=r"engine_kwargs.quantization=fp8 is unsupported"):
        build_rollout("vllm", config)
