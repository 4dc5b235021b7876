"""Attention over packed documents on a CPU, as one node of the autograd graph.

    out = cpu_documents(query, key, value, lengths=[5, 3, 3], parents=[None, 0, 0], scale=None)     # (N, H, D)

A document attends to itself, causally. One with a parent attends to all of the parent too, as if it were the parent's
continuation: a prompt that is packed once stands before each of its responses. Children follow their parent.

Cut up by slices in autograd, a call on M documents would write M times a gradient of all N tokens, most of it zeros;
here the kernel is called for each run of neighbours of one length, and what the calls give is joined once. What a child
looks at in its parent and in itself are two calls, put together by their logsumexp; backward, each call is told the
whole logsumexp and the whole output, and gives its part of the gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Run(NamedTuple):
    """Neighbours of one length, so many of them: one causal call of the kernel, each on itself."""

    tokens: slice
    count: int


class Family(NamedTuple):
    """The children of one parent: one call of the kernel, all of them on all of the parent."""

    children: slice
    parent: slice


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
    runs, families = calls_of(lengths, parents)
    return _Documents.apply(query, key, value, runs, families, scale)  # pyright: ignore[reportReturnType]


def calls_of(lengths: Sequence[int], parents: Sequence[int | None] | None = None) -> tuple[list[Run], list[Family]]:
    """The calls of documents on themselves, which cover all tokens, and those of children on their parents."""
    runs, start = [], 0
    for length, run in itertools.groupby(lengths):
        count = len(list(run))
        if length:
            runs.append(Run(slice(start, start + count * length), count))
            start += count * length
    if parents is None:
        return runs, []
    ends = list(itertools.accumulate(lengths, initial=0))
    families = []
    for parent, family in itertools.groupby(range(len(lengths)), parents.__getitem__):
        if parent is not None:
            children = list(family)
            span = slice(ends[children[0]], ends[children[-1] + 1])
            families.append(Family(span, slice(ends[parent], ends[parent + 1])))
    return runs, families


class _Documents(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, runs: list[Run], families: list[Family],
        scale: float | None,
    ) -> Tensor:  # fmt: skip
        cut = (_cut(tensor, runs) for tensor in (query, key, value))
        found, norms = zip(*(_kernel(q, k, v, True, scale) for q, k, v in zip(*cut, strict=True)), strict=True)
        out = _joined(found)
        norm = torch.cat([each.transpose(0, 1).flatten(1) for each in norms], dim=1)[..., None]
        for children, parent in families:
            inputs = _rows(query, children), _rows(key, parent), _rows(value, parent)
            more, more_norm = _kernel(*inputs, False, scale)
            _merge(_rows(out, children), _rows(norm, children), more, more_norm[..., None])
        ctx.save_for_backward(query, key, value, out, norm)
        ctx.calls, ctx.scale = (runs, families), scale
        return out.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, norm = ctx.saved_tensors
        runs, families = ctx.calls
        grad = grad.transpose(0, 1)
        cut = (_cut(tensor, runs) for tensor in (grad, query, key, value, out, norm))
        shares = [_kernel_backward(inputs, True, ctx.scale) for inputs in zip(*cut, strict=True)]
        total = [_joined(column) for column in zip(*shares, strict=True)]
        for children, parent in families:
            spans = (children, children, parent, parent, children, children)
            inputs = [
                _rows(tensor, span) for tensor, span in zip((grad, query, key, value, out, norm), spans, strict=True)
            ]
            more = _kernel_backward(inputs, False, ctx.scale)
            for whole, share, span in zip(total, more, (children, parent, parent), strict=True):
                _rows(whole, span).add_(share)
        return (*total, None, None, None)


def _kernel(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """(rows, H, L, D) and the logsumexp (rows, H, L)."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)


def _kernel_backward(inputs: Sequence[Tensor], causal: bool, scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient, query, key, value, output and logsumexp -> the gradients of query, key and value."""
    *inputs, norm = inputs
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *inputs, norm[..., 0].contiguous(), 0.0, causal, scale=scale
    )


def _cut(tensor: Tensor, runs: list[Run]) -> list[Tensor]:
    """(H, N, D) -> (count, H, L, D) of each run, without a copy, and nearly all in one operation: there are many."""
    parts = tensor[None].split([tokens.stop - tokens.start for tokens, _ in runs], dim=2)
    return [
        part if count == 1 else _rows(tensor, tokens, count) for (tokens, count), part in zip(runs, parts, strict=True)
    ]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """What `_cut` cuts, together anew: (H, N, D), laid out token by token as projections write and read it."""
    return torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts]).transpose(0, 1)


def _rows(tensor: Tensor, span: slice, count: int = 1) -> Tensor:
    """(H, N, D) -> (count, H, L, D): neighbours of one length, without a copy, and in one operation."""
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
