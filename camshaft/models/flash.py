"""Autograd function for GPUs: flash attention over packed segments, in half precision.

    packing = Packing([5, 3, 3], prefix_of=[None, 0, 0])
    out = packed_flash_attention(query, key, value, bounds, packing)        # (N, H, D)

One kernel call computes the causal attention of all segments to themselves. If segments continue a prefix, a second
call computes their attention to the prefix. The two outputs are combined by their logsumexps, and attention sinks are
added (`blockwise.py`). In the backward pass, each kernel call receives the combined logsumexp and output, and returns
its share of the gradient, as on a CPU (`cpu.py`). The kernels are those of torch, which read each key head once for all
query heads that share it.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from camshaft.device import to_device
from camshaft.models.blockwise import add_sinks, sink_gradient
from camshaft.models.packing import Packing

HALF = (torch.float16, torch.bfloat16)

KERNEL = torch.ops.aten._flash_attention_forward.default
"""Forward kernel: (query, key, value, bounds of queries and keys, maximum lengths, dropout, causal, mask) -> output
(N, H, D), logsumexp (H, N), state of the random numbers, and two unused results."""

BACKWARD = torch.ops.aten._flash_attention_backward.default
"""Backward kernel: (grad, query, key, value, output, logsumexp, bounds, maximum lengths, dropout, causal, state,
unused) -> gradients of query, key and value."""


class Bounds(NamedTuple):
    """Boundaries of groups of queries, and of the group of keys that each group of queries attends to."""

    queries: Tensor
    """Start offsets of the groups and their end, int32 on the device."""
    keys: Tensor
    longest_queries: int
    """Number of tokens of the longest group of queries."""
    longest_keys: int


class PrefixAttention(NamedTuple):
    """Attention of the tokens that continue a prefix to that prefix."""

    children: Tensor
    """Offsets of these tokens, int64 on the device."""
    prefixes: Tensor
    """Offsets of the tokens of all shared prefixes."""
    bounds: Bounds
    """Bounds within `children` and `prefixes`."""


def packed_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Bounds,
    packing: Packing | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention within packed segments: query (H, N, D), key and value (Hkv, N, D) -> output (N, H, D).

    `bounds` are those of the segments. `packing` is required only if segments continue a prefix.
    """
    prefix = None if packing is None else prefix_attention(packing, query.device)
    token_major = (tensor.transpose(0, 1).contiguous() for tensor in (query, key, value))
    result: Any = _FlashAttention.apply(*token_major, sinks, bounds, prefix, _options(scale, window))
    return result


@functools.lru_cache(maxsize=8)  # all layers of a forward pass use the same packing
def prefix_attention(packing: Packing, device: torch.device) -> PrefixAttention | None:
    """Return the attention of a packing to its shared prefixes, or None if it has none."""
    if not packing.prefix_spans:
        return None
    (children, queries, longest), (prefixes, keys, longest_prefix) = (
        _concatenate(spans, device) for spans in zip(*packing.prefix_spans, strict=True)
    )
    return PrefixAttention(children, prefixes, Bounds(queries, keys, longest, longest_prefix))


def _concatenate(spans: Sequence[slice], device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Return the offsets in all spans, the bounds of the spans in them, and the size of the largest span."""
    offsets = [torch.arange(span.start, span.stop) for span in spans]
    sizes = [len(part) for part in offsets]
    bounds = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)
    return to_device(torch.cat(offsets), device), to_device(bounds, device), max(sizes)


class _FlashAttention(torch.autograd.Function):
    """Autograd function of `packed_flash_attention`. Tensors are (N, H, D), and logsumexps (H, N) in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        bounds: Bounds,
        prefix: PrefixAttention | None,
        options: dict[str, Any],
    ) -> Tensor:
        out, lse, random, unused, _ = KERNEL(query, key, value, *bounds, 0.0, True, False, **options)
        if prefix is not None:
            children, prefixes = prefix.children, prefix.prefixes
            inputs = query[children], key[prefixes], value[prefixes]
            other_out, other_lse, *_ = KERNEL(*inputs, *prefix.bounds, 0.0, False, False, scale=options["scale"])
            own_lse = lse[:, children]
            weight = (other_lse - own_lse).sigmoid_().t()[..., None]
            merged = out[children].float().lerp_(other_out.float(), weight).to(out.dtype)
            # Not in place, because selective activation checkpointing stores the results of the kernel.
            out = out.index_copy(0, children, merged)
            lse = lse.index_copy(1, children, torch.logaddexp(own_lse, other_lse))
        if sinks is not None:
            by_head, lse = add_sinks(out.transpose(0, 1), lse, sinks)
            out = by_head.transpose(0, 1).contiguous()
        ctx.save_for_backward(query, key, value, out, lse, random, unused, sinks)
        ctx.bounds, ctx.prefix, ctx.options = bounds, prefix, options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, random, unused, sinks = ctx.saved_tensors
        prefix: PrefixAttention | None = ctx.prefix
        grad, rest = grad.contiguous(), (random, unused)
        inputs = query, key, value, out, lse
        gradients = BACKWARD(grad, *inputs, *ctx.bounds, 0.0, True, *rest, **ctx.options)
        if prefix is not None:
            children, prefixes = prefix.children, prefix.prefixes
            inputs = query[children], key[prefixes], value[prefixes], out[children], lse[:, children].contiguous()
            shares = BACKWARD(grad[children], *inputs, *prefix.bounds, 0.0, False, *rest, scale=ctx.options["scale"])
            for gradient, share, rows in zip(gradients, shares, (children, prefixes, prefixes), strict=True):
                gradient.index_copy_(0, rows, gradient[rows] + share)
        grad_sinks = None
        if sinks is not None:
            grad_sinks = sink_gradient(grad.transpose(0, 1), out.transpose(0, 1), lse, sinks)
        return (*gradients, grad_sinks, None, None, None)


def _options(scale: float | None, window: int | None) -> dict[str, Any]:
    if window is None:
        return {"scale": scale}
    return {"scale": scale, "window_size_left": window - 1, "window_size_right": 0}
