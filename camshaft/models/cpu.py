"""Autograd functions for CPUs: attention over packed segments, and RMSNorm.

    out = packed_cpu_attention(query, key, value, Packing([5, 3, 3], prefix_of=[None, 0, 0]))     # (N, H, D)
    count = replace_norms(hf)       # replaces the RMSNorm modules of `hf` with `FusedRMSNorm`

In packed attention, each segment attends causally to itself and, if it continues a prefix, to all of the prefix. Heads
may have attention sinks (`blockwise.py`).
Separate operators per segment would make autograd write a gradient of all N tokens for every segment, most of it zeros.
This autograd function calls the kernel once for each run of adjacent segments with equal lengths, and concatenates the
results once. Attention to a prefix takes another kernel call. The two outputs are combined by their logsumexps. In the
backward pass, each kernel call receives the combined logsumexp and output, and returns its share of the gradient.

RMSNorm is computed in float32. With r = 1 / sqrt(mean(x^2) + eps) per token, and t = x dy,

    y = x r w        dx = r w dy - x r^3 (t w) / width        dw = sum over tokens of r t

The output is bitwise equal to that of `transformers`. Its module runs eight operators in the forward pass and about
twelve in the backward pass, each of which reads and writes all activations. This autograd function runs four in the
forward pass and six in the backward pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from camshaft.device import is_cuda
from camshaft.models.blockwise import add_sinks, sink_gradient
from camshaft.models.packing import Packing

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""Forward kernel: (query, key, value, dropout, causal) -> output (B, H, L, D) and logsumexp (B, H, L)."""

HALF = (torch.bfloat16, torch.float16)
SHORT = 512
"""Mean length of the segments below which gradients in half precision are computed in float32. The kernel takes several
times as long for short segments in half precision (benchmarks/results/attention_backward.md)."""

BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
"""Backward kernel: (grad, query, key, value, output, logsumexp, dropout, causal) -> grads of query, key and value."""


def supports_cpu_kernel(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Return True if the CPU kernel supports the device, dtype, dropout and head dimensions."""
    equal_dims = query.shape[-1] == value.shape[-1]
    on_cpu = query.device.type == "cpu" and not is_cuda(query)
    return on_cpu and query.dtype in DTYPES and dropout == 0 and equal_dims


def packed_cpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention within packed segments: query (H, N, D), key and value (Hkv, N, D) -> output (N, H, D)."""
    outputs: Any = _PackedAttention.apply(query[None], key[None], value[None], sinks, packing, scale)
    return outputs[0]


class _PackedAttention(torch.autograd.Function):
    """Autograd function of `packed_cpu_attention`. Tensors are (1, H, N, ...) in token-major memory order."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        packing: Packing,
        scale: float | None,
    ) -> Tensor:
        parts = (_split(tensor, packing.runs) for tensor in (query, key, value))
        results = [KERNEL(*inputs, 0.0, True, scale=scale) for inputs in zip(*parts, strict=True)]
        out, lse = (_concat(tensors, packing.runs) for tensors in zip(*results, strict=True))
        for children, prefix in packing.prefix_spans:
            inputs = query[:, :, children], key[:, :, prefix], value[:, :, prefix]
            _merge(out[:, :, children], lse[:, :, children], *KERNEL(*inputs, 0.0, False, scale=scale))
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        ctx.save_for_backward(query, key, value, out, lse, sinks)
        ctx.packing, ctx.scale = packing, scale
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packing, scale, dtype = ctx.packing, ctx.scale, grad.dtype
        *saved, sinks = ctx.saved_tensors
        tensors = (grad.transpose(1, 2), *saved)
        grad_sinks = None if sinks is None else sink_gradient(tensors[0][0], saved[3][0], saved[4][0], sinks)
        if dtype in HALF and grad.shape[1] < SHORT * sum(count for count, _ in packing.runs):
            tensors = tuple(tensor.float() for tensor in tensors)
        parts = (_split(tensor, packing.runs) for tensor in tensors)
        results = [BACKWARD(*inputs, 0.0, True, scale=scale) for inputs in zip(*parts, strict=True)]
        gradients = [_concat(column, packing.runs) for column in zip(*results, strict=True)]
        for children, prefix in packing.prefix_spans:
            spans = (children, children, prefix, prefix, children, children)
            inputs = [tensor[:, :, span] for tensor, span in zip(tensors, spans, strict=True)]
            shares = BACKWARD(*inputs, 0.0, False, scale=scale)
            for gradient, share, span in zip(gradients, shares, (children, prefix, prefix), strict=True):
                gradient[:, :, span].add_(share)
        return (*(gradient.to(dtype) for gradient in gradients), grad_sinks, None, None)


def _split(tensor: Tensor, runs: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Split (1, H, N, ...) into one view (count, H, L, ...) per run.

    A single `split` replaces one slice per run, because with many runs the overhead of operator calls dominates.
    """
    parts = tensor.split([count * length for count, length in runs], 2)
    return [
        part if count == 1 else part[0].unflatten(1, (count, -1)).transpose(0, 1)
        for part, (count, _) in zip(parts, runs, strict=True)
    ]


def _concat(parts: Sequence[Tensor], runs: Sequence[tuple[int, int]]) -> Tensor:
    """Invert `_split`. The result is token-major in memory, the order that projections read and write."""
    rows = [
        part.transpose(1, 2) if count == 1 else part.transpose(1, 2).flatten(0, 1)[None]
        for part, (count, _) in zip(parts, runs, strict=True)
    ]
    return torch.cat(rows, dim=1).transpose(1, 2)


def _merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Combine attention over two sets of keys in place: `out` and `lse` become output and logsumexp of their union."""
    total = torch.logaddexp(lse, other_lse)
    weight, other_weight = (lse_part.sub(total).exp_().to(out.dtype)[..., None] for lse_part in (lse, other_lse))
    out.mul_(weight).addcmul_(other_out, other_weight)
    lse.copy_(total)


# -- RMSNorm ---------------------------------------------------------------------------------------

PROBE_WIDTH = 16


class FusedRMSNorm(nn.Module):
    """RMSNorm that takes over the parameter of the module it replaces, so state-dict names do not change.

    It uses `_RMSNorm` for float32 on a CPU. Other devices and dtypes, sharded weights and compiled layers use the same
    operators as `transformers`.
    """

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.weight: Any = norm.weight
        self.variance_epsilon: Any = norm.variance_epsilon
        self.train(norm.training)

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight, eps = self.weight, self.variance_epsilon
        on_cpu = hidden_states.device.type == "cpu" and not is_cuda(hidden_states)
        supported = on_cpu and hidden_states.dtype == weight.dtype == torch.float32
        if not supported or isinstance(weight, DTensor) or torch.compiler.is_compiling():
            return rms_norm(hidden_states, weight, eps)
        return _RMSNorm.apply(hidden_states, weight, eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


def rms_norm(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute RMSNorm with the operators of `transformers`: normalize in float32, scale in the dtype of the input."""
    float_states = hidden_states.to(torch.float32)
    float_states = float_states * torch.rsqrt(float_states.pow(2).mean(-1, keepdim=True) + eps)
    return weight * float_states.to(hidden_states.dtype)


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
    """Replace the RMSNorm modules inside `model` with `FusedRMSNorm`; return the number of replacements."""
    replacements: dict[nn.Module, FusedRMSNorm] = {}
    is_rms_norm: dict[type, bool] = {FusedRMSNorm: False}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            cls = type(child)
            if cls not in is_rms_norm:
                is_rms_norm[cls] = cls.__name__.endswith("RMSNorm") and _computes_rms_norm(cls)
            if is_rms_norm[cls]:
                parent.register_module(name, replacements.setdefault(child, FusedRMSNorm(child)))
    return len(replacements)


def _computes_rms_norm(cls: type) -> bool:
    """Return True if the results of this class are bitwise equal to those of `rms_norm`.

    The name of the class does not suffice: variants whose names also end in RMSNorm may, for example, add 1 to the
    weight.
    """
    random = torch.Generator().manual_seed(0)
    with torch.device("cpu"), torch.no_grad():  # the model may be on the meta device
        x, weight = torch.randn(3, PROBE_WIDTH, generator=random), torch.randn(PROBE_WIDTH, generator=random)
        try:
            norm = cls(PROBE_WIDTH, eps=0.3)
            norm.weight.copy_(weight)
            matches = [
                torch.equal(norm.to(dtype)(x.to(dtype)), rms_norm(x.to(dtype), weight.to(dtype), 0.3))
                for dtype in (torch.float32, torch.bfloat16)
            ]
        except (TypeError, AttributeError, RuntimeError):
            return False
    return all(matches) and getattr(norm, "variance_epsilon", None) == 0.3
