"""Mismatch between the log-probs of rollout and trainer: statistics, importance weights and rejection rules.

    metrics = mismatch(old_log_probs, rollout_log_probs, mask, lengths)
    weights = importance_weights(old_log_probs, rollout_log_probs, mask, lengths, level="token", threshold=2.0)
    mask = accept_tokens(old_log_probs, rollout_log_probs, mask, lengths, "seq_mean_k3", (0.0, 0.01))

The trainer calls these functions with all rows of a step, so means, maxima and effective sample sizes cover the whole
batch. In bypass mode, the actor calls `importance_weights` and `accept_tokens` with the rows of a micro-batch. Tensors
of tokens are flat: (N,) concatenates the rows, and `lengths` (B,) is the number of tokens per row. Values outside the
mask are never read. All functions compute in float64 and without gradients.

Let d = log pi_train - log pi_rollout for a sampled token. Then exp(d) is the importance weight of the token with
respect to the trainer's policy, and exp(sum_t d) is that of a whole row.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from camshaft.algorithms.losses import row_sums

LARGE_DIFFERENCE = 0.1
"""Threshold of `log_prob_diff_above_0.1`. Rounding to bfloat16 rarely changes a log-prob by this much."""

MAX_LOG_WEIGHT = 20.0
"""Log-weights are clamped to +-20 before they are exponentiated; exp(20) is 485 million."""


# -- statistics -----------------------------------------------------------------------------------


@torch.no_grad()
def mismatch(train: Tensor, rollout: Tensor, mask: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """Compute statistics of the difference between two computations of the same log-probs:

    log_prob_diff_max        maximum |d| of a masked-in token
    log_prob_diff_mean       mean |d|
    log_prob_diff_above_0.1  fraction of masked-in tokens with |d| > 0.1
    kl_k1                    mean of -d, an unbiased estimate of KL(rollout || train) that can be negative
    kl_k3                    mean of exp(d) - d - 1, a non-negative estimate of the same; d is clamped to +-20
    effective_sample_share   (sum_i w)^2 / (B sum_i w^2) with the weights w = exp(sum_t d) of the B rows with masked-in
                             tokens: 1 for equal weights, 1/B if all the weight is on one row

    Each value is a scalar tensor. An empty mask gives the values of identical log-probs. k1 and k3: Schulman,
    "Approximating KL divergence", 2020.
    """
    difference = _differences(train, rollout, mask)
    masked_in = difference[mask]
    if not len(masked_in):
        masked_in = difference.new_zeros(1)
    clamped = masked_in.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    has_tokens = _row_counts(mask, lengths) > 0
    weights = torch.softmax(row_sums(difference, lengths)[has_tokens], dim=0)
    return {
        "log_prob_diff_max": masked_in.abs().max(),
        "log_prob_diff_mean": masked_in.abs().mean(),
        "log_prob_diff_above_0.1": (masked_in.abs() > LARGE_DIFFERENCE).double().mean(),
        "kl_k1": -masked_in.mean(),
        "kl_k3": _k3(clamped).mean(),
        "effective_sample_share": 1 / (weights.square().sum() * len(weights)) if len(weights) else weights.new_ones(()),
    }


@torch.no_grad()
def off_policy_diagnostics(train: Tensor, rollout: Tensor, mask: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """Compute diagnostics of training with samples of another policy.

    The log-perplexity of a row is the mean of -log pi over its masked-in tokens, and D is the log-perplexity under the
    trainer minus that under the rollout, which is the mean of -d. With means over the rows that have masked-in tokens:

    training_log_ppl, rollout_log_ppl    mean log-perplexity
    training_ppl, rollout_ppl            mean of its exponential
    log_ppl_diff, log_ppl_abs_diff       mean of D and of |D|
    log_ppl_diff_max, log_ppl_diff_min   largest and smallest D
    ppl_ratio                            mean of exp(D)
    chi2_token                           mean over tokens of exp(d)^2, minus 1
    chi2_seq                             mean over rows of exp(sum_t d)^2, minus 1

    The last two estimate the chi-squared divergence of the trainer's policy from that of the rollout, which is the
    variance of the importance weights; d and sum_t d are clamped to +-20. An empty mask gives no diagnostics.
    """
    difference, counts = _differences(train, rollout, mask), _row_counts(mask, lengths)
    has_tokens = counts > 0
    if not has_tokens.any():
        return {}
    policies = {"training": train, "rollout": rollout}
    log_ppl = {
        name: (-row_sums(torch.where(mask, column.double(), 0), lengths) / counts.clamp(min=1))[has_tokens]
        for name, column in policies.items()
    }
    gap = log_ppl["training"] - log_ppl["rollout"]
    tokens = difference[mask].clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    rows = row_sums(difference, lengths)[has_tokens].clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    return {
        **{f"{name}_log_ppl": value.mean() for name, value in log_ppl.items()},
        **{f"{name}_ppl": value.exp().mean() for name, value in log_ppl.items()},
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": gap.abs().mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": gap.exp().mean(),
        "chi2_token": torch.expm1(2 * tokens).mean(),
        "chi2_seq": torch.expm1(2 * rows).mean(),
    }


def effective_sample_share(weights: Tensor) -> Tensor:
    """Compute the effective sample size of (n,) weights as a fraction of n: (sum w)^2 / (n sum w^2)."""
    return weights.sum().square() / (weights.square().sum() * len(weights))


# -- the policy before the update ------------------------------------------------------------------


@torch.no_grad()
def interpolated_log_probs(train: Tensor, rollout: Tensor, ages: Tensor) -> Tensor:
    """Approximate the log-probs of the policy before the update of a stale batch, (N,), between the two that are known:

    log pi_prox = (1 - alpha) log pi_rollout + alpha log pi,   alpha = age / (age + 1)

    With version v of the weights that sampled a token, step b trains version b - 1 and leads to version b. log pi is
    assumed to be linear in the version from v to b, so alpha = (b - 1 - v) / (b - v), and `ages`, (N,) integers, are
    b - 1 - v. A token of age 0 was sampled by the policy before the update: alpha = 0. `train` has the log-probs of the
    current policy. AReaL calls this `prox_logp_method=loglinear`; it saves a forward pass.
    """
    share = ages / (ages + 1)
    return rollout + share * (train - rollout)


# -- importance weights --------------------------------------------------------------------------------------


@torch.no_grad()
def importance_weights(
    train: Tensor,
    rollout: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    level: str,
    threshold: float,
    lower: float = 0.0,
    normalize: bool = False,
) -> Tensor:
    """Compute bounded importance weights, (N,) float32 and 0 outside the mask:

    token      w_t = min(exp(d_t), threshold)
    sequence   w_t = min(exp(sum_s d_s), threshold), equal for all tokens of a row

    With `lower` above 0, weights outside [lower, threshold] are 0 instead of truncated (IcePop). Such tokens or rows do
    not contribute, but remain in the counts of the loss.

    `normalize` divides the weights by `mean_importance_weight`, which preserves the scale of the update. Truncation
    bounds the variance at the cost of a bias towards the rollout policy: Ionides, "Truncated importance sampling",
    2008. Yao et al. apply it to rollout engines in "Your efficient RL framework secretly brings you off-policy RL
    training", 2025. IcePop: Ling Team, "Every step evolves", arXiv:2510.18855.
    """
    weights, has_weight = _bounded_weights(train, rollout, mask, lengths, level, threshold, lower)
    if normalize:
        weights = weights / _mean(weights[has_weight])
    if level == "sequence":
        weights = torch.repeat_interleave(weights, lengths, output_size=len(mask))
    return torch.where(mask, weights, 0).float()


@torch.no_grad()
def mean_importance_weight(
    train: Tensor,
    rollout: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    level: str,
    threshold: float,
    lower: float = 0.0,
) -> Tensor:
    """Compute the mean of `importance_weights` over masked-in tokens (over rows for `sequence`), a scalar.

    It is 1 if there are no weights, or if all of them are 0.
    """
    weights, has_weight = _bounded_weights(train, rollout, mask, lengths, level, threshold, lower)
    return _mean(weights[has_weight])


def _bounded_weights(
    train: Tensor, rollout: Tensor, mask: Tensor, lengths: Tensor, level: str, threshold: float, lower: float
) -> tuple[Tensor, Tensor]:
    """Return the weights of the tokens or rows, and a mask of those that exist."""
    if level not in ("token", "sequence"):
        raise ValueError(f"unknown importance-weight level '{level}'; use token or sequence")
    difference = _differences(train, rollout, mask)
    log_weights = difference if level == "token" else row_sums(difference, lengths)
    weights = log_weights.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
    if lower > 0:
        weights = torch.where((weights >= lower) & (weights <= threshold), weights, 0)
    else:
        weights = weights.clamp(max=threshold)
    return weights, mask if level == "token" else _row_counts(mask, lengths) > 0


def _mean(weights: Tensor) -> Tensor:
    mean = weights.mean()
    return torch.where(mean > 0, mean, 1)  # a mean of no weights is NaN


# -- rejection ------------------------------------------------------------------------------------


def _k3(d: Tensor) -> Tensor:
    """Compute exp(d) - 1 - d with expm1, which is accurate for d near 0."""
    return torch.expm1(d) - d


_ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {"k1": torch.neg, "k2": lambda d: d.square() / 2, "k3": _k3}


@torch.no_grad()
def accept_tokens(
    train: Tensor, rollout: Tensor, mask: Tensor, lengths: Tensor, rule: str, bounds: tuple[float, float]
) -> Tensor:
    """Return the mask, (N,) bool, of the masked-in tokens that a rejection rule accepts.

    `rule` joins a scope and an estimator, as in `seq_mean_k3`. The scope `token` tests each token. The scopes
    `seq_sum`, `seq_mean` and `seq_max` test the sum, mean or maximum over a row, and accept or reject the whole row.

    k1  accepts if the importance weight exp(d), exp(sum d) or exp(mean d) is within `bounds`; not for `seq_max`
    k2  accepts if d^2 / 2, or its aggregate over the row, is at most bounds[1]
    k3  accepts if exp(d) - d - 1, or its aggregate over the row, is at most bounds[1]; the mean estimates
        KL(rollout || train)

    d is clamped to +-20. Rejection instead of weighting: Liu et al., "When speed kills stability", 2025.
    """
    scope, _, estimate = rule.rpartition("_")
    if scope not in ("token", "seq_sum", "seq_mean", "seq_max") or estimate not in _ESTIMATES or rule == "seq_max_k1":
        raise ValueError(f"unknown rejection rule '{rule}'; use token, seq_sum, seq_mean or seq_max with k1, k2 or k3")
    difference = _differences(train, rollout, mask).clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    value = _ESTIMATES[estimate](difference)
    if scope == "seq_max":
        value = torch.segment_reduce(value, "max", lengths=lengths, initial=0, unsafe=True)
    elif scope != "token":
        value = row_sums(value, lengths)
        value = value / _row_counts(mask, lengths).clamp(min=1) if scope == "seq_mean" else value
    low, high = bounds
    ratio = torch.exp(-value)
    accepted = (ratio >= low) & (ratio <= high) if estimate == "k1" else value <= high
    return mask & (accepted if scope == "token" else torch.repeat_interleave(accepted, lengths, output_size=len(mask)))


def _differences(train: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
    """Compute d in float64 at masked-in tokens; the result is 0 elsewhere."""
    return torch.where(mask, train.double() - rollout.double(), 0)


def _row_counts(mask: Tensor, lengths: Tensor) -> Tensor:
    return row_sums(mask.double(), lengths)
