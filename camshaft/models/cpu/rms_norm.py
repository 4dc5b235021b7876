"""RMSNorm as one node of the autograd graph, for float32 on a CPU.

    replace_norms(hf)       # number of RMSNorm modules of `hf` that are `FusedRMSNorm` now

With r = 1 / sqrt(mean(x^2) + eps) per token, and t = x dy:

    y = x r w        dx = r w dy - x r^3 (t w) / width        dw = sum over tokens of r t

The output has the same bits as that of `transformers`. Its module runs eight operators forward and about twelve
backward, each of which reads and writes all activations; the node runs four and six. `PackedModel` calls
`replace_norms` when it is built.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

PROBE_WIDTH = 16


class FusedRMSNorm(nn.Module):
    """RMSNorm with the parameter, and so the state-dict names, of the module that it replaces.

    Other devices and dtypes, sharded weights and compiled layers use the operators of `transformers`.
    """

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.weight: Any = norm.weight
        self.variance_epsilon: Any = norm.variance_epsilon
        self.train(norm.training)

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight, eps = self.weight, self.variance_epsilon
        supported = hidden_states.device.type == "cpu" and hidden_states.dtype == weight.dtype == torch.float32
        if not supported or isinstance(weight, DTensor) or torch.compiler.is_compiling():
            return rms_norm(hidden_states, weight, eps)
        return _RMSNorm.apply(hidden_states, weight, eps)  # pyright: ignore[reportReturnType]

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


def rms_norm(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm with the operators of `transformers`: normalized in float32, scaled in the input's dtype."""
    wide = hidden_states.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(hidden_states.dtype)


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


def replace_norms(model: nn.Module) -> int:
    """Replace the child modules that compute RMSNorm by `FusedRMSNorm`; return their number."""
    replaced: dict[nn.Module, FusedRMSNorm] = {}
    is_rms_norm: dict[type, bool] = {FusedRMSNorm: False}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            kind = type(child)
            if kind not in is_rms_norm:
                is_rms_norm[kind] = kind.__name__.endswith("RMSNorm") and _computes_rms_norm(kind)
            if is_rms_norm[kind]:
                setattr(parent, name, replaced.setdefault(child, FusedRMSNorm(child)))
    return len(replaced)


def _computes_rms_norm(kind: type) -> bool:
    """Return True if a module of this class computes bitwise `rms_norm`; class names do not distinguish variants."""
    random = torch.Generator().manual_seed(0)
    with torch.device("cpu"), torch.no_grad():  # the model may be on the meta device
        x, weight = torch.randn(3, PROBE_WIDTH, generator=random), torch.randn(PROBE_WIDTH, generator=random)
        try:
            norm = kind(PROBE_WIDTH, eps=0.3)
            norm.weight.copy_(weight)
            equal = [
                torch.equal(norm.to(dtype)(x.to(dtype)), rms_norm(x.to(dtype), weight.to(dtype), 0.3))
                for dtype in (torch.float32, torch.bfloat16)
            ]
        except (TypeError, AttributeError, RuntimeError):
            return False
    return all(equal) and getattr(norm, "variance_epsilon", None) == 0.3
