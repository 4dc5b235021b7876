"""Tiny mixture-of-experts models, and their training with `transformers` and a torch optimizer as the oracle.

harness = MoEHarness(engine_class("fsdp"), folder, common_fields=fields, sizes=MODELS["mixtral"])
expected = train_oracle(harness.model_folder, harness.batch, optim, grad_clip=0.5, steps=3)
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from camshaft.contracts.engine.harness import TINY, EngineHarness, Tolerances
from camshaft.contracts.engine.oracle import oracle_step
from camshaft.dataproto import DataProto
from camshaft.engine import BaseEngine
from camshaft.models.tiny import make_tiny_model, make_tiny_tokenizer

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "family": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    "mixtral": {"family": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixed": {
        "family": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "norm_topk_prob": False,
        "mlp_only_layers": [0],
        "layers": 3,
    },
}
"""Arguments of `make_tiny_model`. The first layer of `mixed` is dense, and its gate weights are not normalized."""


class MoEHarness(EngineHarness):
    """A harness whose model has the arguments `sizes` of `make_tiny_model`. Results agree with the oracle to 1e-5."""

    def __init__(
        self,
        engine_class: type[BaseEngine],
        folder: str | Path,
        common_fields: Mapping[str, Any] | None = None,
        sizes: Mapping[str, Any] = MODELS["qwen3_moe"],
    ):
        super().__init__(engine_class, folder, common_fields=common_fields)
        self.sizes = dict(sizes)

    @property
    def tolerances(self) -> Tolerances:
        return Tolerances(outputs=1e-5, gradients=1e-5)

    @cached_property
    def model_folder(self) -> Path:
        folder = self.folder / "model"

        def make_model() -> None:
            make_tiny_tokenizer(folder)
            make_tiny_model(folder, **{**TINY, **self.sizes})

        self.on_rank_zero(make_model)
        return folder


def load_oracle(folder: Path) -> Any:
    """Load a model with `transformers`, in float32, with eager attention and eager experts."""
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    ).eval()


def train_oracle(
    folder: Path, batch: DataProto, steps: int, lr: float, eps: float, grad_clip: float
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Return (losses, gradient norms before clipping, final weights) of AdamW steps on one row at a time."""
    model = load_oracle(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=eps, weight_decay=0.01)
    losses, norms = [], []
    for _ in range(steps):
        loss, norm, _ = oracle_step(model, batch, "causal_lm")
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        losses.append(loss)
        norms.append(norm)
    return losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}
