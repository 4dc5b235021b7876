"""Output layer with a LoRA adapter, as one matrix for fused log-probs.

    hidden, weight, bias = adapted_head(lm_head, hidden)        # logits = hidden weight^T + bias

With base weight W, adapter matrices A and B, and the scaling s, the logits h W^T + s (h A^T) B^T are those of hidden
states [h, s h A^T] and the weight [W, B]. Unlike the merged weight W + s B A, this does not round small updates to the
dtype of W. The copy of W and its gradient need the memory of two output layers.
"""

from typing import Any

import torch
from torch import Tensor, nn

ADAPTER = "default"
"""PEFT's name for the adapter. Parameter names contain it, names in PEFT's files do not."""


def is_adapted(layer: nn.Module) -> bool:
    """Return True for a linear layer with an adapter."""
    return isinstance(layer._modules.get("base_layer"), nn.Linear) and "lora_A" in layer._modules


def adapted_head(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return hidden states, weight and bias whose logits are those of an adapted output layer for `hidden` (M, H)."""
    base = layer.base_layer
    if layer.disable_adapters:
        return hidden, base.weight, base.bias
    a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    low_rank = layer.scaling[ADAPTER] * nn.functional.linear(hidden.to(a.dtype), a)
    weight = torch.cat([base.weight, b.to(base.weight.dtype)], dim=1)
    return torch.cat([hidden, low_rank.to(hidden.dtype)], dim=1), weight, base.bias
