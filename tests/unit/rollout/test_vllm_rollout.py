"""The vLLM rollout without vLLM: what is said when it is missing. With it, see tests/vllm_rollout."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from camshaft.config.engine import LoRAConfig
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.errors import RolloutError
from camshaft.models.tiny import make_tiny_model
from camshaft.rollout import build_rollout
from camshaft.rollout.vllm.adapters import adapter_arguments


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    config = RolloutEngineConfig(model_path=str(make_tiny_model(tmp_path / "model")))
    with pytest.raises(RolloutError, match=r"pip install 'camshaft\[vllm\]'.*rollout.name=torch"):
        build_rollout("vllm", config)


def test_ranks_that_cannot_share_a_generator_are_told_which_can(tmp_path: Path) -> None:
    config = RolloutEngineConfig(model_path=str(make_tiny_model(tmp_path / "model")), tensor_model_parallel_size=2)
    with pytest.raises(RolloutError, match=r"=2 does not divide the 1 rank of this run; .* to 1"):
        build_rollout("vllm", config)


@pytest.mark.parametrize("device", ["cuda:1", "cuda"])
def test_a_rank_alone_is_told_that_vllm_goes_to_the_first_device(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    config = RolloutEngineConfig(model_path=str(make_tiny_model(tmp_path / "model")), device=device)
    with pytest.raises(RolloutError, match=r"on cuda:0, and the device is cuda:1; .*CUDA_VISIBLE_DEVICES=1"):
        build_rollout("vllm", config)


def test_of_an_adapter_vllm_is_told_its_size_and_its_layers(tmp_path: Path) -> None:
    config = RolloutEngineConfig(model_path=str(make_tiny_model(tmp_path / "model")), device="cuda", dtype="bfloat16")
    assert adapter_arguments(config) == {}
    lora = LoRAConfig(rank=9, target_modules=("q_proj", "mlp.up_proj"))
    told = adapter_arguments(config.model_copy(update={"lora": lora}))
    assert (told["enable_lora"], told["max_lora_rank"], told["max_loras"]) == (True, 16, 1)
    assert told["lora_target_modules"] == ["q_proj", "up_proj"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"lora": LoRAConfig(rank=600)}, r"up to rank 512, got 600; set actor_rollout_ref\.model\.lora_rank=512"),
        ({"device": "cuda"}, r"half precision on cuda, .*dtype=float32; set actor_rollout_ref.rollout.dtype=bfloat16"),
    ],
)
def test_adapters_that_vllm_cannot_compute_are_refused(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    config = RolloutEngineConfig(model_path=str(make_tiny_model(tmp_path / "model")), lora=LoRAConfig(rank=4))
    with pytest.raises(RolloutError, match=told):
        adapter_arguments(config.model_copy(update=change))


def test_quantization_on_arrival_is_refused(tmp_path: Path) -> None:
    own = {"quantization": "fp8"}
    config = RolloutEngineConfig(model_path=str(make_tiny_model(tmp_path / "model")), engine_kwargs=own)
    with pytest.raises(RolloutError, match=r"engine_kwargs.quantization=fp8: take it out"):
        build_rollout("vllm", config)
