"""Triton kernels for the small operators between the matrix products of a decode step.

    normed = rms_norm(x, weight, eps)
    total, normed = add_rms_norm(x, residual, weight, eps)      # total = x + residual
    hidden = silu_mul(gate, up)                                 # silu(gate) * up

They round intermediate results to the dtype of the input, as the operators of the model do, and sum in float32. The
last dimension of each tensor is contiguous. Import this module lazily, because it imports Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from camshaft.rollout.builtin.cuda.kernels import launch

BLOCK_SIZE = 1024
"""Elements per program of an elementwise kernel."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return _norm(x, None, weight, eps)[1]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `x + residual` and its RMS norm."""
    return _norm(x, residual, weight, eps)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, width = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    block = 1 << (width - 1).bit_length()
    launch(
        _norm_kernel, (x.numel() // width,), x, x if residual is None else residual.contiguous(), weight, total, out,
        width, eps, ADD=residual is not None, BLOCK=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return total, out


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up. The rows of both tensors may have gaps between them."""
    width = gate.shape[-1]
    rows = gate.numel() // width
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate, up = gate.reshape(rows, width), up.reshape(rows, width)
    launch(
        _silu_mul_kernel, (rows, -(-width // BLOCK_SIZE)), gate, up, out, gate.stride(0), up.stride(0), width,
        BLOCK=BLOCK_SIZE,
    )  # fmt: skip
    return out


@triton.jit
def _norm_kernel(x, residual, weight, total, out, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """Compute one row per program."""
    row = tl.program_id(0).to(tl.int64) * width
    offsets = tl.arange(0, BLOCK)
    mask = offsets < width
    values = tl.load(x + row + offsets, mask=mask, other=0.0)
    dtype = values.dtype
    if ADD:
        other = tl.load(residual + row + offsets, mask=mask, other=0.0)
        values = (values.to(tl.float32) + other.to(tl.float32)).to(dtype)
        tl.store(total + row + offsets, values, mask=mask)
    numbers = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(numbers * numbers, 0) / width + eps)
    normed = (numbers * scale).to(dtype).to(tl.float32)
    scaled = normed * tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row + offsets, scaled.to(dtype), mask=mask)


@triton.jit
def _silu_mul_kernel(gate, up, out, gate_stride, up_stride, width, BLOCK: tl.constexpr):
    """Compute one block of a row per program."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < width
    values = tl.load(gate + row * gate_stride + offsets, mask=mask, other=0.0)
    numbers = values.to(tl.float32)
    activated = (numbers / (1.0 + tl.exp(-numbers))).to(values.dtype).to(tl.float32)
    product = activated * tl.load(up + row * up_stride + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + offsets, product.to(values.dtype), mask=mask)
