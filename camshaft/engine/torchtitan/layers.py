"""Layers of this package in a decoder of torchtitan, selected in its config.

    GQAttention.Config(..., inner_attention=PackedAttention.Config(), rope=RotaryEmbedding.Config(...))

They give the decoder the numbers and features of the other engines: attention within packed rows with prefix sharing,
rotary embeddings with the layout of transformers, so that weights need no permutation, and outputs that do not
materialize the logits.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Linear
from torchtitan.protocols.module import Module

from camshaft.models.attention import packed_attention
from camshaft.models.packed import Head, HeadInputs, head_outputs


class PackedAttention(Module):
    """Causal attention within packed rows (`models/attention.py`). `attention_masks` holds its keyword arguments."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dropout: float = 0.0
        sliding_window: int | None = None

    def __init__(self, config: PackedAttention.Config):
        super().__init__()
        self.dropout, self.sliding_window = config.dropout, config.sliding_window

    # torchtitan shards the first three arguments by these names.
    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: dict[str, Any],
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        query, key, value = (tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
        output, _ = packed_attention(
            self,
            query,
            key,
            value,
            scaling=scale,
            dropout=self.dropout if self.training else 0.0,
            sliding_window=self.sliding_window,
            **attention_masks,
        )
        return output


class RotaryEmbedding(Module):
    """Rotary embedding that rotates the two halves of a head, as transformers does.

    It computes in float32 or wider, and only for the positions of the call. Tensor-parallel ranks hold some of the
    heads.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        frequencies: tuple[float, ...]
        """Angle per position for each pair of elements of a head."""
        scaling: float = 1.0
        """Factor of cosine and sine."""

    def __init__(self, config: RotaryEmbedding.Config):
        super().__init__()
        self.frequencies, self.scaling = config.frequencies, config.scaling
        self._on_device: dict[torch.device, Tensor] = {}

    def forward(self, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate (1, N, heads, D) queries and keys by their positions (1, N)."""
        device = positions.device
        if device not in self._on_device:
            self._on_device[device] = torch.tensor(self.frequencies, device=device)
        angles = positions[0, :, None, None].float() * self._on_device[device]
        cos, sin = (torch.cat((part, part), dim=-1) * self.scaling for part in (angles.cos(), angles.sin()))
        return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if isinstance(heads, DTensor):
        rotated = _rotate(heads.to_local(), cos, sin)
        return DTensor.from_local(rotated, heads.device_mesh, heads.placements, run_check=False)
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(heads.dtype)


class OutputHead(Linear):
    """The output layer: computes the outputs of a head from hidden states (`head_outputs`)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        head: Head

    def __init__(self, config: OutputHead.Config):
        super().__init__(config)
        self.head: Head = config.head

    def forward(self, hidden: Tensor, inputs: HeadInputs) -> dict[str, Tensor]:
        return head_outputs(self, self.head, hidden, inputs)
