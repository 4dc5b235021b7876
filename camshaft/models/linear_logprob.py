"""From hidden states to log-probabilities, entropy and KL divergence without holding the logits of all tokens.

    log_probs, entropy = linear_logprob(hidden, lm_head.weight, targets, temperature=1.0, need_entropy=True)
    log_q = log_distribution(other_hidden, other_lm_head.weight)                # (M, V), for who cannot do without
    divergence = linear_full_kl(hidden, lm_head.weight, log_q, torch.arange(M))

The projection on the vocabulary runs over chunks of tokens, forward and again in the backward pass, where the
logits are computed anew. At most a few buffers of chunk x V numbers exist at a time. Used by `packed.py`.

With z = (hidden weight^T + bias) / temperature and p = softmax(z), for the target y of each token:

    log_prob = z_y - logsumexp(z)           d log_prob / dz_v = [v = y] - p_v
    entropy  = - sum_v p_v log p_v          d entropy  / dz_v = - p_v (log p_v + entropy)
    full_kl  = sum_v p_v (log p_v - log q_v)        d full_kl / dz_v = p_v (log p_v - log q_v - full_kl)

Sums run in float32 or in the inputs' dtype, whichever is wider, and so are the results.

With `part=VocabularyPart(group, first_row)` each rank of the group holds some rows of the weight. Ranks tell each
other the logsumexp s_r, the target's logit, the entropy h_r and the divergence k_r over their own rows, once for all
tokens. With s = logsumexp_r(s_r) and w_r = exp(s_r - s), the entropy is sum_r w_r (h_r - log w_r), the divergence
sum_r w_r (k_r + log w_r): no large numbers cancel.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from camshaft.errors import EngineError

CPU_CHUNK = 128
CUDA_CHUNK = 1024
"""Tokens per chunk: small ones stay in a CPU's cache, large ones fill an accelerator."""


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
    chunk: int | None = None,
    part: VocabularyPart | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target and, if wanted, the entropy of its distribution.

    `hidden` (M, H), `weight` (V, H), `bias` (V,) or None, `targets` (M,) int64 -> (M,) and (M,) or None.
    With `part` the weight and the bias are this rank's rows, all else is the same on every rank of the group,
    and so is the gradient of `hidden`.
    """
    how = _How.of(hidden, temperature, chunk, part)
    return _LinearLogProb.apply(hidden, weight, bias, targets, need_entropy, how)  # pyright: ignore[reportReturnType]


def linear_full_kl(
    hidden: Tensor,
    weight: Tensor,
    log_q: Tensor,
    rows: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    part: VocabularyPart | None = None,
) -> Tensor:
    """sum_v p(v) (log p(v) - log q(v)) of each token, exactly; the gradient is that of p, and q is constant.

    `hidden` (M, H), `weight` (V, H) and `bias` make p. `log_q` (N, V), whole also with `part`, holds q: of token i in
    row `rows[i]`, `rows` (M,) int64. -> (M,). `part` as in `linear_logprob`.
    """
    how = _How.of(hidden, temperature, chunk, part)
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
    logits = _scaled_logits(hidden, weight, bias, temperature)
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
    chunk: int
    part: VocabularyPart | None

    @classmethod
    def of(cls, hidden: Tensor, temperature: float, chunk: int | None, part: VocabularyPart | None) -> "_How":
        if not temperature > 0:
            raise EngineError(f"temperature={temperature} must be above 0; the log-probs of greedy choices use 1.0")
        return cls(temperature, chunk or (CUDA_CHUNK if hidden.is_cuda else CPU_CHUNK), part)


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, need_entropy: bool, how: _How
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        normalisers = hidden.new_empty(len(targets), dtype=wide)
        chosen = torch.empty_like(normalisers)
        entropy = torch.empty_like(normalisers) if need_entropy else None
        for span in _chunks(len(targets), how.chunk):
            logits = _scaled_logits(hidden[span], weight, bias, how.temperature)
            rows, here = _rows_here(targets[span], len(weight), how.part)
            picked = logits.gather(1, rows[:, None])[:, 0]
            chosen[span] = picked if here is None else picked.where(here, 0)
            normalisers[span] = logits.logsumexp(dim=1)
            if entropy is not None:
                log_p = logits.sub_(normalisers[span, None])
                entropy[span] = -(log_p.exp().mul_(log_p)).sum(dim=1)
        if how.part is not None and len(targets):
            own = [chosen] if entropy is None else [chosen, entropy]
            normalisers, shares, of_ranks = _whole_vocabulary(how.part.group, normalisers, *own)
            chosen = of_ranks[0].sum(dim=0)
            if entropy is not None:
                entropy = (shares * of_ranks[1] + torch.special.entr(shares)).sum(dim=0)
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers, entropy)
        ctx.how = how
        return chosen - normalisers, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 6
        hidden, weight, bias, targets, normalisers, entropy = ctx.saved_tensors
        how: _How = ctx.how
        found = _Gradients(ctx.needs_input_grad, hidden, weight, bias, how)
        for span in _chunks(len(targets), how.chunk):
            log_p = _scaled_logits(hidden[span], weight, bias, how.temperature).sub_(normalisers[span, None])
            grad = log_p.exp()
            if grad_entropy is not None:
                slope = log_p.add_(entropy[span, None]).mul_(grad_entropy[span, None])
                grad.mul_(slope if grad_log_probs is None else slope.add_(grad_log_probs[span, None])).neg_()
            elif grad_log_probs is not None:
                grad.mul_(-grad_log_probs[span, None])
            if grad_log_probs is not None:
                rows, here = _rows_here(targets[span], len(weight), how.part)
                of_target = grad_log_probs[span] if here is None else grad_log_probs[span].where(here, 0)
                grad.scatter_add_(1, rows[:, None], of_target[:, None])
            found.add(span, grad)
        return *found.whole(), None, None, None


class _LinearFullKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, log_q: Tensor, rows: Tensor, how: _How
    ) -> Tensor:
        if how.part is not None:
            log_q = log_q[:, how.part.first_row : how.part.first_row + len(weight)]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        normalisers = hidden.new_empty(len(rows), dtype=wide)
        found = torch.empty_like(normalisers)
        for span in _chunks(len(rows), how.chunk):
            log_p = _scaled_logits(hidden[span], weight, bias, how.temperature)
            normalisers[span] = log_p.logsumexp(dim=1)
            p = log_p.sub_(normalisers[span, None]).exp()
            found[span] = log_p.sub_(log_q.index_select(0, rows[span])).mul_(p).sum(dim=1)
        if how.part is not None and len(rows):
            normalisers, shares, of_ranks = _whole_vocabulary(how.part.group, normalisers, found)
            found = (shares * of_ranks[0] - torch.special.entr(shares)).sum(dim=0)
        ctx.save_for_backward(hidden, weight, bias, log_q, rows, normalisers, found)
        ctx.how = how
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        hidden, weight, bias, log_q, rows, normalisers, divergence = ctx.saved_tensors
        how: _How = ctx.how
        found = _Gradients(ctx.needs_input_grad, hidden, weight, bias, how)
        for span in _chunks(len(rows), how.chunk):
            log_p = _scaled_logits(hidden[span], weight, bias, how.temperature).sub_(normalisers[span, None])
            p = log_p.exp()
            slope = log_p.sub_(log_q.index_select(0, rows[span])).sub_(divergence[span, None])
            found.add(span, slope.mul_(p).mul_(grad_kl[span, None]))
        return *found.whole(), None, None, None


class _Gradients:
    """Of hidden states, weight and bias, those that are wanted: added up from the gradients of scaled logits."""

    def __init__(self, wanted: tuple[bool, ...], hidden: Tensor, weight: Tensor, bias: Tensor | None, how: _How):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self._inputs, self._how = (hidden, weight, bias), how
        self._hidden = torch.empty_like(hidden) if wanted[0] else None
        self._weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        self._bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None

    def add(self, span: slice, grad: Tensor) -> None:
        """Those of a chunk of tokens; `grad` is written into."""
        hidden, weight, _ = self._inputs
        if self._how.temperature != 1.0:
            grad.div_(self._how.temperature)
        if self._hidden is not None:
            torch.mm(grad.to(weight.dtype), weight, out=self._hidden[span])
        if self._weight is not None:
            _add_product(self._weight, grad, hidden[span])
        if self._bias is not None:
            self._bias.add_(grad.sum(dim=0))

    def whole(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of all tokens, and for the hidden states of the whole vocabulary, in the dtypes of the inputs."""
        hidden, weight, bias = self._inputs
        if self._hidden is not None and self._how.part is not None and len(hidden):
            dist.all_reduce(self._hidden, group=self._how.part.group)
        of_weight = None if self._weight is None else self._weight.to(weight.dtype)
        return self._hidden, of_weight, None if bias is None or self._bias is None else self._bias.to(bias.dtype)


def _rows_here(targets: Tensor, count: int, part: VocabularyPart | None) -> tuple[Tensor, Tensor | None]:
    """The row of each target among the `count` rows that are here, and where that is one; None: everywhere."""
    if part is None:
        return targets, None
    rows = targets - part.first_row
    return rows.clamp(0, count - 1), (rows >= 0) & (rows < count)


def _whole_vocabulary(group: dist.ProcessGroup, normalisers: Tensor, *own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of numbers that each rank finds over its own rows: (normalisers of all rows, share of each rank in them, the
    others by rank); see the map above."""
    mine = torch.stack([normalisers, *own])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    of_ranks = torch.stack(every, dim=1)
    whole = of_ranks[0].logsumexp(dim=0)
    return whole, (of_ranks[0] - whole).exp(), of_ranks[1:]


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """(C, V) in float32 or wider: a buffer of our own, so that the caller may write into it."""
    if _half_on_cuda(hidden):
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)  # pyright: ignore[reportCallIssue]
    else:
        logits = torch.mm(hidden, weight.t()).to(torch.promote_types(hidden.dtype, torch.float32))
    if bias is not None:
        logits.add_(bias)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _add_product(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """total (V, H) += grad (C, V)^T hidden (C, H), summed in the dtype of `total`."""
    if _half_on_cuda(hidden):
        total.add_(torch.mm(grad.to(hidden.dtype).t(), hidden, out_dtype=torch.float32))  # pyright: ignore
    else:
        total.addmm_(grad.t(), hidden.to(total.dtype))


def _half_on_cuda(tensor: Tensor) -> bool:
    """Where the matrix product can give float32 from half-precision inputs, with no rounding between."""
    return tensor.is_cuda and tensor.dtype in (torch.float16, torch.bfloat16)
