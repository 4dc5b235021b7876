"""What the optimizer makes small. Called by the roles and the SFT trainer, once per micro-batch.

    counts = Counts(mask, lengths, num_tokens=ctx["num_tokens"], num_sequences=ctx["num_sequences"])
    loss, metrics = value_loss(values, old_values, returns, counts, cliprange=0.5, mode="token-mean")
    loss = loss - entropy_coeff * entropy_loss(entropy, counts, mode="token-mean")

The losses of the policy are in `policy.py`; how tokens become one number is here, for all of them.

Tokens are flat: (N,) of all rows of the micro-batch, one row after the other. What stands outside the mask
is never read, and its gradient is exactly 0.

Every result, metrics included, is a *share*: it is divided by the counts of the whole mini-batch over all
ranks. Shares of micro-batches add up to the result of the mini-batch, however it was cut. Nothing here
waits for the device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from camshaft.algorithms.kl import kl_penalty
from camshaft.algorithms.masked import masked_sum

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class Counts:
    """Which tokens of this micro-batch count, and how many do in the whole mini-batch."""

    mask: Tensor
    """(N,) bool: the tokens that count."""
    lengths: Tensor
    """(B,) int64, on the device of the mask: how many of the N tokens belong to each row."""
    num_tokens: float
    """Counted tokens of the mini-batch, over all micro-batches and ranks."""
    num_sequences: float
    """Rows of the mini-batch with at least one counted token, counted the same way."""
    horizon: float | None = None
    """The constant that `seq-mean-token-sum-norm` divides by: the longest response allowed, say."""


# -- from tokens to one number ------------------------------------------------------------------------


def _token_mean(x: Tensor, counts: Counts) -> Tensor:
    return x.sum() / max(counts.num_tokens, 1)


def _seq_mean_token_sum(x: Tensor, counts: Counts) -> Tensor:
    return x.sum() / max(counts.num_sequences, 1)


def _seq_mean_token_mean(x: Tensor, counts: Counts) -> Tensor:
    row_means = row_sums(x, counts.lengths) / row_sums(counts.mask.to(x.dtype), counts.lengths).clamp(min=1)
    return row_means.sum() / max(counts.num_sequences, 1)


def _seq_mean_token_sum_norm(x: Tensor, counts: Counts) -> Tensor:
    if counts.horizon is None:
        raise ValueError("'seq-mean-token-sum-norm' divides by a constant; give it as Counts(..., horizon=...)")
    return _seq_mean_token_sum(x, counts) / counts.horizon


AGGREGATIONS: dict[str, Callable[[Tensor, Counts], Tensor]] = {
    "token-mean": _token_mean,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "seq-mean-token-mean": _seq_mean_token_mean,
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
}
"""By the name that `loss_agg_mode` takes; the values are already 0 outside the mask."""


def aggregate(per_token: Tensor, counts: Counts, mode: str) -> Tensor:
    """The share of this micro-batch: (N,) -> (). With m the mask, i a row, t its tokens:

    token-mean               sum_it m l / num_tokens                     every token weighs the same
    seq-mean-token-sum       sum_it m l / num_sequences                  a long row weighs more
    seq-mean-token-mean      sum_i (sum_t m l / sum_t m) / num_sequences every row weighs the same
    seq-mean-token-sum-norm  sum_it m l / num_sequences / horizon        as the second, on the scale of the first

    Rows without a counted token weigh nothing. Token means: Yu et al., arXiv:2503.14476; the constant
    horizon: Liu et al., arXiv:2503.20783.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"there is no aggregation '{mode}'; known: {', '.join(AGGREGATIONS)}")
    return AGGREGATIONS[mode](torch.where(counts.mask, per_token, 0), counts)


def row_sums(x: Tensor, lengths: Tensor) -> Tensor:
    """(N,) -> (B,)."""
    # `unsafe` leaves out a check of the lengths that would wait for the device.
    return torch.segment_reduce(x, "sum", lengths=lengths, initial=0, unsafe=True)


def share(x: Tensor, counts: Counts) -> Tensor:
    """A metric: the mean over the counted tokens of the mini-batch, this micro-batch's part of it."""
    return _token_mean(masked_sum(x.detach().float(), counts.mask), counts)


def known(counts: Counts, *tensors: Tensor) -> list[Tensor]:
    """The tensors with 0 at tokens that do not count, before any arithmetic.

    Masking the result alone is not enough: 0 times the derivative of a NaN is a NaN.
    """
    return [torch.where(counts.mask, tensor, 0) for tensor in tensors]


# -- reinforcement learning -------------------------------------------------------------------------


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, counts: Counts, *, cliprange: float, mode: str
) -> LossAndMetrics:
    """The critic's: 1/2 max((V - R)^2, (clip(V, V_old +- cliprange) - R)^2). (N,) each -> (loss (), shares).

    Metrics: `vf_clipfrac`, tokens where the clip raised the loss; `vpred_mean`, the mean of V.
    The value is clipped as the policy is: Engstrom et al., arXiv:2005.12729.
    """
    values, old_values, returns = known(counts, values, old_values, returns)
    near = torch.clamp(values, old_values - cliprange, old_values + cliprange)
    plain, clipped = (values - returns).square(), (near - returns).square()
    metrics = {"vf_clipfrac": share(clipped > plain, counts), "vpred_mean": share(values, counts)}
    return aggregate(torch.maximum(plain, clipped) / 2, counts, mode), metrics


def entropy_loss(entropy: Tensor, counts: Counts, *, mode: str) -> Tensor:
    """The mean entropy, (N,) -> (). It is a good thing: subtract it, times a coefficient, from the loss."""
    return aggregate(entropy, counts, mode)


def kl_loss(log_probs: Tensor, ref_log_probs: Tensor, counts: Counts, *, kind: str, mode: str) -> Tensor:
    """The mean of `kl_penalty`, (N,) each -> (), to be added to the loss with a coefficient (GRPO).

    Its gradient is that of the estimator on the tokens sampled, as in Shao et al., arXiv:2402.03300.
    """
    log_probs, ref_log_probs = known(counts, log_probs, ref_log_probs)
    return aggregate(kl_penalty(log_probs, ref_log_probs, kind), counts, mode)


def full_kl_loss(full_kl: Tensor, counts: Counts, *, mode: str) -> Tensor:
    """The mean of sum_v pi(v) (log pi(v) - log pi_ref(v)) over the vocabulary, (N,) -> (), to be added as `kl_loss`.

    Its gradient is the divergence's own, without the noise of the tokens sampled.
    """
    return aggregate(full_kl, counts, mode)


# -- supervised ---------------------------------------------------------------------------------------


def sft_loss(log_probs: Tensor, counts: Counts) -> Tensor:
    """Cross-entropy, -sum_t m log pi / num_tokens: (N,) -> ()."""
    return aggregate(-log_probs, counts, "token-mean")
