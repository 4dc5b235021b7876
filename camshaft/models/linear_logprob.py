"""From hidden states to log-probabilities, entropy and KL divergence without holding the logits of all tokens.

    log_probs, entropy = linear_logprob(hidden, lm_head.weight, targets, temperature=1.0, need_entropy=True)
    log_q = log_distribution(other_hidden, other_lm_head.weight)                # (M, V), materialized
    divergence = linear_full_kl(hidden, lm_head.weight, log_q, torch.arange(M))

The output layer runs in tiles of some tokens by a part of the vocabulary, forward and again in the backward pass, which
recomputes the logits. At most a few buffers of tile size exist at a time, and that size does not depend on the
vocabulary. On a GPU the operators on a tile are one Triton kernel (`triton/linear_logprob.py`). Used by `packed.py`.

With z = (hidden weight^T + bias) / temperature and p = softmax(z), for the target y of each token:

    log_prob = z_y - logsumexp(z)           d log_prob / dz_v = [v = y] - p_v
    entropy  = - sum_v p_v log p_v          d entropy  / dz_v = - p_v (log p_v + entropy)
    full_kl  = sum_v p_v (log p_v - log q_v)        d full_kl / dz_v = p_v (log p_v - log q_v - full_kl)

Sums and results are in float32 or in the dtype of the inputs, whichever is wider.

A part r of the vocabulary has a logsumexp s_r, the logit of the target, and, with p normalized over the part, an
entropy h_r and a divergence k_r. With s = logsumexp_r(s_r) and w_r = exp(s_r - s), the entropy is
sum_r w_r (h_r - log w_r) and the divergence is sum_r w_r (k_r + log w_r), without cancellation of large numbers. The
tiles of a token are combined in this way. With `part=VocabularyPart(group, first_row)`, each rank of the group holds
some rows of the weight, and the ranks combine their results in one exchange for all tokens.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from camshaft.device import supports_triton
from camshaft.errors import EngineError

HALF = (torch.float16, torch.bfloat16)


class Tile(NamedTuple):
    """Numbers of tokens and of vocabulary entries whose logits exist at a time."""

    tokens: int
    vocabulary: int

    @classmethod
    def of(cls, hidden: Tensor) -> "Tile":
        """Choose a tile that fits the cache of a CPU, or that fills an accelerator (this size is not measured yet).

        With few tokens a tile spans more of the vocabulary.
        """
        most, numbers = (8192, 1 << 26) if hidden.is_cuda else (2048, 1 << 20)
        tokens = min(most, max(1, len(hidden)))
        return cls(tokens, numbers // tokens)


@dataclass(frozen=True)
class VocabularyPart:
    """The rows of the output layer on this rank: from `first_row` on; `group` holds all rows."""

    group: dist.ProcessGroup
    first_row: int


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    need_entropy: bool = False,
    tile: Tile | None = None,
    part: VocabularyPart | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-prob (M,) of each target and, with `need_entropy`, the entropy (M,) of its distribution.

    `hidden` is (M, H), `weight` (V, H), `bias` (V,) or None, `targets` (M,) int64. With `part`, weight and bias are the
    rows of this rank; all other arguments and the gradient of `hidden` are equal on all ranks of the group.
    """
    options = _Options.of(hidden, temperature, tile, part)
    return _LinearLogProb.apply(hidden, weight, bias, targets, need_entropy, options)  # pyright: ignore[reportReturnType]


def linear_full_kl(
    hidden: Tensor,
    weight: Tensor,
    log_q: Tensor,
    rows: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    tile: Tile | None = None,
    part: VocabularyPart | None = None,
) -> Tensor:
    """Return (M,) the exact sum_v p(v) (log p(v) - log q(v)) of each token; q is constant in the backward pass.

    `hidden` (M, H), `weight` (V, H) and `bias` define p. Row `rows[i]` of `log_q` (N, V), which is not sharded, has the
    log q of token i; `rows` is (M,) int64. `part` as in `linear_logprob`.
    """
    options = _Options.of(hidden, temperature, tile, part)
    return _LinearFullKL.apply(hidden, weight, bias, log_q, rows, options)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def log_distribution(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    part: VocabularyPart | None = None,
) -> Tensor:
    """Return (M, V) log-probs of the whole vocabulary, without gradient; with `part`, on every rank of its group."""
    logits = _logits(hidden, weight, bias)
    if temperature != 1.0:
        logits.div_(temperature)
    if part is not None and len(hidden):
        logits = _all_rows(logits.t(), part.group).t()
    return logits.log_softmax(dim=1)


def _all_rows(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the rows of all ranks, whose numbers of rows may differ."""
    ranks = dist.get_world_size(group)
    counts = [torch.zeros(1, dtype=torch.int64, device=local.device) for _ in range(ranks)]
    dist.all_gather(counts, torch.tensor([len(local)], device=local.device), group=group)
    sizes = [int(count) for count in counts]
    padded = local.new_zeros((max(sizes), *local.shape[1:]))
    padded[: len(local)] = local
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])


class _Options(NamedTuple):
    temperature: float
    tile: Tile
    part: VocabularyPart | None

    @classmethod
    def of(cls, hidden: Tensor, temperature: float, tile: Tile | None, part: VocabularyPart | None) -> "_Options":
        if not temperature > 0:
            raise EngineError(
                f"temperature={temperature} must be above 0; use 1.0 for the log-probs of greedy decoding"
            )
        return cls(temperature, tile or Tile.of(hidden), part)


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        need_entropy: bool,
        options: _Options,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        head = _Head(hidden, weight, bias, options)
        kernels = _kernels(head)

        def reduce(logits: Tensor, rows: slice, vocabulary: slice) -> list[Tensor]:
            if kernels is not None:
                return kernels.reduce_tile(
                    logits, head.unclamped_columns(targets[rows], vocabulary), options.temperature, need_entropy
                )
            logits = head.scaled(logits)
            columns, inside = head.columns(targets[rows], vocabulary)
            target_logits = logits.gather(1, columns[:, None])[:, 0]
            results = [logits.logsumexp(dim=1), target_logits if inside is None else target_logits.where(inside, 0)]
            if need_entropy:
                log_p = logits.sub_(results[0][:, None])
                results.append(-(log_p.exp().mul_(log_p)).sum(dim=1))
            return results

        def combine(shares: Tensor, of_parts: Tensor) -> list[Tensor]:
            target_logits = of_parts[0].sum(dim=0)
            return [target_logits, *((shares * h + torch.special.entr(shares)).sum(dim=0) for h in of_parts[1:])]

        normalisers, target_logits, *rest = head.reduce_vocabulary(reduce, combine)
        entropy = rest[0] if need_entropy else None
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers, entropy)
        ctx.options = options
        return target_logits - normalisers, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 6
        hidden, weight, bias, targets, normalisers, entropy = ctx.saved_tensors
        head = _Head(hidden, weight, bias, ctx.options)
        kernels = _kernels(head)
        gradients = _Gradients(ctx.needs_input_grad, head)
        scaled = [None if each is None else each / ctx.options.temperature for each in (grad_log_probs, grad_entropy)]
        for logits, rows, vocabulary in head.tiles(backward=True):
            of_rows = normalisers[rows], *(None if each is None else each[rows] for each in (entropy, *scaled))
            if kernels is not None:
                columns = head.unclamped_columns(targets[rows], vocabulary)
                gradients.add(
                    rows,
                    vocabulary,
                    kernels.logit_gradient(logits, columns, *of_rows, ctx.options.temperature, weight.dtype),
                )
            else:
                columns = head.columns(targets[rows], vocabulary)
                gradients.add(rows, vocabulary, _logit_gradient(head.scaled(logits), *columns, *of_rows))
        return *gradients.total(), None, None, None


def _logit_gradient(
    logits: Tensor,
    columns: Tensor,
    inside: Tensor | None,
    normalisers: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Compute the gradient of the scaled logits of a tile, in place."""
    log_p = logits.sub_(normalisers[:, None])
    if grad_entropy is None:
        assert grad_log_probs is not None
        grad = log_p.exp_().mul_(-grad_log_probs[:, None])
    else:
        assert entropy is not None
        grad = log_p.exp()
        slope = log_p.add_(entropy[:, None]).mul_(grad_entropy[:, None])
        grad.mul_(slope if grad_log_probs is None else slope.add_(grad_log_probs[:, None])).neg_()
    if grad_log_probs is not None:
        of_target = grad_log_probs if inside is None else grad_log_probs.where(inside, 0)
        grad.scatter_add_(1, columns[:, None], of_target[:, None])
    return grad


class _LinearFullKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, log_q: Tensor, rows: Tensor, options: _Options
    ) -> Tensor:
        if options.part is not None:
            log_q = log_q[:, options.part.first_row : options.part.first_row + len(weight)]

        head = _Head(hidden, weight, bias, options)

        def reduce(logits: Tensor, tokens: slice, vocabulary: slice) -> list[Tensor]:
            logits = head.scaled(logits)
            normalisers = logits.logsumexp(dim=1)
            p = logits.sub_(normalisers[:, None]).exp()
            return [normalisers, logits.sub_(log_q[:, vocabulary].index_select(0, rows[tokens])).mul_(p).sum(dim=1)]

        def combine(shares: Tensor, of_parts: Tensor) -> list[Tensor]:
            return [(shares * of_parts[0] - torch.special.entr(shares)).sum(dim=0)]

        normalisers, divergence = head.reduce_vocabulary(reduce, combine)
        ctx.save_for_backward(hidden, weight, bias, log_q, rows, normalisers, divergence)
        ctx.options = options
        return divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        hidden, weight, bias, log_q, rows, normalisers, divergence = ctx.saved_tensors
        head = _Head(hidden, weight, bias, ctx.options)
        gradients = _Gradients(ctx.needs_input_grad, head)
        grad_kl = grad_kl / ctx.options.temperature
        for logits, tokens, vocabulary in head.tiles(backward=True):
            log_p = head.scaled(logits).sub_(normalisers[tokens, None])
            p = log_p.exp()
            slope = log_p.sub_(log_q[:, vocabulary].index_select(0, rows[tokens])).sub_(divergence[tokens, None])
            gradients.add(tokens, vocabulary, slope.mul_(p).mul_(grad_kl[tokens, None]))
        return *gradients.total(), None, None, None


class _Head(NamedTuple):
    """The output layer, one tile at a time."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    options: _Options

    def tiles(self, backward: bool = False) -> Iterator[tuple[Tensor, slice, slice]]:
        """Yield the unscaled logits of each tile (a writable buffer), its slice of tokens and of the vocabulary.

        Forward iterates over the vocabulary for some tokens, backward over the tokens for a part of the vocabulary.
        """
        spans = (
            _spans(len(self.hidden), self.options.tile.tokens),
            _spans(len(self.weight), self.options.tile.vocabulary),
        )
        for one, other in itertools.product(*(reversed(spans) if backward else spans)):
            rows, vocabulary = (other, one) if backward else (one, other)
            bias = None if self.bias is None else self.bias[vocabulary]
            yield _logits(self.hidden[rows], self.weight[vocabulary], bias), rows, vocabulary

    def scaled(self, logits: Tensor) -> Tensor:
        """Divide logits by the temperature, in place."""
        return logits if self.options.temperature == 1.0 else logits.div_(self.options.temperature)

    def reduce_vocabulary(
        self,
        reduce: Callable[[Tensor, slice, slice], list[Tensor]],
        combine: Callable[[Tensor, Tensor], list[Tensor]],
    ) -> list[Tensor]:
        """Reduce the logits of each token over the vocabulary of all ranks; the first result is the logsumexp.

        `reduce` computes the results of a tile. `combine` merges the other results of several parts, (results, parts,
        tokens), with the share of each part in the sum of exponentials, (parts, tokens).
        """
        by_rows: dict[int, list[Tensor]] = {}
        for logits, rows, vocabulary in self.tiles():
            by_rows.setdefault(rows.start, []).append(torch.stack(reduce(logits, rows, vocabulary)))
        results = torch.cat([_merge(torch.stack(parts, dim=1), combine) for parts in by_rows.values()], dim=1)
        part = self.options.part
        if part is not None and len(self.hidden):
            gathered = [torch.empty_like(results) for _ in range(dist.get_world_size(part.group))]
            dist.all_gather(gathered, results, group=part.group)
            results = _merge(torch.stack(gathered, dim=1), combine)
        return list(results)

    def unclamped_columns(self, targets: Tensor, vocabulary: slice) -> Tensor:
        """Return the column of each target in this slice of the vocabulary; out of range for targets outside it."""
        return targets - (vocabulary.start + (0 if self.options.part is None else self.options.part.first_row))

    def columns(self, targets: Tensor, vocabulary: slice) -> tuple[Tensor, Tensor | None]:
        """Return a valid column for each target, and a mask of the targets inside the slice; None if all are."""
        count = vocabulary.stop - vocabulary.start
        if self.options.part is None and count == len(self.weight):
            return targets, None
        columns = self.unclamped_columns(targets, vocabulary)
        return columns.clamp(0, count - 1), (columns >= 0) & (columns < count)


class _Gradients:
    """Accumulates the required gradients of hidden states, weight and bias from those of the logits."""

    def __init__(self, required: Sequence[bool], head: _Head):
        hidden, weight, bias, _ = self._head = head
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self._hidden = torch.empty_like(hidden, dtype=wide) if required[0] else None
        self._weight = torch.empty_like(weight) if required[1] else None
        self._sum: Tensor  # for the current rows of the weight: accumulated in float32 or wider, rounded once
        self._bias = torch.zeros_like(bias, dtype=wide) if bias is not None and required[2] else None

    def add(self, rows: slice, vocabulary: slice, grad: Tensor) -> None:
        """Add a tile; tiles with the same slice of the vocabulary follow each other in the order of their tokens."""
        hidden, weight, _, _ = self._head
        if self._hidden is not None:
            _add_product(self._hidden[rows], grad, weight[vocabulary], first=vocabulary.start == 0)
        if self._weight is not None:
            if rows.start == 0:
                target = self._weight[vocabulary]
                self._sum = torch.empty_like(target, dtype=torch.float32) if target.dtype in HALF else target
            _add_product(self._sum, grad.t(), hidden[rows], first=rows.start == 0)
            if self._sum.dtype != weight.dtype and rows.stop == len(hidden):
                self._weight[vocabulary] = self._sum
        if self._bias is not None:
            self._bias[vocabulary].add_(grad.sum(dim=0))

    def total(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients in the dtypes of the inputs, summed over all ranks for the hidden states."""
        hidden, _, bias, options = self._head
        if self._hidden is not None and options.part is not None and len(hidden):
            dist.all_reduce(self._hidden, group=options.part.group)
        of_hidden = None if self._hidden is None else self._hidden.to(hidden.dtype)
        return of_hidden, self._weight, None if bias is None or self._bias is None else self._bias.to(bias.dtype)


def _merge(results: Tensor, combine: Callable[[Tensor, Tensor], list[Tensor]]) -> Tensor:
    """Merge (results, parts, tokens) of parts of the vocabulary into (results, tokens) of their union."""
    total = results[0].logsumexp(dim=0)
    shares = (results[0] - total).exp()
    return torch.stack([total, *combine(shares, results[1:])])


def _spans(count: int, size: int) -> list[slice]:
    """Split `count` items into slices of at most `size`; one empty slice for no items."""
    return [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]


def _kernels(head: _Head) -> ModuleType | None:
    """Return the Triton kernels on a GPU, except for float64 and an output layer with a bias."""
    if not supports_triton(head.hidden) or head.hidden.dtype == torch.float64 or head.bias is not None:
        return None
    from camshaft.models.triton import linear_logprob

    return linear_logprob


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the logits (C, V) in float32 or wider, in a new buffer, into which the caller may write."""
    if _half_on_cuda(hidden):
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)  # pyright: ignore[reportCallIssue]
    else:
        logits = torch.mm(hidden, weight.t()).to(torch.promote_types(hidden.dtype, torch.float32))
    return logits if bias is None else logits.add_(bias)


def _add_product(total: Tensor, grad: Tensor, factor: Tensor, first: bool) -> None:
    """Add grad @ factor to `total`, in its dtype; the first tile overwrites `total`."""
    if _half_on_cuda(factor):
        product = torch.mm(grad.to(factor.dtype), factor, out_dtype=torch.float32)  # pyright: ignore[reportCallIssue]
        total.copy_(product) if first else total.add_(product)
    else:
        total.addmm_(grad, factor.to(total.dtype), beta=0 if first else 1)


def _half_on_cuda(tensor: Tensor) -> bool:
    """Return True if `torch.mm` supports float32 results from these inputs, without rounding in between."""
    return tensor.is_cuda and tensor.dtype in HALF
