"""Attention over packed documents on a CPU, as one node of the autograd graph.

    out = cpu_documents(query, key, value, lengths=[5, 3, 3], parents=[None, 0, 0], scale=None)     # (N, H, D)

A document attends to itself, causally. One with a parent attends to all of the parent too, as if it were the parent's
continuation: a prompt that is packed once stands before each of its responses. Children follow their parent.

Cut up by slices in autograd, a call on M documents would write M times a gradient of all N tokens, most of it zeros;
here the kernel is called for each run of neighbours of one length, or for several short neighbours at once, with a mask
that keeps them apart, and what the calls give is joined once. What a child looks at in its parent and in itself are two
calls, put together by their logsumexp; backward, each call is told the whole logsumexp and the whole output, and gives
its part of the gradient.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""Query, key, value, dropout, causal -> (rows, H, L, D) and the logsumexp (rows, H, L)."""

BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
"""Gradient, query, key, value, output, logsumexp, dropout, causal -> the gradients of query, key and value."""


CALL = 1_500_000
"""A call of the kernel takes as long to begin as so many operations take: short neighbours share one, if what they
compute in vain is less."""


class Own(NamedTuple):
    """One call of neighbours, each of them on itself."""

    count: int
    """Of documents of one length, side by side in a batch; 1 for one document, and for several with a mask."""
    size: int
    """Of all their tokens."""
    mask: Tensor | None
    """(1, 1, size, size), 0 for what a token sees and -inf for the rest; None if that is all that is not behind it."""


class Family(NamedTuple):
    """The children of one parent: one call of the kernel, all of them on all of the parent."""

    children: slice
    parent: slice


class Calls(NamedTuple):
    """Those of documents on themselves, which cover all tokens, and those of children on their parents."""

    own: list[Own]
    families: list[Family]


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
    width = query.shape[0] * query.shape[2]
    calls = calls_of(tuple(lengths), None if parents is None else tuple(parents), width, query.dtype)
    found: Any = _Documents.apply(query[None], key[None], value[None], calls, scale)
    return found[0]


@functools.lru_cache(maxsize=8)  # every layer asks
def calls_of(lengths: tuple[int, ...], parents: tuple[int | None, ...] | None, width: int, dtype: torch.dtype) -> Calls:
    """The calls for queries that are `width` numbers wide, of all heads."""
    ends = list(itertools.accumulate(lengths, initial=0))
    families = []
    for parent, family in itertools.groupby(range(len(lengths)), (parents or [None] * len(lengths)).__getitem__):
        if parent is not None:
            children = list(family)
            span = slice(ends[children[0]], ends[children[-1] + 1])
            families.append(Family(span, slice(ends[parent], ends[parent + 1])))
    return Calls([_own(shared, dtype) for shared in _shared(lengths, width)], families)


def _shared(lengths: Sequence[int], width: int) -> list[list[int]]:
    """The lengths of the documents of each call: of a run of one length, or of neighbours as long as that pays."""
    found: list[list[int]] = []
    for length, run in itertools.groupby(length for length in lengths if length):
        more = [length] * len(list(run))
        apart = sum(_operations(each, width) for each in (*found[-1:], more))
        if found and _operations(found[-1] + more, width) < apart + CALL:
            found[-1] += more
        else:
            found.append(more)
    return found


def _operations(shared: list[int], width: int) -> int:
    """Of one call forward: a score is a product of `width` numbers, and what it weighs another."""
    alike = len(set(shared)) == 1
    return 4 * width * (len(shared) * shared[0] ** 2 if alike else sum(shared) ** 2)


def _own(shared: list[int], dtype: torch.dtype) -> Own:
    size = sum(shared)
    return Own(len(shared), size, None) if len(set(shared)) == 1 else Own(1, size, _apart(shared, dtype))


def _apart(lengths: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The mask of documents side by side: each token sees those of its own that are not behind it."""
    size = sum(lengths)
    mask = torch.full((size, size), -torch.inf, dtype=dtype, device="cpu")
    start = 0
    for length in lengths:
        mask[start : start + length, start : start + length].triu_(1)
        start += length
    return mask[None, None]


class _Documents(torch.autograd.Function):
    """Tensors here are (1, H, N, ...), laid out token by token."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: Calls, scale: float | None) -> Tensor:
        cut = (_cut(tensor, calls) for tensor in (query, key, value))
        found, norms = zip(
            *(
                KERNEL(*inputs, 0.0, mask is None, attn_mask=mask, scale=scale)
                for *inputs, (_, _, mask) in zip(*cut, calls.own, strict=True)
            ),
            strict=True,
        )
        out, norm = _joined(found, calls), _joined(norms, calls)
        for children, parent in calls.families:
            inputs = query[:, :, children], key[:, :, parent], value[:, :, parent]
            _merge(out[:, :, children], norm[:, :, children], *KERNEL(*inputs, 0.0, False, scale=scale))
        ctx.save_for_backward(query, key, value, out, norm)
        ctx.calls, ctx.scale = calls, scale
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        calls, scale = ctx.calls, ctx.scale
        told = (grad.transpose(1, 2), *ctx.saved_tensors)
        cut = (_cut(tensor, calls) for tensor in told)
        shares = [
            BACKWARD(*inputs, 0.0, mask is None, attn_mask=mask, scale=scale)
            for *inputs, (_, _, mask) in zip(*cut, calls.own, strict=True)
        ]
        total = [_joined(column, calls) for column in zip(*shares, strict=True)]
        for children, parent in calls.families:
            spans = (children, children, parent, parent, children, children)
            inputs = [tensor[:, :, span] for tensor, span in zip(told, spans, strict=True)]
            more = BACKWARD(*inputs, 0.0, False, scale=scale)
            for whole, share, span in zip(total, more, (children, parent, parent), strict=True):
                whole[:, :, span].add_(share)
        return (*total, None, None)


def _cut(tensor: Tensor, calls: Calls) -> list[Tensor]:
    """(1, H, N, ...) -> (count, H, L, ...) of each run, without a copy, and nearly all in one operation: there are
    many, and what one thread does for each is what other threads wait for."""
    return [
        part if count == 1 else part[0].unflatten(1, (count, -1)).transpose(0, 1)
        for part, (count, _, _) in zip(tensor.split([call.size for call in calls.own], 2), calls.own, strict=True)
    ]


def _joined(parts: Sequence[Tensor], calls: Calls) -> Tensor:
    """What `_cut` cuts, together anew, laid out token by token as projections write and read it."""
    rows = [
        part.transpose(1, 2) if count == 1 else part.transpose(1, 2).flatten(0, 1)[None]
        for part, (count, _, _) in zip(parts, calls.own, strict=True)
    ]
    return torch.cat(rows, dim=1).transpose(1, 2)


def _merge(out: Tensor, norm: Tensor, more: Tensor, more_norm: Tensor) -> None:
    """Attention over some keys, `out` with its logsumexp `norm`, becomes that over these and more keys, in place."""
    total = torch.logaddexp(norm, more_norm)
    kept, share = (each.sub(total).exp_().to(out.dtype)[..., None] for each in (norm, more_norm))
    out.mul_(kept).addcmul_(more, share)
    norm.copy_(total)
