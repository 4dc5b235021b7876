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
        out = _by_token(query)
        norm = out.new_empty(out.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))[..., None]
        for call in own:
            found, norms = _kernel(query, key, value, call, scale)
            _rows(out, call.queries, call.rows).copy_(found)
            _rows(norm, call.queries, call.rows).copy_(norms[..., None])
        for call in across:
            found, norms = _kernel(query, key, value, call, scale)
            there = _rows(out, call.queries, call.rows), _rows(norm, call.queries, call.rows)
            _merge(*there, found, norms[..., None])
        ctx.save_for_backward(query, key, value, out, norm)
        ctx.calls, ctx.scale = (own, across), scale
        return out.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, norm = ctx.saved_tensors
        own, across = ctx.calls
        grad = grad.transpose(0, 1)
        total = [_by_token(tensor) for tensor in (query, key, value)]
        for calls, write in ((own, Tensor.copy_), (across, Tensor.add_)):
            for call in calls:
                back, made, norms = (_rows(tensor, call.queries, call.rows) for tensor in (grad, out, norm))
                shares = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    back, *_inputs(query, key, value, call), made, norms[..., 0].contiguous(), 0.0, call.causal,
                    scale=ctx.scale,
                )  # fmt: skip
                for whole, share, span in zip(total, shares, (call.queries, call.keys, call.keys), strict=True):
                    write(_rows(whole, span, call.rows), share)
        return (*total, None, None, None)


def _by_token(like: Tensor) -> Tensor:
    """An empty (H, N, D), laid out token by token as projections write and read it."""
    heads, tokens, width = like.shape
    return like.new_empty(tokens, heads, width).transpose(0, 1)


def _kernel(query: Tensor, key: Tensor, value: Tensor, call: Call, scale: float | None) -> tuple[Tensor, Tensor]:
    """(rows, H, L, D) and the logsumexp (rows, H, L)."""
    q, k, v = _inputs(query, key, value, call)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, call.causal, scale=scale)


def _inputs(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    keys, rows = call.keys, call.rows
    return _rows(query, call.queries, rows), _rows(key, keys, rows), _rows(value, keys, rows)


def _rows(tensor: Tensor, span: slice, count: int) -> Tensor:
    """(H, N, D) -> (count, H, L, D): neighbours of one length, without a copy, and in one operation, for there are
    many of these."""
    heads, _, width = tensor.shape
    of_head, of_token, of_number = tensor.stride()
    length = (span.stop - span.start) // count
    return tensor.as_strided(
        (count, heads, length, width),
        (length * of_token, of_head, of_token, of_number),
        tensor.storage_offset() + span.start * of_token,
    )


def _merge(out: Tensor, norm: Tensor, more: Tensor, more_norm: Tensor) -> None:
    """Attention over some keys, `out` with its logsumexp `norm`, becomes that over these and more keys, in place."""
    total = torch.logaddexp(norm, more_norm)
    share = (more_norm - total).exp_().to(out.dtype)
    out.mul_((norm - total).exp_().to(out.dtype)).addcmul_(more, share)
    norm.copy_(total)
