"""The norm of most models as one node of the autograd graph, on a CPU in float32.

    fuse_norms(hf)          # every RMSNorm of the model that is found to be one computes with it from now on

With r = 1 / sqrt(mean(x^2) + eps) of each token, and t = x dy:

    y = x r w        dx = r w dy - x r^3 (t w) / width        dw = sum over tokens of r t

The output has the bits of `transformers`, which writes this as eight operations and autograd as some twelve more,
each of which reads and writes all activations; here it is four and six. A class is trusted by what it computes, not
by its name: a probe compares the two. Other devices, formats, layouts and compiled layers run the module's own code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

PROBE = 16
"""Width of the norm that is compared."""


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = x.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        width = x.shape[-1]
        product = grad * x
        rows = product.reshape(-1, width)
        grad_weight = scale.reshape(-1) @ rows if ctx.needs_input_grad[1] else None
        along = (rows @ weight).view_as(scale)
        grad_x = torch.mul(grad, weight, out=product).mul_(scale)
        return grad_x.addcmul_(x, along.mul_(scale.pow(3)), value=-1 / width), grad_weight, None


class _Fused:
    """What a norm calls in place of its own code."""

    def __init__(self, norm: nn.Module):
        self.norm, self.own = norm, norm.forward

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight: Any = self.norm.weight
        plain = hidden_states.device.type == "cpu" and hidden_states.dtype == weight.dtype == torch.float32
        if not plain or isinstance(weight, DTensor) or torch.compiler.is_compiling():
            return self.own(hidden_states)
        eps: Any = self.norm.variance_epsilon
        return _RMSNorm.apply(hidden_states, weight, eps)  # pyright: ignore[reportReturnType]


def fuse_norms(model: nn.Module) -> int:
    """How many norms of the model compute with the fused form now."""
    trusted: dict[type, bool] = {}
    count = 0
    for module in model.modules():
        kind = type(module)
        if kind not in trusted:
            trusted[kind] = kind.__name__.endswith("RMSNorm") and _is_rms_norm(kind)
        if trusted[kind] and not isinstance(module.forward, _Fused):
            module.forward = _Fused(module)
            count += 1
    return count


def _is_rms_norm(kind: type) -> bool:
    """Does a norm of this class compute what is said above?"""
    random = torch.Generator().manual_seed(0)
    with torch.device("cpu"), torch.no_grad():  # the model may be one without storage yet
        rows, weight = torch.randn(3, PROBE, generator=random), torch.randn(PROBE, generator=random)
        try:
            norm = kind(PROBE, eps=0.3).float()
            norm.weight.copy_(weight)
            found = norm(rows)
        except (TypeError, AttributeError, RuntimeError):
            return False
        wanted = rows * (rows.square().mean(-1, keepdim=True) + 0.3).rsqrt() * weight
        same = found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)
    return same and getattr(norm, "variance_epsilon", None) == 0.3
