"""From hidden states to log-probabilities, entropy and KL divergence without holding the logits of all tokens.

    log_probs, entropy = linear_logprob(hidden, lm_head.weight, targets, temperature=1.0, need_entropy=True)
    log_q = log_distribution(other_hidden, other_lm_head.weight)                # (M, V), for who cannot do without
    divergence = linear_full_kl(hidden, lm_head.weight, log_q, torch.arange(M))

The projection on the vocabulary runs over tiles, some tokens by some words, forward and again in the backward pass,
where the logits are computed anew. At most a few buffers of the size of a tile exist at a time, and that size does not
depend on the vocabulary. On a GPU the operators on a tile are one
kernel each (`triton/linear_logprob.py`). Used by `packed.py`.

With z = (hidden weight^T + bias) / temperature and p = softmax(z), for the target y of each token:

    log_prob = z_y - logsumexp(z)           d log_prob / dz_v = [v = y] - p_v
    entropy  = - sum_v p_v log p_v          d entropy  / dz_v = - p_v (log p_v + entropy)
    full_kl  = sum_v p_v (log p_v - log q_v)        d full_kl / dz_v = p_v (log p_v - log q_v - full_kl)

Sums run in float32 or in the inputs' dtype, whichever is wider, and so are the results.

A part r of the vocabulary gives its own logsumexp s_r, the target's logit, and with p normalised over the part alone
the entropy h_r and the divergence k_r. With s = logsumexp_r(s_r) and w_r = exp(s_r - s), the entropy is
sum_r w_r (h_r - log w_r), the divergence sum_r w_r (k_r + log w_r): no large numbers cancel. So a token's tiles are put
together; and with `part=VocabularyPart(group, first_row)`, where each rank of the group holds some rows of the weight,
so are the ranks, which tell each other these numbers once for all tokens.
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

from camshaft.device import takes_triton
from camshaft.errors import EngineError

HALF = (torch.float16, torch.bfloat16)


class Tile(NamedTuple):
    """Tokens and words of the vocabulary whose logits exist at a time."""

    tokens: int
    words: int

    @classmethod
    def of(cls, hidden: Tensor) -> "Tile":
        """A small one stays in a CPU's cache, a large one fills an accelerator (its size is chosen, not measured). Few
        tokens meet more words at once."""
        most, numbers = (8192, 1 << 26) if hidden.is_cuda else (2048, 1 << 20)
        tokens = min(most, max(1, len(hidden)))
        return cls(tokens, numbers // tokens)


@dataclass(frozen=True)
class VocabularyPart:
    """Which rows of the projection this rank holds: those from `first_row` on, of the whole in `group`."""

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
    """Log-prob of each target and, if wanted, the entropy of its distribution.

    `hidden` (M, H), `weight` (V, H), `bias` (V,) or None, `targets` (M,) int64 -> (M,) and (M,) or None.
    With `part` the weight and the bias are this rank's rows, all else is the same on every rank of the group,
    and so is the gradient of `hidden`.
    """
    how = _How.of(hidden, temperature, tile, part)
    return _LinearLogProb.apply(hidden, weight, bias, targets, need_entropy, how)  # pyright: ignore[reportReturnType]


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
    """sum_v p(v) (log p(v) - log q(v)) of each token, exactly; the gradient is that of p, and q is constant.

    `hidden` (M, H), `weight` (V, H) and `bias` make p. `log_q` (N, V), whole also with `part`, holds q: of token i in
    row `rows[i]`, `rows` (M,) int64. -> (M,). `part` as in `linear_logprob`.
    """
    how = _How.of(hidden, temperature, tile, part)
    return _LinearFullKL.apply(hidden, weight, bias, log_q, rows, how)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def log_distribution(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    part: VocabularyPart | None = None,
) -> Tensor:
    """(M, V): the log-prob of every word of the vocabulary, without gradient. With `part`, on every rank of it."""
    logits = _logits(hidden, weight, bias)
    if temperature != 1.0:
        logits.div_(temperature)
    if part is not None and len(hidden):
        logits = _all_rows(logits.t(), part.group).t()
    return logits.log_softmax(dim=1)


def _all_rows(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks below each other; they may have different numbers of them."""
    ranks = dist.get_world_size(group)
    counts = [torch.zeros(1, dtype=torch.int64, device=own.device) for _ in range(ranks)]
    dist.all_gather(counts, torch.tensor([len(own)], device=own.device), group=group)
    sizes = [int(count) for count in counts]
    filled = own.new_zeros((max(sizes), *own.shape[1:]))
    filled[: len(own)] = own
    every = [torch.empty_like(filled) for _ in sizes]
    dist.all_gather(every, filled, group=group)
    return torch.cat([rows[:size] for rows, size in zip(every, sizes, strict=True)])


class _How(NamedTuple):
    temperature: float
    tile: Tile
    part: VocabularyPart | None

    @classmethod
    def of(cls, hidden: Tensor, temperature: float, tile: Tile | None, part: VocabularyPart | None) -> "_How":
        if not temperature > 0:
            raise EngineError(f"temperature={temperature} must be above 0; the log-probs of greedy choices use 1.0")
        return cls(temperature, tile or Tile.of(hidden), part)


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, need_entropy: bool, how: _How
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        head = _Head(hidden, weight, bias, how)
        kernels = _kernels(head)

        def look(logits: Tensor, rows: slice, words: slice) -> list[Tensor]:
            if kernels is not None:
                return kernels.looked(logits, head.places(targets[rows], words), how.temperature, need_entropy)
            logits = head.scaled(logits)
            columns, here = head.columns(targets[rows], words)
            picked = logits.gather(1, columns[:, None])[:, 0]
            found = [logits.logsumexp(dim=1), picked if here is None else picked.where(here, 0)]
            if need_entropy:
                log_p = logits.sub_(found[0][:, None])
                found.append(-(log_p.exp().mul_(log_p)).sum(dim=1))
            return found

        def together(shares: Tensor, of_parts: Tensor) -> list[Tensor]:
            chosen = of_parts[0].sum(dim=0)
            return [chosen, *((shares * h + torch.special.entr(shares)).sum(dim=0) for h in of_parts[1:])]

        normalisers, chosen, *rest = head.over_vocabulary(look, together)
        entropy = rest[0] if need_entropy else None
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers, entropy)
        ctx.how = how
        return chosen - normalisers, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 6
        hidden, weight, bias, targets, normalisers, entropy = ctx.saved_tensors
        head = _Head(hidden, weight, bias, ctx.how)
        kernels = _kernels(head)
        found = _Gradients(ctx.needs_input_grad, head)
        told = [None if each is None else each / ctx.how.temperature for each in (grad_log_probs, grad_entropy)]
        for logits, rows, words in head.tiles(backward=True):
            of_rows = normalisers[rows], *(None if each is None else each[rows] for each in (entropy, *told))
            if kernels is not None:
                places = head.places(targets[rows], words)
                found.add(rows, words, kernels.slopes(logits, places, *of_rows, ctx.how.temperature, weight.dtype))
            else:
                columns = head.columns(targets[rows], words)
                found.add(rows, words, _slopes(head.scaled(logits), *columns, *of_rows))
        return *found.whole(), None, None, None


def _slopes(
    logits: Tensor,
    columns: Tensor,
    here: Tensor | None,
    normalisers: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """The gradient of a tile's scaled logits, in their place."""
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
        of_target = grad_log_probs if here is None else grad_log_probs.where(here, 0)
        grad.scatter_add_(1, columns[:, None], of_target[:, None])
    return grad


class _LinearFullKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, log_q: Tensor, rows: Tensor, how: _How
    ) -> Tensor:
        if how.part is not None:
            log_q = log_q[:, how.part.first_row : how.part.first_row + len(weight)]

        head = _Head(hidden, weight, bias, how)

        def look(logits: Tensor, tokens: slice, words: slice) -> list[Tensor]:
            logits = head.scaled(logits)
            normalisers = logits.logsumexp(dim=1)
            p = logits.sub_(normalisers[:, None]).exp()
            return [normalisers, logits.sub_(log_q[:, words].index_select(0, rows[tokens])).mul_(p).sum(dim=1)]

        def together(shares: Tensor, of_parts: Tensor) -> list[Tensor]:
            return [(shares * of_parts[0] - torch.special.entr(shares)).sum(dim=0)]

        normalisers, found = head.over_vocabulary(look, together)
        ctx.save_for_backward(hidden, weight, bias, log_q, rows, normalisers, found)
        ctx.how = how
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        hidden, weight, bias, log_q, rows, normalisers, divergence = ctx.saved_tensors
        head = _Head(hidden, weight, bias, ctx.how)
        found = _Gradients(ctx.needs_input_grad, head)
        grad_kl = grad_kl / ctx.how.temperature
        for logits, tokens, words in head.tiles(backward=True):
            log_p = head.scaled(logits).sub_(normalisers[tokens, None])
            p = log_p.exp()
            slope = log_p.sub_(log_q[:, words].index_select(0, rows[tokens])).sub_(divergence[tokens, None])
            found.add(tokens, words, slope.mul_(p).mul_(grad_kl[tokens, None]))
        return *found.whole(), None, None, None


class _Head(NamedTuple):
    """The projection on the vocabulary, a tile at a time."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    how: _How

    def tiles(self, backward: bool = False) -> Iterator[tuple[Tensor, slice, slice]]:
        """The logits of each tile before the temperature, a buffer that may be written into; its tokens; its words.
        Forward all words of some tokens come after each other, backward all tokens of some words."""
        spans = _spans(len(self.hidden), self.how.tile.tokens), _spans(len(self.weight), self.how.tile.words)
        for one, other in itertools.product(*(reversed(spans) if backward else spans)):
            rows, words = (other, one) if backward else (one, other)
            bias = None if self.bias is None else self.bias[words]
            yield _logits(self.hidden[rows], self.weight[words], bias), rows, words

    def scaled(self, logits: Tensor) -> Tensor:
        """In place."""
        return logits if self.how.temperature == 1.0 else logits.div_(self.how.temperature)

    def over_vocabulary(
        self,
        look: Callable[[Tensor, slice, slice], list[Tensor]],
        together: Callable[[Tensor, Tensor], list[Tensor]],
    ) -> list[Tensor]:
        """Numbers of each token over all words, those of all ranks: first the logsumexp.

        `look` finds them in a tile; `together` makes one of the parts' others, (numbers, parts, tokens), with the share
        of each part in the sum of exponentials, (parts, tokens).
        """
        by_rows: dict[int, list[Tensor]] = {}
        for logits, rows, words in self.tiles():
            by_rows.setdefault(rows.start, []).append(torch.stack(look(logits, rows, words)))
        found = torch.cat([_mixed(torch.stack(parts, dim=1), together) for parts in by_rows.values()], dim=1)
        part = self.how.part
        if part is not None and len(self.hidden):
            every = [torch.empty_like(found) for _ in range(dist.get_world_size(part.group))]
            dist.all_gather(every, found, group=part.group)
            found = _mixed(torch.stack(every, dim=1), together)
        return list(found)

    def places(self, targets: Tensor, words: slice) -> Tensor:
        """The column of each target among these words of this rank; below 0 or too large where there is none."""
        return targets - (words.start + (0 if self.how.part is None else self.how.part.first_row))

    def columns(self, targets: Tensor, words: slice) -> tuple[Tensor, Tensor | None]:
        """The same, some column where there is none; and where there is one, None: everywhere."""
        count = words.stop - words.start
        if self.how.part is None and count == len(self.weight):
            return targets, None
        columns = self.places(targets, words)
        return columns.clamp(0, count - 1), (columns >= 0) & (columns < count)


class _Gradients:
    """Of hidden states, weight and bias, those that are wanted: added up from the gradients of logits."""

    def __init__(self, wanted: Sequence[bool], head: _Head):
        hidden, weight, bias, _ = self._head = head
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self._hidden = torch.empty_like(hidden, dtype=wide) if wanted[0] else None
        self._weight = torch.empty_like(weight) if wanted[1] else None
        self._sum: Tensor  # of the rows of the weight that a tile has: added up in float32 or wider, rounded once
        self._bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None

    def add(self, rows: slice, words: slice, grad: Tensor) -> None:
        """Those of a tile, after those of all earlier tokens with the same words."""
        hidden, weight, _, _ = self._head
        if self._hidden is not None:
            _add_product(self._hidden[rows], grad, weight[words], first=words.start == 0)
        if self._weight is not None:
            if rows.start == 0:
                found = self._weight[words]
                self._sum = torch.empty_like(found, dtype=torch.float32) if found.dtype in HALF else found
            _add_product(self._sum, grad.t(), hidden[rows], first=rows.start == 0)
            if self._sum.dtype != weight.dtype and rows.stop == len(hidden):
                self._weight[words] = self._sum
        if self._bias is not None:
            self._bias[words].add_(grad.sum(dim=0))

    def whole(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of all tokens, and for the hidden states of the whole vocabulary, in the dtypes of the inputs."""
        hidden, _, bias, how = self._head
        if self._hidden is not None and how.part is not None and len(hidden):
            dist.all_reduce(self._hidden, group=how.part.group)
        of_hidden = None if self._hidden is None else self._hidden.to(hidden.dtype)
        return of_hidden, self._weight, None if bias is None or self._bias is None else self._bias.to(bias.dtype)


def _mixed(numbers: Tensor, together: Callable[[Tensor, Tensor], list[Tensor]]) -> Tensor:
    """(numbers, parts, tokens) of parts of the vocabulary -> (numbers, tokens) of all of them; see the map above."""
    whole = numbers[0].logsumexp(dim=0)
    shares = (numbers[0] - whole).exp()
    return torch.stack([whole, *together(shares, numbers[1:])])


def _spans(count: int, size: int) -> list[slice]:
    """At least one, if it is empty."""
    return [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]


def _kernels(head: _Head) -> ModuleType | None:
    """Those of Triton on a GPU, for all but float64 and an output head with a bias."""
    if not takes_triton(head.hidden) or head.hidden.dtype == torch.float64 or head.bias is not None:
        return None
    from camshaft.models.triton import linear_logprob

    return linear_logprob


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(C, V) in float32 or wider: a buffer of our own, so that the caller may write into it."""
    if _half_on_cuda(hidden):
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)  # pyright: ignore[reportCallIssue]
    else:
        logits = torch.mm(hidden, weight.t()).to(torch.promote_types(hidden.dtype, torch.float32))
    return logits if bias is None else logits.add_(bias)


def _add_product(total: Tensor, grad: Tensor, factor: Tensor, first: bool) -> None:
    """total = grad @ factor where it is the first, else total += that; summed in the dtype of `total`."""
    if _half_on_cuda(factor):
        found = torch.mm(grad.to(factor.dtype), factor, out_dtype=torch.float32)  # pyright: ignore[reportCallIssue]
        total.copy_(found) if first else total.add_(found)
    else:
        total.addmm_(grad, factor.to(total.dtype), beta=0 if first else 1)


def _half_on_cuda(tensor: Tensor) -> bool:
    """Where the matrix product can give float32 from half-precision inputs, with no rounding between."""
    return tensor.is_cuda and tensor.dtype in HALF
