"""From hidden states to log-probabilities and entropy without ever holding the logits of all tokens.

    log_probs, entropy = linear_logprob(hidden, lm_head.weight, targets, temperature=1.0, need_entropy=True)
    all_of_them = log_distribution(hidden, lm_head.weight, temperature=1.0)     # (M, V), for who cannot do without

The projection on the vocabulary runs over chunks of tokens, forward and again in the backward pass, where the
logits are computed anew. At most a few buffers of chunk x V numbers exist at a time. Used by `packed.py`.

With z = (hidden weight^T + bias) / temperature and p = softmax(z), for the target y of each token:

    log_prob = z_y - logsumexp(z)           d log_prob / dz_v = [v = y] - p_v
    entropy  = - sum_v p_v log p_v          d entropy  / dz_v = - p_v (log p_v + entropy)

Sums run in float32 or in the inputs' dtype, whichever is wider, and so are the results.

With `part=VocabularyPart(group, first_row)` each rank of the group holds some rows of the weight. Ranks tell each
other the logsumexp s_r, the entropy h_r and the target's logit over their own rows, once for all tokens. With
s = logsumexp_r(s_r) and w_r = exp(s_r - s), the entropy is sum_r w_r (h_r - log w_r): no large numbers cancel.
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
    if not temperature > 0:
        raise EngineError(f"temperature={temperature} must be above 0; the log-probs of greedy choices use 1.0")
    if chunk is None:
        chunk = CUDA_CHUNK if hidden.is_cuda else CPU_CHUNK
    how = _How(temperature, need_entropy, chunk, part)
    return _LinearLogProb.apply(hidden, weight, bias, targets, how)  # pyright: ignore[reportReturnType]


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
    need_entropy: bool
    chunk: int
    part: VocabularyPart | None


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: _How
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        normalisers = hidden.new_empty(len(targets), dtype=wide)
        chosen = torch.empty_like(normalisers)
        entropy = torch.empty_like(normalisers) if how.need_entropy else None
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
            normalisers, chosen, entropy = _whole_vocabulary(normalisers, chosen, entropy, how.part.group)
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers, entropy)
        ctx.how = how
        return chosen - normalisers, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 5
        hidden, weight, bias, targets, normalisers, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        how: _How = ctx.how
        wide = normalisers.dtype
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
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
            if how.temperature != 1.0:
                grad.div_(how.temperature)
            if grad_hidden is not None:
                torch.mm(grad.to(weight.dtype), weight, out=grad_hidden[span])
            if grad_weight is not None:
                _add_product(grad_weight, grad, hidden[span])
            if grad_bias is not None:
                grad_bias.add_(grad.sum(dim=0))
        if grad_hidden is not None and how.part is not None and len(targets):
            dist.all_reduce(grad_hidden, group=how.part.group)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None


def _rows_here(targets: Tensor, count: int, part: VocabularyPart | None) -> tuple[Tensor, Tensor | None]:
    """The row of each target among the `count` rows that are here, and where that is one; None: everywhere."""
    if part is None:
        return targets, None
    rows = targets - part.first_row
    return rows.clamp(0, count - 1), (rows >= 0) & (rows < count)


def _whole_vocabulary(
    normalisers: Tensor, chosen: Tensor, entropy: Tensor | None, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor | None]:
    """From what each rank finds over its own rows to the numbers over all of them; see the map above."""
    own = torch.stack([normalisers, chosen] if entropy is None else [normalisers, chosen, entropy])
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    of_ranks = torch.stack(every, dim=1)
    whole = of_ranks[0].logsumexp(dim=0)
    if entropy is not None:
        shares = (of_ranks[0] - whole).exp()
        entropy = (shares * of_ranks[2] + torch.special.entr(shares)).sum(dim=0)
    return whole, of_ranks[1].sum(dim=0), entropy


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
