"""Attention over packed segments with soft-capped scores and attention sinks, in torch operators.

    scores = Scores(scale=0.1, window=4096, softcap=50.0)
    out = blockwise_attention(query, key, value, Packing([5, 3, 3], prefix_of=[None, 0, 0]), scores, sinks)  # (N, H, D)

With the scores s_ij = scale q_i k_j, a soft-cap c limits their size, and the sink b of a head is one more column of the
softmax, which has no value:

    z_ij = c tanh(s_ij / c)        p_ij = exp(z_ij) / (exp(b) + sum_j exp(z_ij))        out_i = sum_j p_ij v_j

A block of adjacent queries attends to the segments that it overlaps, to what precedes it in the first of them, and to
the prefixes that they continue. A mask hides other segments, later tokens and tokens before the window. The backward
pass recomputes the probabilities of a block from the saved logsumexps, so memory is linear in the number of tokens.
With D_i = sum_d out_id dout_id,

    dz_ij = p_ij (dout_i v_j - D_i)        ds_ij = dz_ij (1 - (z_ij / c)^2)        db = - sum_i p_ib D_i

Sums are float32, or float64 for float64 inputs. Other kernels add a sink to their results without a cap:
`add_sinks` scales their outputs, and `sink_gradient` returns db.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from camshaft.device import is_cuda, to_device
from camshaft.models.packing import Packing

CPU_BLOCK = 64
"""Number of queries per block on a CPU, where larger blocks compute more hidden scores."""

CUDA_BLOCKS = (64, 1024)
"""Minimum and maximum number of queries per block on a GPU, where each block launches about twenty kernels."""

CUDA_SCORES = 1 << 26
"""Number of scores of a block on a GPU, unless the minimum number of queries has more."""


class Scores(NamedTuple):
    """Scale, window and soft-cap of the scores of an attention layer."""

    scale: float
    """Factor of the product of query and key."""
    window: int | None = None
    """Number of tokens to which a token attends, with itself; None for all earlier tokens."""
    softcap: float | None = None
    """Upper limit of the absolute value of a score, which tanh approaches smoothly; None for no limit."""


def blockwise_attention(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scores: Scores, sinks: Tensor | None = None
) -> Tensor:
    """Compute attention within packed segments: query (H, N, D), key and value (Hkv, N, D) -> output (N, H, Dv).

    Segments may continue a prefix. `sinks` (H,) are the sinks of the query heads.
    """
    result: Any = _BlockwiseAttention.apply(query, key, value, sinks, packing, scores)
    return result


def cap_scores(scores: Tensor, softcap: float | None) -> Tensor:
    """Apply the soft-cap to scores, in place."""
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add the sinks to attention outputs (..., H, N, D) with logsumexps (..., H, N), and return both."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out * (lse - total).exp_().to(out.dtype)[..., None], total


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient (H,) of the sinks from outputs and logsumexps that include them, as in `add_sinks`."""
    product = (grad * out).sum(-1, dtype=lse.dtype)
    share = (sinks.to(lse.dtype)[:, None] - lse).exp_()
    return share.mul_(product).neg_().sum(-1).to(sinks.dtype)


class _Block(NamedTuple):
    """Adjacent queries, and the spans of keys that some of them attend to."""

    queries: slice
    keys: list[slice]


class _Tokens(NamedTuple):
    """Position, segment, and continued prefix of each token, int32 on the device. The prefix is -1 for none."""

    positions: Tensor
    segments: Tensor
    prefixes: Tensor


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, packing: Packing, scores: Scores
    ) -> Tensor:
        heads, tokens, width = len(query), query.shape[1], value.shape[-1]
        dtype = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty((tokens, heads, width), dtype=dtype).transpose(0, 1)
        lse = query.new_empty((heads, tokens), dtype=dtype)
        for block in _blocks(packing, query, scores.window):
            z = _block_scores(query, key, packing, block, scores)
            sums = z.logsumexp(dim=-1)
            if sinks is not None:
                sums = torch.logaddexp(sums, sinks.to(dtype)[:, None])
            p = z.sub_(sums[..., None]).exp_()
            out[:, block.queries] = _grouped_product(p, _gather(value, block.keys).to(dtype))
            lse[:, block.queries] = sums
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.packing, ctx.scores = packing, scores
        return out.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        scores: Scores = ctx.scores
        grad = grad.transpose(0, 1)
        gradients = [torch.zeros_like(tensor, dtype=lse.dtype) for tensor in (query, key, value)]
        products = (grad * out).sum(-1, dtype=lse.dtype)
        for block in _blocks(ctx.packing, query, scores.window):
            rows = block.queries
            z = _block_scores(query, key, ctx.packing, block, scores)
            slope = None if scores.softcap is None else (z / scores.softcap).square_().neg_().add_(1)
            p = z.sub_(lse[:, rows, None]).exp_()
            grad_rows = grad[:, rows].to(lse.dtype)
            _add_spans(gradients[2], block.keys, _grouped_transposed_product(p, grad_rows, len(value)))
            dz = _grouped_product(grad_rows, _gather(value, block.keys).to(lse.dtype).transpose(1, 2))
            ds = dz.sub_(products[:, rows, None]).mul_(p).mul_(scores.scale)
            if slope is not None:
                # The slope of a hidden score, which is -inf, is not finite.
                ds.mul_(slope.masked_fill_(p == 0, 0))
            gradients[0][:, rows] = _grouped_product(ds, _gather(key, block.keys).to(lse.dtype))
            query_rows = query[:, rows].to(lse.dtype)
            _add_spans(gradients[1], block.keys, _grouped_transposed_product(ds, query_rows, len(key)))
        grad_sinks = None if sinks is None else sink_gradient(grad, out, lse, sinks)
        return (*(gradient.to(query.dtype) for gradient in gradients), grad_sinks, None, None)


def _block_scores(query: Tensor, key: Tensor, packing: Packing, block: _Block, scores: Scores) -> Tensor:
    """Compute the scores (H, queries, keys) of a block, -inf for hidden keys."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    keys = _gather(key, block.keys).to(dtype)
    rows = query[:, block.queries].to(dtype).mul(scores.scale)
    z = cap_scores(_grouped_product(rows, keys.transpose(1, 2)), scores.softcap)
    return z.masked_fill_(_hidden(_tokens(packing, query.device), block, scores.window), -torch.inf)


def _hidden(tokens: _Tokens, block: _Block, window: int | None) -> Tensor:
    """Return a bool mask (queries, keys) of the keys of a block that a query does not attend to."""
    positions, segments, prefixes = (column[block.queries, None] for column in tokens)
    key_positions, key_segments, _ = (_gather(column[None], block.keys)[0] for column in tokens)
    distance = positions - key_positions
    visible = ((segments == key_segments) | (prefixes == key_segments)) & (distance >= 0)
    if window is not None:
        visible &= distance < window
    return visible.logical_not_()


def _grouped_product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply (H, L, A) with (Hkv, A, B) to (H, L, B), where a key head serves several adjacent query heads."""
    heads, rows, _ = left.shape
    return torch.bmm(left.reshape(len(right), -1, left.shape[2]), right).view(heads, rows, -1)


def _grouped_transposed_product(left: Tensor, right: Tensor, key_heads: int) -> Tensor:
    """Multiply (H, L, A) with (H, L, B) to (Hkv, A, B), summed over L and the query heads of each key head."""
    left, right = (tensor.reshape(key_heads, -1, tensor.shape[2]) for tensor in (left, right))
    return torch.bmm(left.transpose(1, 2), right)


def _gather(tensor: Tensor, spans: list[slice]) -> Tensor:
    parts = [tensor[:, span] for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _add_spans(total: Tensor, spans: list[slice], part: Tensor) -> None:
    for span, piece in zip(spans, part.split([span.stop - span.start for span in spans], dim=1), strict=True):
        total[:, span].add_(piece)


# -- blocks of a packing ---------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)  # all layers of a forward and a backward pass use the same packing
def _tokens(packing: Packing, device: torch.device) -> _Tokens:
    lengths = torch.tensor(packing.lengths)
    parents = [-1 if prefix is None else prefix for prefix in packing.prefix_of or [None] * len(lengths)]
    segments = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    columns = packing.position_ids(), segments, torch.tensor(parents)[segments]
    return _Tokens(*(to_device(column.to(torch.int32), device) for column in columns))


def _blocks(packing: Packing, query: Tensor, window: int | None) -> list[_Block]:
    context = packing.longest_context if window is None else min(window, packing.longest_context)
    if is_cuda(query):
        least, most = CUDA_BLOCKS
        size = max(least, min(most, CUDA_SCORES // (len(query) * (context + most))))
    else:
        size = CPU_BLOCK
    return _plan_blocks(packing, size, window)


@functools.lru_cache(maxsize=16)  # one per window and packing
def _plan_blocks(packing: Packing, size: int, window: int | None) -> list[_Block]:
    return list(_iterate_blocks(packing, size, packing.size if window is None else window))


def _iterate_blocks(packing: Packing, size: int, window: int) -> Iterator[_Block]:
    ends = list(itertools.accumulate(packing.lengths, initial=0))
    prefixes = packing.prefix_of or [None] * len(packing.lengths)
    first = last = 0  # segments that contain the first and the last query
    for start in range(0, packing.size, size):
        stop = min(start + size, packing.size)
        while ends[first + 1] <= start:
            first += 1
        while ends[last + 1] < stop:
            last += 1
        own = slice(max(ends[first], start - window + 1), stop)
        spans: dict[int, slice] = {}
        for segment in range(first, last + 1):
            prefix = prefixes[segment]
            if prefix is None:
                continue
            length = ends[prefix + 1] - ends[prefix]
            position = length + max(start - ends[segment], 0)  # of the first query in this segment
            # Adjacent segments continue the same prefix; the first one sees most of it.
            begin = ends[prefix] + min(max(position - window + 1, 0), length)
            end = min(ends[prefix + 1], own.start)
            if begin < end:
                known = spans.get(prefix)
                spans[prefix] = slice(begin if known is None else min(begin, known.start), end)
        yield _Block(slice(start, stop), [*spans.values(), own])
