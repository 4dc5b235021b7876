"""Mismatch between the log-probs of rollout and trainer: statistics, importance weights and rejection.

    metrics = mismatch(old_log_probs, rollout_log_probs, mask, lengths)
    weights = importance_weights(old_log_probs, rollout_log_probs, mask, lengths, level="token", threshold=2.0)
    kept = accepted(old_log_probs, rollout_log_probs, mask, lengths, "seq_mean_k3", (0.0, 0.01))

Called by the trainer on all rows of a step, so that means, maxima and effective sample sizes cover the whole batch.
Tokens are flat, (N,), with rows concatenated; `lengths` (B,) contains the tokens per row. Values outside the mask are
never read. Computation is in float64 and without gradients.

With d = log pi_train - log pi_rollout of a sampled token, exp(d) is the importance weight of the token with respect to
the trainer's policy, and exp(sum_t d) that of a whole row.
"""

from collections.abc import Callable

import torch
from torch import Tensor

ABOVE = 0.1
"""Threshold of `log_prob_diff_above_0.1`; bfloat16 rounding rarely changes a log-prob by this much."""

BOUND = 20.0
"""Log-weights are clamped to +- this before they are exponentiated: exp(20) is 485 million."""


# -- statistics -----------------------------------------------------------------------------------


@torch.no_grad()
def mismatch(train: Tensor, rollout: Tensor, mask: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """Compare two computations of the same log-probs. (N,) each, (B,) lengths -> dict of scalars:

    log_prob_diff_max        maximum |d| of a masked-in token
    log_prob_diff_mean       mean |d|
    log_prob_diff_above_0.1  fraction of masked-in tokens with |d| > 0.1
    kl_k1                    mean of -d: KL(rollout || train), unbiased, can be negative
    kl_k3                    mean of exp(d) - d - 1: the same, non-negative; d is clamped to +-20
    effective_sample_share   (sum_i w)^2 / (B sum_i w^2) with w = exp(sum_t d) of each row: 1 for equal weights, 1/B if
                             one row has all the weight

    An empty mask yields zero difference. k1 and k3: Schulman, "Approximating KL divergence", 2020.
    """
    difference = _differences(train, rollout, mask)
    counted = difference[mask]
    if not len(counted):
        counted = difference.new_zeros(1)
    bounded = counted.clamp(-BOUND, BOUND)
    weights = torch.softmax(_row_sums(difference, lengths), dim=0)
    return {
        "log_prob_diff_max": counted.abs().max(),
        "log_prob_diff_mean": counted.abs().mean(),
        "log_prob_diff_above_0.1": (counted.abs() > ABOVE).double().mean(),
        "kl_k1": -counted.mean(),
        "kl_k3": _k3(bounded).mean(),
        "effective_sample_share": 1 / (weights.square().sum() * len(weights)),
    }


def effective_share(weights: Tensor) -> Tensor:
    """Compute the relative effective sample size (sum w)^2 / (n sum w^2) of (n,) weights."""
    return weights.sum().square() / (weights.square().sum() * len(weights))


# -- weights --------------------------------------------------------------------------------------


@torch.no_grad()
def importance_weights(
    train: Tensor,
    rollout: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    level: str,
    threshold: float,
    normalize: bool = False,
) -> Tensor:
    """Compute truncated importance weights, float32, 0 outside the mask. (N,) each, (B,) lengths -> (N,).

    token      w_t = min(exp(d_t), threshold)
    sequence   w_t = min(exp(sum_s d_s), threshold), the same for all tokens of a row

    `normalize` divides by the mean over masked-in tokens (over rows for `sequence`) after truncation, which preserves
    the scale of the update. Truncation bounds the variance at the cost of a bias towards the rollout policy: Ionides,
    "Truncated importance sampling", 2008; for generators: Yao et al., "Your efficient RL framework secretly brings you
    off-policy RL training", 2025.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"unknown level '{level}' of importance weights; use token or sequence")
    difference = _differences(train, rollout, mask)
    log_weights = difference if level == "token" else _row_sums(difference, lengths)
    weights = log_weights.clamp(-BOUND, BOUND).exp().clamp(max=threshold)
    counted = mask if level == "token" else _row_counts(mask, lengths) > 0
    if normalize and bool(counted.any()):
        weights = weights / weights[counted].mean()
    if level == "sequence":
        weights = _spread(weights, lengths)
    return torch.where(mask, weights, 0).float()


# -- rejection ------------------------------------------------------------------------------------


def _k1(d: Tensor) -> Tensor:
    return -d


def _k2(d: Tensor) -> Tensor:
    return d.square() / 2


def _k3(d: Tensor) -> Tensor:
    """Compute exp(d) - 1 - d with expm1, which is accurate near 0."""
    return torch.expm1(d) - d


_ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}


@torch.no_grad()
def accepted(
    train: Tensor, rollout: Tensor, mask: Tensor, lengths: Tensor, rule: str, bounds: tuple[float, float]
) -> Tensor:
    """Return the tokens that a rejection rule keeps. (N,) each, (B,) lengths -> (N,) bool, False outside the mask.

    `rule` combines a scope and an estimator. Scope `token` tests each token; `seq_sum`, `seq_mean` and `seq_max` test
    the aggregate of a row and keep or reject the whole row.

    k1  exp(d), exp(sum d) or exp(mean d) must be within `bounds`; a ratio, 1 without a difference
    k2  d^2 / 2             per token, or the sum, mean or maximum of a row; at most bounds[1]
    k3  exp(d) - d - 1      the same; non-negative, its mean is KL(rollout || train)

    d is clamped to +-20. Masking instead of weighting: Liu et al., "When speed kills stability", 2025.
    """
    scope, _, estimate = rule.rpartition("_")
    if scope not in ("token", "seq_sum", "seq_mean", "seq_max") or estimate not in _ESTIMATES or rule == "seq_max_k1":
        raise ValueError(f"unknown rejection rule '{rule}'; use token, seq_sum, seq_mean or seq_max with k1, k2 or k3")
    difference = _differences(train, rollout, mask).clamp(-BOUND, BOUND)
    value = _ESTIMATES[estimate](difference)
    if scope == "seq_max":
        value = torch.segment_reduce(value, "max", lengths=lengths, initial=0, unsafe=True)
    elif scope != "token":
        value = _row_sums(value, lengths)
        value = value / _row_counts(mask, lengths).clamp(min=1) if scope == "seq_mean" else value
    low, high = bounds
    ratio = torch.exp(-value)
    kept = (ratio >= low) & (ratio <= high) if estimate == "k1" else value <= high
    return mask & (kept if scope == "token" else _spread(kept, lengths))


def _differences(train: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
    """Compute d of each masked-in token in float64; 0 elsewhere."""
    return torch.where(mask, train.double() - rollout.double(), 0)


def _row_sums(x: Tensor, lengths: Tensor) -> Tensor:
    return torch.segment_reduce(x, "sum", lengths=lengths, initial=0, unsafe=True)


def _row_counts(mask: Tensor, lengths: Tensor) -> Tensor:
    return _row_sums(mask.double(), lengths)


def _spread(rows: Tensor, lengths: Tensor) -> Tensor:
    """Repeat (B,) row values for each token of the row: (N,)."""
    return torch.repeat_interleave(rows, lengths)
