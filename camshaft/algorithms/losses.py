"""Value, entropy, KL and SFT losses, and loss aggregation. Called by the roles once per micro-batch.

    counts = Counts(mask, lengths, num_tokens=ctx["num_tokens"], num_sequences=ctx["num_sequences"])
    loss, metrics = value_loss(values, old_values, returns, counts, cliprange=0.5, mode="token-mean")
    loss = loss - entropy_coeff * entropy_loss(entropy, counts, mode="token-mean")

Policy losses are in `policy.py` and use the aggregation of this module.

Tokens are flat: (N,) concatenates the rows of the micro-batch. Values outside the mask are never read, and their
gradient is exactly 0.

Every result, including metrics, is a *share*: it is divided by the counts of the whole mini-batch over all ranks. The
shares of micro-batches sum to the result of the mini-batch, for any split. No function synchronizes with the device.
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
    """Mask of a micro-batch, and counts of its mini-batch."""

    mask: Tensor
    """(N,) bool: tokens that contribute to the loss."""
    lengths: Tensor
    """(B,) int64, on the device of the mask: tokens per row, which sum to N."""
    num_tokens: float
    """Masked-in tokens of the mini-batch, over all micro-batches and ranks."""
    num_sequences: float
    """Rows of the mini-batch with at least one masked-in token, over all micro-batches and ranks."""
    horizon: float | None = None
    """Divisor of `seq-mean-token-sum-norm`, for example the maximum response length."""


# -- aggregation --------------------------------------------------------------------------------------


def _token_mean(x: Tensor, counts: Counts) -> Tensor:
    return x.sum() / max(counts.num_tokens, 1)


def _seq_mean_token_sum(x: Tensor, counts: Counts) -> Tensor:
    return x.sum() / max(counts.num_sequences, 1)


def _seq_mean_token_mean(x: Tensor, counts: Counts) -> Tensor:
    row_means = row_sums(x, counts.lengths) / row_sums(counts.mask.to(x.dtype), counts.lengths).clamp(min=1)
    return row_means.sum() / max(counts.num_sequences, 1)


def _seq_mean_token_sum_norm(x: Tensor, counts: Counts) -> Tensor:
    if counts.horizon is None:
        raise ValueError("'seq-mean-token-sum-norm' needs a divisor; pass Counts(..., horizon=...)")
    return _seq_mean_token_sum(x, counts) / counts.horizon


AGGREGATIONS: dict[str, Callable[[Tensor, Counts], Tensor]] = {
    "token-mean": _token_mean,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "seq-mean-token-mean": _seq_mean_token_mean,
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
}
"""Values of `loss_agg_mode`; the functions receive values that are already 0 outside the mask."""


def aggregate(per_token: Tensor, counts: Counts, mode: str) -> Tensor:
    """Aggregate token losses to the share of this micro-batch, (N,) -> (); m is the mask, i a row, t its tokens:

    token-mean               sum_it m l / num_tokens                     equal weight per token
    seq-mean-token-sum       sum_it m l / num_sequences                  long rows weigh more
    seq-mean-token-mean      sum_i (sum_t m l / sum_t m) / num_sequences equal weight per row
    seq-mean-token-sum-norm  sum_it m l / num_sequences / horizon        the second, divided by a constant

    Rows without a masked-in token have no weight. Token means: Yu et al., arXiv:2503.14476; constant horizon: Liu et
    al., arXiv:2503.20783.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation '{mode}'; use one of {', '.join(AGGREGATIONS)}")
    return AGGREGATIONS[mode](torch.where(counts.mask, per_token, 0), counts)


def row_sums(x: Tensor, lengths: Tensor) -> Tensor:
    """Sum the tokens of each row: (N,) -> (B,)."""
    # `unsafe` skips a check of the lengths that would synchronize with the device.
    return torch.segment_reduce(x, "sum", lengths=lengths, initial=0, unsafe=True)


def share(x: Tensor, counts: Counts) -> Tensor:
    """Compute the share of a metric that is a mean over the masked-in tokens of the mini-batch."""
    return _token_mean(masked_sum(x.detach().float(), counts.mask), counts)


def zero_masked(counts: Counts, *tensors: Tensor) -> list[Tensor]:
    """Set the tensors to 0 outside the mask, before any arithmetic.

    Masking only the result is not sufficient: 0 times the derivative of a NaN is NaN.
    """
    return [torch.where(counts.mask, tensor, 0) for tensor in tensors]


# -- reinforcement learning -------------------------------------------------------------------------


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, counts: Counts, *, cliprange: float, mode: str
) -> LossAndMetrics:
    """Clipped value loss 1/2 max((V - R)^2, (clip(V, V_old +- cliprange) - R)^2). (N,) each -> (loss (), shares).

    Metrics: `vf_clipfrac`, fraction of tokens where clipping increases the loss; `vpred_mean`, mean of V.
    Engstrom et al., arXiv:2005.12729.
    """
    values, old_values, returns = zero_masked(counts, values, old_values, returns)
    clipped_values = torch.clamp(values, old_values - cliprange, old_values + cliprange)
    unclipped, clipped = (values - returns).square(), (clipped_values - returns).square()
    metrics = {"vf_clipfrac": share(clipped > unclipped, counts), "vpred_mean": share(values, counts)}
    return aggregate(torch.maximum(unclipped, clipped) / 2, counts, mode), metrics


def entropy_loss(entropy: Tensor, counts: Counts, *, mode: str) -> Tensor:
    """Mean entropy, (N,) -> (). Subtract it from the loss with a coefficient as an entropy bonus."""
    return aggregate(entropy, counts, mode)


def kl_loss(log_probs: Tensor, ref_log_probs: Tensor, counts: Counts, *, kind: str, mode: str) -> Tensor:
    """Mean of `kl_penalty`, (N,) each -> (). Add it to the loss with a coefficient (GRPO).

    Its gradient is that of the estimator on the sampled tokens, as in Shao et al., arXiv:2402.03300.
    """
    log_probs, ref_log_probs = zero_masked(counts, log_probs, ref_log_probs)
    return aggregate(kl_penalty(log_probs, ref_log_probs, kind), counts, mode)


def full_kl_loss(full_kl: Tensor, counts: Counts, *, mode: str) -> Tensor:
    """Mean of sum_v pi(v) (log pi(v) - log pi_ref(v)) over the vocabulary, (N,) -> (). Add it like `kl_loss`.

    Its gradient is that of the exact divergence, without sampling noise.
    """
    return aggregate(full_kl, counts, mode)


# -- supervised ---------------------------------------------------------------------------------------


def sft_loss(log_probs: Tensor, counts: Counts) -> Tensor:
    """Cross-entropy, -sum_t m log pi / num_tokens: (N,) -> ()."""
    return aggregate(-log_probs, counts, "token-mean")
