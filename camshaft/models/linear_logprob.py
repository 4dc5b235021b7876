"""Fused output layer: log-probs, entropy and KL divergence from hidden states, without the logits of all tokens.

    log_probs, entropy, _ = linear_logprob(hidden, lm_head.weight, targets, temperature=1.0, outputs=("entropy",))
    log_q = log_distribution(other_hidden, other_lm_head.weight)                # (M, V), materialized
    divergence = linear_full_kl(hidden, lm_head.weight, log_q, torch.arange(M))

`PackedModel` calls these functions. They compute the logits in tiles; a tile covers some of the tokens and a part of
the vocabulary. The backward pass recomputes the logits tile by tile. At most a few buffers of tile size exist at a
time, and the tile size does not grow with the vocabulary. On a GPU, one Triton kernel processes the logits of a tile
(`triton/linear_logprob.py`).

With z = (hidden weight^T + bias) / temperature and p = softmax(z), for the target y of each token:

    log_prob = z_y - logsumexp(z)           d log_prob / dz_v = [v = y] - p_v
    entropy  = - sum_v p_v log p_v          d entropy  / dz_v = - p_v (log p_v + entropy)
    sum_pi_squared = sum_v p_v^2            without gradient
    full_kl  = sum_v p_v (log p_v - log q_v)        d full_kl / dz_v = p_v (log p_v - log q_v - full_kl)

A soft-cap c replaces the logits a = hidden weight^T + bias with c tanh(a / c). In the backward pass, the gradient of a
logit is then multiplied by 1 - tanh(a / c)^2.

Sums and results are float32, or float64 for float64 inputs.

Results are combined over parts of the vocabulary. For part r, let s_r be its logsumexp, and let h_r, k_r and q_r be its
entropy, its divergence and its sum of squares, with p normalized over the part. With s = logsumexp_r(s_r) and
w_r = exp(s_r - s), the entropy is sum_r w_r (h_r - log w_r), the divergence is sum_r w_r (k_r + log w_r), and the sum
of squares is sum_r w_r^2 q_r. These sums avoid cancellation of large numbers. The tiles of a token are combined in this
way, and so are the results of tensor-parallel ranks: with `shard=VocabularyShard(group, first_row)`, each rank holds
some rows of the weight, and the ranks combine their results for all tokens in one collective.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from camshaft.device import is_cuda, supports_triton
from camshaft.errors import EngineError
from camshaft.models.blockwise import cap_scores

HALF = (torch.float16, torch.bfloat16)


class Tile(NamedTuple):
    """Size of a tile: its numbers of tokens and of vocabulary entries."""

    tokens: int
    vocabulary: int

    @classmethod
    def fit(cls, hidden: Tensor) -> "Tile":
        """Choose a tile size for `hidden` (M, H); with fewer tokens, a tile spans more of the vocabulary.

        On a CPU a tile fits the cache. On CUDA it fills the device: on an H200, larger tiles are at most 3 % faster.
        """
        max_tokens, num_logits = (8192, 1 << 26) if is_cuda(hidden) else (2048, 1 << 20)
        tokens = min(max_tokens, max(1, len(hidden)))
        return cls(tokens, num_logits // tokens)


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's rows of the output layer, starting at row `first_row`. The ranks of `group` hold all rows."""

    group: dist.ProcessGroup
    first_row: int


class TokenOutputs(NamedTuple):
    """Outputs of each target, (M,); None for those that were not requested."""

    log_probs: Tensor
    entropy: Tensor | None
    sum_pi_squared: Tensor | None


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    outputs: Collection[str] = (),
    tile: Tile | None = None,
    shard: VocabularyShard | None = None,
    softcap: float | None = None,
) -> TokenOutputs:
    """Return the log-prob of each target and, with these names in `outputs`, `entropy` and `sum_pi_squared`.

    `sum_pi_squared` has no gradient. `hidden` is (M, H), `weight` (V, H), `bias` (V,) or None, and `targets` (M,)
    int64. With `shard`, `weight` and `bias` hold the rows of this rank; all other arguments and the gradient of
    `hidden` are equal on all its ranks. `softcap` limits the absolute logits.
    """
    options = _Options.create(hidden, temperature, tile, shard, softcap)
    needs = "entropy" in outputs, "sum_pi_squared" in outputs
    results: Any = _LinearLogProb.apply(hidden, weight, bias, targets, *needs, options)
    return TokenOutputs(*results)


def linear_full_kl(
    hidden: Tensor,
    weight: Tensor,
    log_q: Tensor,
    rows: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    tile: Tile | None = None,
    shard: VocabularyShard | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return (M,) KL(p || q) = sum_v p(v) (log p(v) - log q(v)) of each token; q receives no gradient.

    `hidden` (M, H), `weight` (V, H) and `bias` define p. For token i, log q is row `rows[i]` of `log_q` (N, V); `rows`
    is (M,) int64, and `log_q` is not sharded. `shard` and `softcap` have the same meaning as in `linear_logprob`.
    """
    options = _Options.create(hidden, temperature, tile, shard, softcap)
    return _LinearFullKL.apply(hidden, weight, bias, log_q, rows, options)


@torch.no_grad()
def log_distribution(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    shard: VocabularyShard | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return (M, V) log-probs of the whole vocabulary, without gradient; with `shard`, on every rank of its group."""
    logits = cap_scores(_logits(hidden, weight, bias), softcap)
    if temperature != 1.0:
        logits.div_(temperature)
    if shard is not None:
        logits = _gather_rows(logits.t(), shard.group).t()
    return logits.log_softmax(dim=1)


def _gather_rows(local_rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather and concatenate the rows of all ranks. The number of rows may differ between ranks."""
    ranks = dist.get_world_size(group)
    counts = [torch.zeros(1, dtype=torch.int64, device=local_rows.device) for _ in range(ranks)]
    dist.all_gather(counts, torch.tensor([len(local_rows)], device=local_rows.device), group=group)
    sizes = [int(count) for count in counts]
    padded = local_rows.new_zeros((max(sizes), *local_rows.shape[1:]))
    padded[: len(local_rows)] = local_rows
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])


class _Options(NamedTuple):
    temperature: float
    tile: Tile
    shard: VocabularyShard | None
    softcap: float | None

    @classmethod
    def create(
        cls,
        hidden: Tensor,
        temperature: float,
        tile: Tile | None,
        shard: VocabularyShard | None,
        softcap: float | None,
    ) -> "_Options":
        if not temperature > 0:
            raise EngineError(
                f"temperature={temperature} is not above 0; for the log-probs of greedy decoding, use 1.0"
            )
        return cls(temperature, tile or Tile.fit(hidden), shard, softcap)


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        need_entropy: bool,
        need_squares: bool,
        options: _Options,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.set_materialize_grads(False)
        head = _Head(hidden, weight, bias, options)
        reduction = _TokenReduction(head, targets, need_entropy, need_squares)
        normalizers, target_logits, *others = head.reduce_vocabulary(reduction.reduce, reduction.combine)
        entropy, squares = others[0] if need_entropy else None, others[-1] if need_squares else None
        if squares is not None:
            ctx.mark_non_differentiable(squares)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers, entropy)
        ctx.options = options
        return target_logits - normalizers, entropy, squares

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 7
        hidden, weight, bias, targets, normalizers, entropy = ctx.saved_tensors
        head = _Head(hidden, weight, bias, ctx.options)
        kernels = _kernels(head)
        gradients = _Gradients(ctx.needs_input_grad, head)
        scaled = [None if each is None else each / ctx.options.temperature for each in (grad_log_probs, grad_entropy)]
        for logits, rows, vocabulary in head.tiles(backward=True):
            row_statistics = normalizers[rows], *(None if each is None else each[rows] for each in (entropy, *scaled))
            slope = head.slope(logits)
            if kernels is not None:
                columns = head.unclamped_columns(targets[rows], vocabulary)
                dtype = weight.dtype if slope is None else logits.dtype
                grad = kernels.logit_gradient(logits, columns, *row_statistics, ctx.options.temperature, dtype)
            else:
                grad = _logit_gradient(head.scale(logits), *head.columns(targets[rows], vocabulary), *row_statistics)
            gradients.add(rows, vocabulary, grad, slope)
        return *gradients.total(), None, None, None, None


def _logit_gradient(
    logits: Tensor,
    columns: Tensor,
    inside: Tensor | None,
    normalizers: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Return the gradient with respect to the scaled logits of a tile; overwrites `logits`."""
    log_p = logits.sub_(normalizers[:, None])
    if grad_entropy is None:
        assert grad_log_probs is not None
        grad = log_p.exp_().mul_(-grad_log_probs[:, None])
    else:
        assert entropy is not None
        grad = log_p.exp()
        slope = log_p.add_(entropy[:, None]).mul_(grad_entropy[:, None])
        grad.mul_(slope if grad_log_probs is None else slope.add_(grad_log_probs[:, None])).neg_()
    if grad_log_probs is not None:
        target_grad = grad_log_probs if inside is None else grad_log_probs.where(inside, 0)
        grad.scatter_add_(1, columns[:, None], target_grad[:, None])
    return grad


class _LinearFullKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, log_q: Tensor, rows: Tensor, options: _Options
    ) -> Tensor:
        if options.shard is not None:
            log_q = log_q[:, options.shard.first_row : options.shard.first_row + len(weight)]
        head = _Head(hidden, weight, bias, options)

        def reduce(logits: Tensor, tokens: slice, vocabulary: slice) -> list[Tensor]:
            logits = head.scale(logits)
            normalizers = logits.logsumexp(dim=1)
            p = logits.sub_(normalizers[:, None]).exp()
            return [normalizers, logits.sub_(log_q[:, vocabulary].index_select(0, rows[tokens])).mul_(p).sum(dim=1)]

        def combine(shares: Tensor, part_results: Tensor) -> list[Tensor]:
            return [(shares * part_results[0] - torch.special.entr(shares)).sum(dim=0)]

        normalizers, divergence = head.reduce_vocabulary(reduce, combine)
        ctx.save_for_backward(hidden, weight, bias, log_q, rows, normalizers, divergence)
        ctx.options = options
        return divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, log_q, rows, normalizers, divergence = ctx.saved_tensors
        head = _Head(hidden, weight, bias, ctx.options)
        gradients = _Gradients(ctx.needs_input_grad, head)
        grad_kl = grad_kl / ctx.options.temperature
        for logits, tokens, vocabulary in head.tiles(backward=True):
            slope = head.slope(logits)
            log_p = head.scale(logits).sub_(normalizers[tokens, None])
            p = log_p.exp()
            excess = log_p.sub_(log_q[:, vocabulary].index_select(0, rows[tokens])).sub_(divergence[tokens, None])
            gradients.add(tokens, vocabulary, excess.mul_(p).mul_(grad_kl[tokens, None]), slope)
        return *gradients.total(), None, None, None


class _Head(NamedTuple):
    """Computes the output layer tile by tile."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    options: _Options

    def tiles(self, backward: bool = False) -> Iterator[tuple[Tensor, slice, slice]]:
        """Yield for each tile its logits before the temperature, its slice of tokens and its slice of the vocabulary.

        The logits are a buffer that the caller may overwrite. The inner loop runs over the vocabulary in the forward
        pass, and over the tokens in the backward pass.
        """
        spans = (
            _spans(len(self.hidden), self.options.tile.tokens),
            _spans(len(self.weight), self.options.tile.vocabulary),
        )
        for outer, inner in itertools.product(*(reversed(spans) if backward else spans)):
            rows, vocabulary = (inner, outer) if backward else (outer, inner)
            bias = None if self.bias is None else self.bias[vocabulary]
            logits = _logits(self.hidden[rows], self.weight[vocabulary], bias)
            yield cap_scores(logits, self.options.softcap), rows, vocabulary

    def slope(self, logits: Tensor) -> Tensor | None:
        """Return the derivative of the soft-cap from the logits of a tile; None without a soft-cap."""
        cap = self.options.softcap
        return None if cap is None else (logits / cap).square_().neg_().add_(1)

    def scale(self, logits: Tensor) -> Tensor:
        """Divide logits by the temperature, in place."""
        return logits if self.options.temperature == 1.0 else logits.div_(self.options.temperature)

    def reduce_vocabulary(
        self, reduce: Callable[[Tensor, slice, slice], list[Tensor]], combine: Callable[[Tensor, Tensor], list[Tensor]]
    ) -> list[Tensor]:
        """Reduce the logits of each token over the vocabulary of all ranks; the first result is the logsumexp.

        `reduce(logits, rows, vocabulary)` returns the results of one tile, the logsumexp first. `combine` merges the
        results of several parts of the vocabulary, except the logsumexp. Its arguments are the share of each part in
        the sum of exponentials, (parts, tokens), and the results of all parts, (results, parts, tokens).
        """
        by_rows: dict[int, list[Tensor]] = {}
        for logits, rows, vocabulary in self.tiles():
            by_rows.setdefault(rows.start, []).append(torch.stack(reduce(logits, rows, vocabulary)))
        results = torch.cat([_merge(torch.stack(parts, dim=1), combine) for parts in by_rows.values()], dim=1)
        shard = self.options.shard
        if shard is not None and len(self.hidden):
            gathered = [torch.empty_like(results) for _ in range(dist.get_world_size(shard.group))]
            dist.all_gather(gathered, results, group=shard.group)
            results = _merge(torch.stack(gathered, dim=1), combine)
        return [row.clone() for row in results]  # FSDP2 warns about outputs that are views

    def unclamped_columns(self, targets: Tensor, vocabulary: slice) -> Tensor:
        """Return the column of each target relative to this slice of the vocabulary; it may be out of range."""
        return targets - (vocabulary.start + (0 if self.options.shard is None else self.options.shard.first_row))

    def columns(self, targets: Tensor, vocabulary: slice) -> tuple[Tensor, Tensor | None]:
        """Return columns clamped to this slice of the vocabulary, and a mask of the targets inside it.

        The mask is None if the slice is the whole vocabulary.
        """
        count = vocabulary.stop - vocabulary.start
        if self.options.shard is None and count == len(self.weight):
            return targets, None
        columns = self.unclamped_columns(targets, vocabulary)
        return columns.clamp(0, count - 1), (columns >= 0) & (columns < count)


class _TokenReduction(NamedTuple):
    """Reduces logits to the target logit and, if needed, the entropy and the sum of squares, in this order."""

    head: _Head
    targets: Tensor
    need_entropy: bool
    need_squares: bool

    def reduce(self, logits: Tensor, rows: slice, vocabulary: slice) -> list[Tensor]:
        """Return the logsumexp and the results of a tile, as `reduce_vocabulary` requires; overwrites `logits`."""
        head, targets = self.head, self.targets[rows]
        kernels = _kernels(head)
        if kernels is not None:
            columns = head.unclamped_columns(targets, vocabulary)
            return kernels.reduce_tile(logits, columns, head.options.temperature, self.need_entropy, self.need_squares)
        logits = head.scale(logits)
        columns, inside = head.columns(targets, vocabulary)
        target_logits = logits.gather(1, columns[:, None])[:, 0]
        results = [logits.logsumexp(dim=1), target_logits if inside is None else target_logits.where(inside, 0)]
        if self.need_entropy or self.need_squares:
            log_p = logits.sub_(results[0][:, None])
            p = log_p.exp()
            squares = [torch.linalg.vector_norm(p, dim=1).square_()] if self.need_squares else []
            results += [*([-p.mul_(log_p).sum(dim=1)] if self.need_entropy else []), *squares]
        return results

    def combine(self, shares: Tensor, part_results: Tensor) -> list[Tensor]:
        """Merge the results of several parts of the vocabulary, as `reduce_vocabulary` requires."""
        merged = [part_results[0].sum(dim=0)]
        if self.need_entropy:
            merged.append((shares * part_results[1] + torch.special.entr(shares)).sum(dim=0))
        if self.need_squares:
            merged.append((shares.square() * part_results[-1]).sum(dim=0))
        return merged


class _Gradients:
    """Accumulates the gradients of hidden states, weight and bias over tiles, as far as autograd requires them."""

    def __init__(self, required: Sequence[bool], head: _Head):
        hidden, weight, bias, _ = self._head = head
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        self._hidden = torch.empty_like(hidden, dtype=dtype) if required[0] else None
        self._weight = torch.empty_like(weight) if required[1] else None
        # Weight gradient of the current slice of the vocabulary, accumulated in float32 or wider and rounded once.
        self._sum: Tensor
        self._bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and required[2] else None

    def add(self, rows: slice, vocabulary: slice, grad: Tensor, slope: Tensor | None = None) -> None:
        """Add the logit gradient of a tile, times `slope`. Tiles of one slice of the vocabulary come in token order."""
        hidden, weight, _, _ = self._head
        grad = grad if slope is None else grad.mul_(slope)
        if self._hidden is not None:
            _add_product(self._hidden[rows], grad, weight[vocabulary], is_first=vocabulary.start == 0)
        if self._weight is not None:
            if rows.start == 0:
                target = self._weight[vocabulary]
                self._sum = torch.empty_like(target, dtype=torch.float32) if target.dtype in HALF else target
            _add_product(self._sum, grad.t(), hidden[rows], is_first=rows.start == 0)
            if self._sum.dtype != weight.dtype and rows.stop == len(hidden):
                self._weight[vocabulary] = self._sum
        if self._bias is not None:
            self._bias[vocabulary].add_(grad.sum(dim=0))

    def total(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients in the dtypes of the inputs; that of the hidden states is summed over all ranks."""
        hidden, _, bias, options = self._head
        if self._hidden is not None and options.shard is not None and len(hidden):
            dist.all_reduce(self._hidden, group=options.shard.group)
        grad_hidden = None if self._hidden is None else self._hidden.to(hidden.dtype)
        return grad_hidden, self._weight, None if bias is None or self._bias is None else self._bias.to(bias.dtype)


def _merge(results: Tensor, combine: Callable[[Tensor, Tensor], list[Tensor]]) -> Tensor:
    """Merge the results of several parts of the vocabulary: (results, parts, tokens) -> (results, tokens)."""
    total = results[0].logsumexp(dim=0)
    shares = (results[0] - total).exp()
    return torch.stack([total, *combine(shares, results[1:])])


def _spans(count: int, size: int) -> list[slice]:
    """Split `count` items into slices of at most `size` items. Zero items give one empty slice."""
    return [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]


def _kernels(head: _Head) -> ModuleType | None:
    """Return the module of Triton kernels, or None if they do not support the device, the dtype or a bias."""
    if not supports_triton(head.hidden) or head.hidden.dtype == torch.float64 or head.bias is not None:
        return None
    from camshaft.models.triton import linear_logprob

    return linear_logprob


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the logits (C, V) in float32 or wider, in a new buffer that the caller may overwrite."""
    if _is_half_on_cuda(hidden):
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = torch.mm(hidden, weight.t()).to(torch.promote_types(hidden.dtype, torch.float32))
    return logits if bias is None else logits.add_(bias)


def _add_product(total: Tensor, grad: Tensor, factor: Tensor, is_first: bool) -> None:
    """Add grad @ factor to `total` in the dtype of `total`; the first tile overwrites `total`."""
    if _is_half_on_cuda(factor):
        product = torch.mm(grad.to(factor.dtype), factor, out_dtype=torch.float32)
        total.copy_(product) if is_first else total.add_(product)
    else:
        total.addmm_(grad, factor.to(total.dtype), beta=0 if is_first else 1)


def _is_half_on_cuda(tensor: Tensor) -> bool:
    """Return True if `torch.mm` can return float32 results for these half-precision inputs without rounding."""
    return is_cuda(tensor) and tensor.dtype in HALF
