"""The rotation of queries and keys by their positions as one node of the autograd graph, on a CPU.

    fuse_rotations(hf)      # attention layers of the model that are found to rotate so do it with this from now on

With the halves x1, x2 of the last dimension, and of cosine and sine likewise:

    y1 = x1 c1 - x2 s1      y2 = x2 c2 + x1 s2      dx1 = dy1 c1 + dy2 s2       dx2 = dy2 c2 - dy1 s1

`transformers` writes this with negated, swapped and joined copies, and autograd as many again; here it is three passes,
forward and backward. A layer runs its own code with another function under the name `apply_rotary_pos_emb`, and nothing
of `transformers` is changed. Its function is trusted by what it computes: a probe compares the two. Other devices and
formats, and compiled layers, run the function that the layer came with.
"""

from __future__ import annotations

import functools
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

NAME = "apply_rotary_pos_emb"

DTYPES = (torch.float32, torch.float64)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        across = sin.clone()
        across.chunk(2, dim=-1)[0].neg_()
        return _mixed(query, cos, across), _mixed(key, cos, across)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_query: Tensor, of_key: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        across = sin.roll(sin.shape[-1] // 2, -1)
        across.chunk(2, dim=-1)[1].neg_()
        return _mixed(of_query, cos, across), _mixed(of_key, cos, across), None, None


def _mixed(x: Tensor, cos: Tensor, across: Tensor) -> Tensor:
    """(B, H, N, D) by (B, N, D): each number times its cosine, plus that of the other half times what is `across`."""
    return torch.addcmul(x * cos[:, None], x.roll(x.shape[-1] // 2, -1), across[:, None])


class _Fused:
    """What a layer calls in place of its own function."""

    def __init__(self, own: Any):
        self.own = own

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or more or options or not _can(q, k, cos, sin):
            return self.own(q, k, cos, sin, *more, **options)
        return _Rotation.apply(q, k, cos, sin)


def _can(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    alike = q.dtype == k.dtype == cos.dtype == sin.dtype and q.shape[-1] == k.shape[-1] == cos.shape[-1]
    return q.device.type == "cpu" and q.dtype in DTYPES and alike and (q.dim(), cos.dim()) == (4, 3)


def fuse_rotations(model: nn.Module) -> int:
    """How many layers of the model rotate with the fused form now."""
    count = 0
    for module in model.modules():
        forward = _with_fused(type(module))
        if forward is not None and "forward" not in vars(module):
            module.forward = MethodType(forward, module)
            count += 1
    return count


@functools.cache
def _with_fused(kind: type[nn.Module]) -> FunctionType | None:
    """The forward of a class with the fused rotation for its own; None if it has none that computes the same."""
    forward: Any = kind.forward
    if not isinstance(forward, FunctionType) or NAME not in forward.__code__.co_names:
        return None
    own = forward.__globals__.get(NAME)
    if not _is_rotation(own):
        return None
    names = {**forward.__globals__, NAME: _Fused(own)}
    found = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    found.__kwdefaults__ = forward.__kwdefaults__
    return found


def _is_rotation(function: Any) -> bool:
    """Does it compute what is said above?"""
    random = torch.Generator().manual_seed(0)
    with torch.device("cpu"), torch.no_grad():  # the model may be one without storage yet
        query, key = (torch.randn(1, heads, 3, 8, generator=random) for heads in (4, 2))
        cos, sin = (torch.randn(1, 3, 8, generator=random) for _ in range(2))
        try:
            found = function(query, key, cos, sin)
        except (TypeError, RuntimeError, AttributeError):
            return False
        wanted = [_plain(x, cos[:, None], sin[:, None]) for x in (query, key)]
        return len(found) == 2 and all(
            ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
            for ours, theirs in zip(found, wanted, strict=True)
        )


def _plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
