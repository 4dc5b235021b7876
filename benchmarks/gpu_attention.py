"""Attention kernels over packed rows, by shape: rates of the forward and the backward pass, and errors.

    case = Case(heads=16, kv_heads=8, dim=128, lengths=(16_384,))
    measured("SDPA, cuDNN", case, "cuda", torch.bfloat16)      # {"forward": 4.1e14, "backward": ..., "error": ...}

A kernel gets the queries, keys and values of all rows, (N, H, D), and attends causally within each row. Its inputs are
random, its error is the relative one of output and gradients to a computation in float64 on short rows. Rates count
four operations per hidden unit and pair of tokens in the forward pass and 2.5 times as many in the backward pass, whose
time is that of both passes minus that of the forward pass. A kernel that this machine lacks reports the reason.

`SDPA` is one call per row, or one call for rows of equal length. FA3 is read from the package `flash_attn_interface`;
"camshaft with FA3" is the code of camshaft after `torch.nn.attention.activate_flash_attention_impl("FA3")`.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_parts import median_seconds
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from camshaft.models.attention import packed_attention, packed_kwargs
from camshaft.models.packing import Packing

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(N, H, D), (N, Hkv, D), (N, Hkv, D) -> (N, H, D)"""

Kernel = Callable[["Case", str], Attend]

BACKWARD = 2.5
"""Operations of a backward pass, relative to those of the forward pass: five products instead of two."""


@dataclass(frozen=True)
class Case:
    """Heads of a model, and the lengths of packed rows."""

    heads: int
    kv_heads: int
    dim: int
    lengths: tuple[int, ...]

    @property
    def operations(self) -> float:
        """Operations of a forward pass of one layer."""
        return 4 * self.heads * self.dim * sum(n * (n + 1) // 2 for n in self.lengths)

    def __str__(self) -> str:
        count, longest = len(self.lengths), max(self.lengths)
        rows = f"{count} x {longest:,}" if len(set(self.lengths)) == 1 else f"{count} of up to {longest:,}"
        return f"{self.heads} / {self.kv_heads} heads of {self.dim}, {rows} tokens"

    def inputs(self, device: str, dtype: torch.dtype) -> list[Tensor]:
        """Return random queries, keys and values."""
        torch.manual_seed(0)
        sizes = ((sum(self.lengths), heads, self.dim) for heads in (self.heads, self.kv_heads, self.kv_heads))
        return [torch.randn(size, device=device, dtype=dtype).requires_grad_() for size in sizes]

    def bounds(self, device: str) -> Tensor:
        """Return the start offsets of the rows and their end."""
        return torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device=device)


CASES = (
    Case(16, 8, 128, (16_384,)),
    Case(16, 8, 128, (65_536,)),
    Case(32, 8, 128, (16_384,)),
    Case(12, 2, 128, (4096, 1000, 777, 8192, 1, 2318)),
    Case(12, 2, 128, (512,) * 32),
)
"""The first three have the heads of Qwen3-0.6B and Qwen3-4B, the others those of Qwen2.5-1.5B."""
TINY = (Case(4, 2, 32, (64,)), Case(4, 2, 32, (40, 1, 23)))
SHORT = 150
"""Maximum length of the rows of which errors are computed."""


# -- kernels --------------------------------------------------------------------------------------


def camshaft(case: Case, device: str) -> Attend:
    kwargs, module = packed_kwargs(Packing(case.lengths), device), torch.nn.Identity()

    def attend(*inputs: Tensor) -> Tensor:
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in inputs)
        return packed_attention(module, query, key, value, scaling=case.dim**-0.5, **kwargs)[0][0]

    return attend


def camshaft_with_fa3(case: Case, device: str) -> Attend:
    """Replace the flash kernels of torch by those of FA3 in this process."""
    torch.nn.attention.activate_flash_attention_impl("FA3")
    return camshaft(case, device)


def sdpa(backend: SDPBackend, case: Case, _device: str) -> Attend:
    runs = Packing(case.lengths).runs

    def attend(*inputs: Tensor) -> Tensor:
        outputs, sizes = [], [count * length for count, length in runs]
        with sdpa_kernel(backend):
            for (count, _), *part in zip(runs, *(tensor.split(sizes) for tensor in inputs), strict=True):
                query, key, value = (tensor.unflatten(0, (count, -1)).transpose(1, 2) for tensor in part)
                out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
                outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)

    return attend


class _CudnnAttention(torch.autograd.Function):
    """The variable-length kernels of cuDNN, which torch calls for nested tensors."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int) -> Tensor:
        operator = torch.ops.aten._cudnn_attention_forward
        result = operator(query, key, value, None, bounds, bounds, longest, longest, True, 0.0, True, False)
        ctx.save_for_backward(query, key, value, result[0], result[1], result[6], result[7], bounds)
        ctx.longest = longest
        return result[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, bounds = ctx.saved_tensors
        operator, longest = torch.ops.aten._cudnn_attention_backward, ctx.longest
        gradients = operator(grad.contiguous(), *saved, None, bounds, bounds, longest, longest, 0.0, True)
        return (*gradients, None, None)


def cudnn(case: Case, device: str) -> Attend:
    bounds, longest = case.bounds(device), max(case.lengths)
    return lambda query, key, value: _CudnnAttention.apply(query, key, value, bounds, longest)  # pyright: ignore[reportReturnType]


def varlen(case: Case, device: str) -> Attend:
    """`varlen_attn` of torch. The argument `enable_gqa` is newer than torch 2.11, which needs none."""
    function: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    bounds, longest = case.bounds(device), max(case.lengths)
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(function).parameters else {}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return function(query, key, value, bounds, bounds, longest, longest, window_size=(-1, 0), **grouped)

    return attend


def flex(case: Case, device: str) -> Attend:
    """FlexAttention with a mask of rows, compiled on CUDA."""
    module: Any = importlib.import_module("torch.nn.attention.flex_attention")
    rows = torch.repeat_interleave(torch.tensor(case.lengths, device=device))

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (rows[query] == rows[key]) & (query >= key)

    mask = module.create_block_mask(sees, None, None, len(rows), len(rows), device=device)
    run = torch.compile(module.flex_attention, dynamic=False) if device.startswith("cuda") else module.flex_attention

    def attend(*inputs: Tensor) -> Tensor:
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in inputs)
        return run(query, key, value, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return attend


def fa3(case: Case, device: str) -> Attend:
    function: Any = importlib.import_module("flash_attn_interface").flash_attn_varlen_func
    bounds, longest = case.bounds(device), max(case.lengths)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = function(query, key, value, bounds, bounds, longest, longest, causal=True)
        return result[0] if isinstance(result, tuple) else result  # some versions also return the logsumexp

    return attend


def repeated(kernel: Kernel, case: Case, device: str) -> Attend:
    """Repeat the keys and values for all heads first, for kernels that do not support grouped heads."""
    attend = kernel(replace(case, kv_heads=case.heads), device)

    def expanded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (tensor.repeat_interleave(case.heads // case.kv_heads, dim=1) for tensor in (key, value))
        return attend(query, key, value)

    return expanded


SDPA_CUDNN = partial(sdpa, SDPBackend.CUDNN_ATTENTION)
KERNELS: dict[str, Kernel] = {
    "camshaft": camshaft,
    "SDPA, flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "SDPA, cuDNN": SDPA_CUDNN,
    "SDPA, cuDNN, repeated keys": partial(repeated, SDPA_CUDNN),
    "cuDNN, variable length": cudnn,
    "cuDNN, variable length, repeated keys": partial(repeated, cudnn),
    "varlen_attn": varlen,
    "FlexAttention": flex,
    "FA3": fa3,
    "camshaft with FA3": camshaft_with_fa3,
}


# -- measurements ---------------------------------------------------------------------------------


def measured(name: str, case: Case, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the rates in operations per second and the errors of a kernel, or the reason for which it is missing."""
    row: dict[str, Any] = {"kernel": name, "shape": str(case)}
    try:
        short = replace(case, lengths=tuple(min(length, SHORT) for length in case.lengths))
        row["error"] = errors(KERNELS[name](short, device), short, device, dtype)
        attend, inputs = KERNELS[name](case, device), case.inputs(device, dtype)
        row |= _rates(attend, inputs, case.operations, device)
    except (ImportError, AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        row["missing"] = (str(error) or type(error).__name__).strip().split("\n")[0].split(". ")[0]
    return row


def _rates(attend: Attend, inputs: Sequence[Tensor], operations: float, device: str) -> dict[str, float]:
    grad = torch.randn_like(inputs[0])

    def both() -> None:
        torch.autograd.grad(attend(*inputs), inputs, grad)

    with torch.no_grad():
        once = median_seconds(partial(attend, *inputs), device)
    backward = median_seconds(both, device) - once
    rates = {"forward": operations / once}
    return rates | ({"backward": BACKWARD * operations / backward} if backward > 0 else {})


def errors(attend: Attend, case: Case, device: str, dtype: torch.dtype) -> float:
    """Return the largest relative error of output and gradients to those of `exact`."""
    inputs = case.inputs(device, dtype)
    grad = torch.randn_like(inputs[0])
    out = attend(*inputs)
    actual = [out, *torch.autograd.grad(out, inputs, grad)]
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    out = exact(*doubles, lengths=case.lengths)
    expected = [out, *torch.autograd.grad(out, doubles, grad.double())]
    pairs = zip(actual, expected, strict=True)
    return max(float(((a.double() - e).norm() / e.norm()).detach()) for a, e in pairs)


def exact(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    """Compute attention by its definition, a row at a time."""
    outputs = []
    for q, k, v in zip(*(tensor.split(list(lengths)) for tensor in (query, key, value)), strict=True):
        repeats = q.shape[1] // k.shape[1]
        k, v = (tensor.repeat_interleave(repeats, dim=1) for tensor in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        hidden = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v))
    return torch.cat(outputs)
