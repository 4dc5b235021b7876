"""Attention over packed documents on a CPU, as one node of the autograd graph.

    out = cpu_documents(query, key, value, lengths=[5, 3, 3], parents=[None, 0, 0], scale=None)     # (N, H, D)

A document attends to itself, causally. One with a parent attends to all of the parent too, as if it were the parent's
continuation: a prompt that is packed once stands before each of its responses. Children follow their parent.

Cut up by slices in autograd, a call on M documents would write M times a gradient of all N tokens, most of it zeros;
here the kernel is called for each run of neighbours of one length, and gradients are written where they belong. What
a child gives to its parent and what it gives to itself are two calls, put together by their logsumexp; backward, each
call is told the whole logsumexp and the whole output, and gives its part of the gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Call(NamedTuple):
    """One call of the kernel: so many rows of tokens of one length, and the keys that they look at."""

    queries: slice
    keys: slice
    rows: int
    causal: bool


def cpu_can(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether the kernel takes these."""
    alike = query.shape[-1] == value.shape[-1]
    return query.device.type == "cpu" and query.dtype in DTYPES and dropout == 0 and alike


def cpu_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    parents: Sequence[int | None] | None = None,
    scale: float | None = None,
) -> Tensor:
    """(H, N, D) query and (Hkv, N, D) key and value of documents of these lengths -> (N, H, D)."""
    own, across = calls_of(lengths, parents)
    return _Documents.apply(query, key, value, own, across, scale)  # pyright: ignore[reportReturnType]


def calls_of(lengths: Sequence[int], parents: Sequence[int | None] | None = None) -> tuple[list[Call], list[Call]]:
    """The calls of documents on themselves, and those of children on their parents."""
    own, start = [], 0
    for length, run in itertools.groupby(lengths):
        count = len(list(run))
        if length:
            span = slice(start, start + count * length)
            own.append(Call(span, span, count, True))
            start = span.stop
    if parents is None:
        return own, []
    ends = list(itertools.accumulate(lengths, initial=0))
    across = []
    for parent, family in itertools.groupby(range(len(lengths)), parents.__getitem__):
        if parent is not None:
            children = list(family)
            queries = slice(ends[children[0]], ends[children[-1] + 1])
            across.append(Call(queries, slice(ends[parent], ends[parent + 1]), 1, False))
    return own, across


class _Documents(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, own: list[Call], across: list[Call], scale: float | None
    ) -> Tensor:
        heads, tokens, width = query.shape
        out = query.new_empty(tokens, heads, width)
        norm = query.new_empty(tokens, heads, dtype=torch.promote_types(query.dtype, torch.float32))
        for call in own:
            found, norms = _kernel(query, key, value, call, scale)
            _rows(out, call.queries, call.rows).copy_(found.transpose(1, 2))
            _rows(norm, call.queries, call.rows).copy_(norms.transpose(1, 2))
        for call in across:
            found, norms = _kernel(query, key, value, call, scale)
            _merge(out[call.queries], norm[call.queries], found[0].transpose(0, 1), norms[0].t())
        ctx.save_for_backward(query, key, value, out, norm)
        ctx.calls, ctx.scale = (own, across), scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, norm = ctx.saved_tensors
        own, across = ctx.calls
        # Token by token, as projections write and read them.
        found = [tensor.new_empty(tensor.shape[1], tensor.shape[0], tensor.shape[2]) for tensor in (query, key, value)]
        for calls, write in ((own, Tensor.copy_), (across, Tensor.add_)):
            for call in calls:
                q, k, v = _inputs(query, key, value, call)
                rows = [_rows(tensor, call.queries, call.rows).transpose(1, 2) for tensor in (grad, out, norm)]
                shares = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    rows[0], q, k, v, rows[1], rows[2].contiguous(), 0.0, call.causal, scale=ctx.scale
                )
                for total, share, span in zip(found, shares, (call.queries, call.keys, call.keys), strict=True):
                    write(_rows(total, span, call.rows), share.transpose(1, 2))
        return (*(tensor.transpose(0, 1) for tensor in found), None, None, None)


def _kernel(query: Tensor, key: Tensor, value: Tensor, call: Call, scale: float | None) -> tuple[Tensor, Tensor]:
    """(rows, H, L, D) and the logsumexp (rows, H, L)."""
    q, k, v = _inputs(query, key, value, call)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, call.causal, scale=scale)


def _inputs(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, H, L, D) of each, without a copy."""
    spans = (call.queries, call.keys, call.keys)
    q, k, v = (
        tensor[:, span].unflatten(1, (call.rows, -1)).transpose(0, 1)
        for tensor, span in zip((query, key, value), spans, strict=True)
    )
    return q, k, v


def _rows(tensor: Tensor, span: slice, count: int) -> Tensor:
    """(N, ...) -> (count, L, ...): neighbours of one length, without a copy."""
    return tensor[span].unflatten(0, (count, -1))


def _merge(out: Tensor, norm: Tensor, more: Tensor, more_norm: Tensor) -> None:
    """Attention over some keys, `out` with its logsumexp `norm`, becomes that over these and more keys, in place."""
    total = torch.logaddexp(norm, more_norm)
    out.mul_((norm - total).exp_()[..., None].to(out.dtype)).add_(
        more * (more_norm - total).exp_()[..., None].to(out.dtype)
    )
    norm.copy_(total)
