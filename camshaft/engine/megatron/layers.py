"""Layers of a Megatron model that differ from Megatron's own, and the layer specification that uses them.

    spec = block_spec(config, groups, vp_stage=None)       # passed to GPTModel

`PackedAttention` computes attention over packed rows, with the package's attention kernels. `RMSNorm` supports sequence
parallelism, which Megatron's norm without Transformer Engine does not. Matrices, embeddings and MLPs are Megatron's.
"""

# pyright: reportMissingImports=false

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from camshaft.engine.megatron.routing import RowRouting
from camshaft.models.attention import packed_attention
from camshaft.models.cpu import rms_norm
from camshaft.models.sequence import SequenceSplit


@dataclass
class PackedRows(PackedSeqParams):
    """Describes packed rows to `PackedAttention`.

    Megatron's own format "thd" is not used, because it computes rotary embeddings row by row. Here all rows form one
    sequence, and rotary angles are given per token.
    """

    qkv_format: str = "sbhd"
    inputs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `packed_attention` (`packed_kwargs`)."""
    routing: RowRouting | None = None
    """Sums and losses of the routers of a mixture of experts. None for a dense model, and if a pass needs neither."""


class PackedAttention(nn.Module):
    """Causal attention within each packed row, with Ulysses over the context-parallel ranks."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        pg_collection: ProcessGroupCollection,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
    ):
        super().__init__()
        self.dropout, self.scale = config.attention_dropout, softmax_scale
        self.sequence_parallel = config.sequence_parallel
        split = pg_collection.cp.size() > 1
        self.exchange = SequenceSplit(pg_collection.cp) if split else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: PackedRows | None = None,
    ) -> Tensor:
        """Compute attention: (N, 1, heads, D) and (N, 1, kv_heads, D) -> (N, 1, heads * D)."""
        assert packed_seq_params is not None
        heads_first = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        # Tensor-parallel ranks hold different heads, so their dropout masks must differ. With sequence parallelism,
        # Megatron has already selected the random state of this rank.
        fork = dropout > 0 and not self.sequence_parallel
        with get_cuda_rng_tracker().fork() if fork else contextlib.nullcontext():
            output, _ = packed_attention(
                self,
                *heads_first,
                scaling=self.scale,
                dropout=dropout,
                exchange=self.exchange,
                **packed_seq_params.inputs,
            )
        return output[0].flatten(1)[:, None]


class RMSNorm(nn.Module):
    """RMSNorm as in transformers, whose weight is marked for Megatron's reduction under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.eps)


class Router(TopKRouter):
    """Megatron's router, with a matrix product that does not require Transformer Engine."""

    rows: PackedRows | None = None
    """Rows of the current pass, which the layer sets."""

    def gating(self, input: Tensor) -> Tensor:
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(self.config.moe_router_dtype, input.dtype)
        return F.linear(input.to(dtype), self.weight.to(dtype))

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        probs, is_chosen = super().routing(logits, padding_mask)
        if self.rows is None or self.rows.routing is None:
            return probs, is_chosen
        routing, logits, layer = self.rows.routing, logits.flatten(0, -2), int(self.layer_number) - 1
        probs, is_chosen = routing.replay(layer, logits, probs, is_chosen)
        return routing.observe(layer, logits, is_chosen, probs), is_chosen


def observe_routers(layers: Iterable[Any]) -> None:
    """Let layers pass the rows of each call to their routers, also if a checkpointed layer is computed again."""

    def set_rows(layer: Any, args: Any, kwargs: Any) -> None:
        layer.mlp.router.rows = kwargs["packed_seq_params"]

    for layer in layers:
        layer.register_forward_pre_hook(set_rows, with_kwargs=True)


def block_spec(
    config: TransformerConfig, groups: ProcessGroupCollection, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return the specification of the decoder layers of one pipeline stage."""
    spec: Any = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if config.num_moe_experts is not None:
        layer.mlp.submodules.router = Router
    count = get_num_layers_to_build(config, vp_stage, groups.pp.rank())
    return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=RMSNorm)
