"""From hidden states to log-probabilities and entropy without ever holding the logits of all tokens.

    log_probs, entropy = linear_logprob(hidden, lm_head.weight, targets, temperature=1.0, need_entropy=True)

The projection on the vocabulary runs over chunks of tokens, forward and again in the backward pass, where the
logits are computed anew. At most a few buffers of chunk x V numbers exist at a time. Used by `packed.py`.

With z = (hidden weight^T + bias) / temperature and p = softmax(z), for the target y of each token:

    log_prob = z_y - logsumexp(z)           d log_prob / dz_v = [v = y] - p_v
    entropy  = - sum_v p_v log p_v          d entropy  / dz_v = - p_v (log p_v + entropy)

Sums run in float32 or in the inputs' dtype, whichever is wider, and so are the results.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from camshaft.errors import EngineError

CPU_CHUNK = 128
CUDA_CHUNK = 1024
"""Tokens per chunk: small ones stay in a CPU's cache, large ones fill an accelerator."""


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    need_entropy: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target and, if wanted, the entropy of its distribution.

    `hidden` (M, H), `weight` (V, H), `bias` (V,) or None, `targets` (M,) int64 -> (M,) and (M,) or None.
    """
    if not temperature > 0:
        raise EngineError(f"temperature={temperature} must be above 0; the log-probs of greedy choices use 1.0")
    if chunk is None:
        chunk = CUDA_CHUNK if hidden.is_cuda else CPU_CHUNK
    return _LinearLogProb.apply(hidden, weight, bias, targets, temperature, need_entropy, chunk)  # pyright: ignore


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        need_entropy: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        normalisers = hidden.new_empty(len(targets), dtype=wide)
        log_probs = torch.empty_like(normalisers)
        entropy = torch.empty_like(normalisers) if need_entropy else None
        for part in _chunks(len(targets), chunk):
            logits = _scaled_logits(hidden[part], weight, bias, temperature)
            chosen = logits.gather(1, targets[part, None])[:, 0]
            normalisers[part] = logits.logsumexp(dim=1)
            log_probs[part] = chosen - normalisers[part]
            if entropy is not None:
                log_p = logits.sub_(normalisers[part, None])
                entropy[part] = -(log_p.exp().mul_(log_p)).sum(dim=1)
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 7
        hidden, weight, bias, targets, normalisers, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = normalisers.dtype
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        for part in _chunks(len(targets), ctx.chunk):
            log_p = _scaled_logits(hidden[part], weight, bias, ctx.temperature).sub_(normalisers[part, None])
            grad = log_p.exp()
            if grad_entropy is not None:
                slope = log_p.add_(entropy[part, None]).mul_(grad_entropy[part, None])
                grad.mul_(slope if grad_log_probs is None else slope.add_(grad_log_probs[part, None])).neg_()
            elif grad_log_probs is not None:
                grad.mul_(-grad_log_probs[part, None])
            if grad_log_probs is not None:
                grad.scatter_add_(1, targets[part, None], grad_log_probs[part, None])
            if ctx.temperature != 1.0:
                grad.div_(ctx.temperature)
            if grad_hidden is not None:
                torch.mm(grad.to(weight.dtype), weight, out=grad_hidden[part])
            if grad_weight is not None:
                _add_product(grad_weight, grad, hidden[part])
            if grad_bias is not None:
                grad_bias.add_(grad.sum(dim=0))
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


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
