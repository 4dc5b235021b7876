"""Policy, value, entropy, KL and SFT losses, and their aggregation, which the roles call once per micro-batch.

    counts = Counts.of(mask, ctx)               # mask of a micro-batch, and the ctx that the engine passes to a loss
    loss, metrics = value_loss(values, old_values, returns, counts, cliprange=0.5, mode="token-mean")
    loss = loss - entropy_coeff * entropy_loss(entropy, counts, mode="token-mean")

A loss always receives complete rows, also with sequence parallelism. `policy_losses.py` contains the policy losses
besides the clipped PPO loss, `policy_loss`.

Tensors of tokens are flat: (N,) concatenates the rows of the micro-batch. Values outside the mask are never read, and
their gradient is exactly 0.

Every result, including metrics, is a *share*: it is divided by the counts of the whole mini-batch over all ranks. The
shares of all micro-batches therefore sum to the result of the mini-batch, for any split. No function synchronizes with
the device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from camshaft.algorithms.kl import kl_penalty
from camshaft.algorithms.masked import masked_sum

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


class TokenMask(Protocol):
    """The mask of a micro-batch, such as a `Ragged` with bool values."""

    @property
    def values(self) -> Tensor: ...
    @property
    def device_lengths(self) -> Tensor: ...


@dataclass(frozen=True)
class Counts:
    """Mask and row lengths of a micro-batch, and token and row counts of its mini-batch."""

    mask: Tensor
    """(N,) bool: tokens that contribute to the loss."""
    lengths: Tensor
    """(B,) int64 on the device of the mask: number of tokens per row, with sum N."""
    num_tokens: float
    """Number of masked-in tokens in the mini-batch, over all micro-batches and ranks."""
    num_sequences: float
    """Number of rows in the mini-batch with a masked-in token, or the sum of their weights, over all micro-batches and
    ranks."""
    horizon: float | None = None
    """Divisor of `seq-mean-token-sum-norm`, for example the maximum response length."""
    weights: Tensor | None = None
    """(B,) weights of the rows, with which `num_sequences` counts them, or None if each row has the weight 1. If the
    sequences of one episode are several rows, these are their shares of its masked-in tokens."""

    @classmethod
    def of(
        cls, mask: TokenMask, ctx: Mapping[str, Any], horizon: float | None = None, weights: Tensor | None = None
    ) -> Self:
        """Return the mask of a micro-batch with the counts of its mini-batch, which the engine writes to `ctx`."""
        return cls(mask.values, mask.device_lengths, ctx["num_tokens"], ctx["num_sequences"], horizon, weights)


# -- aggregation --------------------------------------------------------------------------------------


def _token_mean(x: Tensor, counts: Counts) -> Tensor:
    return x.sum() / max(counts.num_tokens, 1)


def _token_sum(x: Tensor, counts: Counts) -> Tensor:
    return x.sum()


def _seq_mean_token_sum(x: Tensor, counts: Counts) -> Tensor:
    return x.sum() / max(counts.num_sequences, 1)


def _seq_mean_token_mean(x: Tensor, counts: Counts) -> Tensor:
    row_means = row_sums(x, counts.lengths) / row_sums(counts.mask.to(x.dtype), counts.lengths).clamp(min=1)
    if counts.weights is not None:
        row_means = row_means * counts.weights.to(row_means.dtype)
    return row_means.sum() / max(counts.num_sequences, 1)


def _seq_mean_token_sum_norm(x: Tensor, counts: Counts) -> Tensor:
    if counts.horizon is None:
        raise ValueError("'seq-mean-token-sum-norm' requires a divisor; pass Counts(..., horizon=...)")
    return _seq_mean_token_sum(x, counts) / counts.horizon


AGGREGATIONS: dict[str, Callable[[Tensor, Counts], Tensor]] = {
    "token-mean": _token_mean,
    "token-sum": _token_sum,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "seq-mean-token-mean": _seq_mean_token_mean,
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
}
"""Aggregation function of each value of `loss_agg_mode`. Its input is already 0 outside the mask.

With mask m, rows i and tokens t of a row:

    token-mean               sum_it m l / num_tokens                     equal weight per token
    token-sum                sum_it m l                                  equal weight, larger for more tokens
    seq-mean-token-sum       sum_it m l / num_sequences                  higher weight for longer rows
    seq-mean-token-mean      sum_i (sum_t m l / sum_t m) / num_sequences equal weight per row
    seq-mean-token-sum-norm  sum_it m l / num_sequences / horizon        seq-mean-token-sum divided by a constant

Rows without a masked-in token have zero weight. With weights w of rows, `seq-mean-token-mean` is the sum of w times the
mean of a row, and `num_sequences` the sum of w. Token means: Yu et al., arXiv:2503.14476; constant horizon: Liu et al.,
arXiv:2503.20783.
"""


def aggregate(per_token: Tensor, counts: Counts, mode: str) -> Tensor:
    """Aggregate token losses l, (N,), to the scalar share of this micro-batch. `AGGREGATIONS` describes the modes."""
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation '{mode}'; use one of {', '.join(AGGREGATIONS)}")
    return AGGREGATIONS[mode](torch.where(counts.mask, per_token, 0), counts)


def row_sums(x: Tensor, lengths: Tensor) -> Tensor:
    """Sum the values of each row, (N,) -> (B,)."""
    # `unsafe` skips the validation of the lengths, which would synchronize with the device.
    return torch.segment_reduce(x, "sum", lengths=lengths, initial=0, unsafe=True)


def share(x: Tensor, counts: Counts) -> Tensor:
    """Compute the share of this micro-batch in the mean of a metric over the masked-in tokens of the mini-batch."""
    return _token_mean(masked_sum(x.detach().float(), counts.mask), counts)


def zero_masked(counts: Counts, *tensors: Tensor) -> list[Tensor]:
    """Return the tensors with 0 outside the mask. Call this before any arithmetic.

    It is not sufficient to mask only the result: if a masked-out value is NaN, its gradient is 0 * NaN = NaN.
    """
    return [torch.where(counts.mask, tensor, 0) for tensor in tensors]


# -- reinforcement learning -------------------------------------------------------------------------


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, counts: Counts, *, cliprange: float, mode: str
) -> LossAndMetrics:
    """Compute the clipped value loss 1/2 max((V - R)^2, (clip(V, V_old +- cliprange) - R)^2), where R is `returns`.

    The tensors are (N,); the loss is a scalar. Metrics (as shares): `vf_clipfrac`, the fraction of tokens where
    clipping increases the loss; `vpred_mean`, the mean of V. Engstrom et al., arXiv:2005.12729.
    """
    values, old_values, returns = zero_masked(counts, values, old_values, returns)
    clipped_values = torch.clamp(values, old_values - cliprange, old_values + cliprange)
    unclipped, clipped = (values - returns).square(), (clipped_values - returns).square()
    metrics = {"vf_clipfrac": share(clipped > unclipped, counts), "vpred_mean": share(values, counts)}
    return aggregate(torch.maximum(unclipped, clipped) / 2, counts, mode), metrics


def entropy_loss(entropy: Tensor, counts: Counts, *, mode: str) -> Tensor:
    """Aggregate the entropy of each token, (N,) -> (). Subtract it from the loss, times a coefficient, as a bonus."""
    return aggregate(entropy, counts, mode)


def kl_loss(log_probs: Tensor, ref_log_probs: Tensor, counts: Counts, *, kind: str, mode: str) -> Tensor:
    """Aggregate the `kl_penalty` of each token, (N,) -> (). GRPO adds it to the loss, times a coefficient.

    The gradient is that of the estimator at the sampled tokens, as in Shao et al., arXiv:2402.03300.
    """
    log_probs, ref_log_probs = zero_masked(counts, log_probs, ref_log_probs)
    return aggregate(kl_penalty(log_probs, ref_log_probs, kind), counts, mode)


def full_kl_loss(full_kl: Tensor, counts: Counts, *, mode: str) -> Tensor:
    """Aggregate the exact KL of each token, (N,) -> (). Add it to the loss like `kl_loss`.

    `full_kl` is sum_v pi(v) (log pi(v) - log pi_ref(v)) over the vocabulary. The gradient is that of the exact
    divergence, without sampling noise.
    """
    return aggregate(full_kl, counts, mode)


# -- supervised ---------------------------------------------------------------------------------------


def sft_loss(log_probs: Tensor, counts: Counts) -> Tensor:
    """Compute the cross-entropy -sum_t m log pi / num_tokens, (N,) -> ()."""
    return aggregate(-log_probs, counts, "token-mean")


# -- policy losses --------------------------------------------------------------------------------


class Clip(NamedTuple):
    """Clip range [1 - low, 1 + high] of the ratio. For A < 0, the dual clip limits the loss to -A dual.

    Some policy losses bound other numbers with `low`, `high` and `dual`, as their docstrings describe.
    """

    low: float
    high: float
    dual: float = 3.0


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    counts: Counts,
    *,
    clip: Clip,
    mode: str,
    weights: Tensor | None = None,
) -> LossAndMetrics:
    """Compute the clipped PPO loss with separate lower and upper clip ranges and a dual clip.

    ratio = exp(log pi - log pi_old), with the difference clamped to +-20
    l     = max(-A ratio, -A clip(ratio, 1 - low, 1 + high));     for A < 0:  l = min(l, -A dual)

    The tensors are (N,); the loss is a scalar. If the samples come from a policy other than pi_old, `weights` are their
    importance weights (`mismatch.py`). They multiply l after clipping and receive no gradient.

    Metrics (as shares): `pg_clipfrac`, the fraction of tokens where clipping increases the loss; `pg_clipfrac_lower`,
    the fraction of tokens where the dual clip decreases the loss; `ppo_kl`, the mean of log pi_old - log pi.
    Schulman et al., arXiv:1707.06347; dual clip: Ye et al., arXiv:1912.09729.
    """
    log_probs, old_log_probs, advantages = zero_masked(counts, log_probs, old_log_probs, advantages)
    difference = (log_probs - old_log_probs).clamp(-20, 20)
    ratio = difference.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    pessimistic = torch.maximum(unclipped, clipped)
    ceiling = -advantages * clip.dual
    per_token = torch.where(advantages < 0, torch.minimum(pessimistic, ceiling), pessimistic)
    metrics = {
        "pg_clipfrac": share(clipped > unclipped, counts),
        "pg_clipfrac_lower": share((advantages < 0) & (pessimistic > ceiling), counts),
        "ppo_kl": share(-difference, counts),
    }
    return aggregate(weighted(per_token, weights, counts), counts, mode), metrics


def weighted(per_token: Tensor, weights: Tensor | None, counts: Counts) -> Tensor:
    """Multiply the losses of the tokens by weights, which receive no gradient. None leaves the losses unchanged."""
    return per_token if weights is None else per_token * zero_masked(counts, weights.detach())[0]
