"""Weights of Hugging Face folders pass Megatron and torchtitan engines on two ranks bitwise.

Run by `make test-megatron` and `make test-titan`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.ranks import run_warm_ranks
from torch import Tensor

from camshaft.checkpoint.export import Probe, export_hugging_face
from camshaft.config.engine import EngineConfig, EngineModel, OptimConfig
from camshaft.contracts.engine.oracle import HEAD_CLASSES
from camshaft.controller import local
from camshaft.engine import build_engine
from camshaft.models.loader import quiet_transformers
from camshaft.models.tiny import make_tiny_model

pytestmark = pytest.mark.timeout(600)

local.PRELOAD.append("camshaft.engine.torchtitan.weights")  # skipped in environments without torchtitan

TENSOR, PIPELINE = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
EXPERT = {"expert_model_parallel_size": 2, "use_distributed_optimizer": True}
STAGES = {"pipeline_parallel_degree": 2}

UNTIED: dict[str, Any] = {"tie_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", **UNTIED},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", **UNTIED},
    "qwen3_moe": {
        "family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **UNTIED,
    },
    "mixtral": {"family": "mixtral", "num_local_experts": 4, **UNTIED},
}  # fmt: skip
"""Arguments of `make_tiny_model`."""

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("megatron", TENSOR, "llama", "causal_lm"),
    ("megatron", PIPELINE, "qwen2", "causal_lm"),
    ("megatron", TENSOR, "qwen3", "causal_lm"),
    ("megatron", EXPERT, "qwen3_moe", "causal_lm"),
    ("megatron", EXPERT, "mixtral", "causal_lm"),
    ("megatron", TENSOR, "llama", "value"),
    ("megatron", PIPELINE, "qwen3", "reward"),
    ("torchtitan", {}, "llama", "causal_lm"),
    ("torchtitan", STAGES, "qwen2", "causal_lm"),
    ("torchtitan", {"tensor_parallel_size": 2}, "qwen3", "causal_lm"),
    ("torchtitan", {}, "llama", "value"),
    ("torchtitan", STAGES, "qwen3", "reward"),
]
"""Engine, options on two ranks, model and head."""
MARKS = {"megatron": pytest.mark.megatron, "torchtitan": pytest.mark.titan}


def export(strategy: str, options: dict[str, Any], head: Any, folder: Path) -> None:
    """Load the folder `model` into an engine, and export its weights to `exported`."""
    model = EngineModel(path=str(folder / "model"), head=head)
    engine = build_engine(strategy, EngineConfig(model=model, optim=OptimConfig(), options=options))
    engine.init_model()
    with engine.eval_mode():
        export_hugging_face(
            engine.named_weights(),
            model,
            folder / "exported",
            check=Probe(engine.infer_batch),
            write=dist.get_rank() == 0,
        )


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("strategy", "options", "model", "head"),
    [pytest.param(*case, id=f"{case[0]}-{case[2]}-{case[3]}", marks=MARKS[case[0]]) for case in CASES],
)
def test_exported_files_equal_loaded_files_bitwise(
    strategy: str, options: dict[str, Any], model: str, head: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "model", hidden=32, **MODELS[model])
    if head != "causal_lm":
        with quiet_transformers():
            HEAD_CLASSES[head].from_pretrained(folder, num_labels=1).save_pretrained(folder)
    run_warm_ranks(export, 2, strategy, options, head, tmp_path)
    loaded, exported = tensors_of(folder), tensors_of(tmp_path / "exported")
    assert exported.keys() == loaded.keys()
    assert [name for name, tensor in loaded.items() if not torch.equal(exported[name], tensor)] == []
