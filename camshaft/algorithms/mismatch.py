"""What the generator said of its tokens against what the trainer says of them, and what to do about a difference.

    found = mismatch(old_log_probs, rollout_log_probs, mask, lengths)          # numbers for every step
    weights = importance_weights(old_log_probs, rollout_log_probs, mask, lengths, level="token", threshold=2.0)
    kept = accepted(old_log_probs, rollout_log_probs, mask, lengths, "seq_mean_k3", (0.0, 0.01))

Called by the trainer on all rows of a step, those of every rank, so that means, largest values and effective sample
sizes are those of the whole batch. Tokens are flat, (N,), one row after the other; `lengths` (B,) says how many belong
to each row. What stands outside the mask is never read. Everything is computed in float64 and without a gradient.

With d = log pi_train - log pi_rollout of a sampled token, exp(d) is the weight that makes the rollout's sample one of
the trainer's policy; of a whole row it is exp(sum_t d).
"""

from collections.abc import Callable

import torch
from torch import Tensor

ABOVE = 0.1
"""Rounding of bfloat16 rarely moves a log-prob so far; what does is worth a look."""

BOUND = 20.0
"""Log-weights are clamped to +- this before they are exponentiated: exp(20) is 485 million."""


# -- the report -----------------------------------------------------------------------------------


@torch.no_grad()
def mismatch(train: Tensor, rollout: Tensor, mask: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """How far two computations of the same log-probs are apart. (N,) each, (B,) lengths -> names to scalars:

    log_prob_diff_max        the largest |d| of a counted token
    log_prob_diff_mean       the mean |d|
    log_prob_diff_above_0.1  the share of the counted tokens with |d| > 0.1
    kl_k1                    the mean of -d: KL(rollout || train), unbiased, of either sign
    kl_k3                    the mean of exp(d) - d - 1: the same, never negative; d is clamped to +-20
    effective_sample_share   (sum_i w)^2 / (B sum_i w^2) with w = exp(sum_t d) of each row: 1 if all rows count the
                             same, 1/B if one of them counts for all

    Nothing counted: no difference. k1 and k3: Schulman, "Approximating KL divergence", 2020.
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
    """(sum w)^2 / (n sum w^2) of (n,) weights: the share of the samples that is left once they are weighted."""
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
    """Truncated importance weights, float32, 0 outside the mask. (N,) each, (B,) lengths -> (N,).

    token      w_t = min(exp(d_t), threshold)
    sequence   w_t = min(exp(sum_s d_s), threshold), the same for all tokens of a row

    `normalize` divides by their mean over the counted tokens (over the rows for `sequence`), after the truncation, so
    that the size of the update stays what it was. Truncation bounds the variance and costs a bias towards the rollout's
    policy: Ionides, "Truncated importance sampling", 2008; for generators: Yao et al., "Your efficient RL framework
    secretly brings you off-policy RL training", 2025.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"there are no importance weights per '{level}'; known: token, sequence")
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
    """Near 0 it is d^2 / 2, which exp(d) - 1 would lose to rounding."""
    return torch.expm1(d) - d


_ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}


@torch.no_grad()
def accepted(
    train: Tensor, rollout: Tensor, mask: Tensor, lengths: Tensor, rule: str, bounds: tuple[float, float]
) -> Tensor:
    """The counted tokens that one rule keeps. (N,) each, (B,) lengths -> (N,) bool, false outside the mask.

    `rule` names what is looked at and how much of it: `token` looks at each token alone; `seq_sum`, `seq_mean` and
    `seq_max` look at a row as a whole and keep or reject all of it.

    k1  exp(d), exp(sum d) or exp(mean d) must lie within `bounds`: ratios, 1 where nothing differs
    k2  d^2 / 2             likewise summed, averaged or the largest of a row; at most bounds[1]
    k3  exp(d) - d - 1      the same; never negative, its mean is KL(rollout || train)

    d is clamped to +-20. Masking instead of weighting: Liu et al., "When speed kills stability", 2025.
    """
    scope, _, estimate = rule.rpartition("_")
    if scope not in ("token", "seq_sum", "seq_mean", "seq_max") or estimate not in _ESTIMATES or rule == "seq_max_k1":
        raise ValueError(f"there is no rejection rule '{rule}'; it is token, seq_sum, seq_mean or seq_max with k1..k3")
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
    """d of each counted token, 0 elsewhere, float64."""
    return torch.where(mask, train.double() - rollout.double(), 0)


def _row_sums(x: Tensor, lengths: Tensor) -> Tensor:
    return torch.segment_reduce(x, "sum", lengths=lengths, initial=0, unsafe=True)


def _row_counts(mask: Tensor, lengths: Tensor) -> Tensor:
    return _row_sums(mask.double(), lengths)


def _spread(rows: Tensor, lengths: Tensor) -> Tensor:
    """(B,) values as (N,): each as often as its row has tokens."""
    return torch.repeat_interleave(rows, lengths)
