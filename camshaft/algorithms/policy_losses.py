"""Policy losses besides the clipped PPO loss, and the table of all of them.

`actor.policy_loss.loss_mode` selects a function: a name in POLICY_LOSSES, or `package.module:function` for a function
with the parameters of `policy_loss`. Parameters that only one loss has, such as `dro_beta`, are further keywords, whose
values are keys of the section `actor.policy_loss` or columns (`token_selection.py`).

All functions follow the rules of `losses.py`: flat tensors of tokens, masked values are never read, results are shares.
A token has advantage A, ratio = exp(log pi - log pi_old) with the difference clamped to +-20, and loss l. sg stops the
gradient. `weights`, the importance weights of samples that come from a policy other than pi_old, multiply l and receive
no gradient. The metric `ppo_kl` is the mean of log pi_old - log pi, and `pg_clipfrac` the fraction of tokens where
clipping changes the loss.

Where pi equals pi_old, each loss has the gradient of -A log pi. A row without masked-in tokens, or whose advantages are
0, has neither loss nor gradient (except for the quadratic term of `dro_loss`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from camshaft.algorithms.losses import (
    Clip,
    Counts,
    LossAndMetrics,
    aggregate,
    policy_loss,
    row_sums,
    share,
    weighted,
    zero_masked,
)

# -- one ratio per response -----------------------------------------------------------------------


def gspo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    counts: Counts,
    *,
    clip: Clip,
    mode: str,
    weights: Tensor | None = None,
) -> LossAndMetrics:
    """Compute the GSPO loss, which clips one ratio per response.

    s     = exp(mean_t (log pi - log pi_old)) over the masked-in tokens of the row, with the mean clamped to +-20
    s_t   = sg(s) pi / sg(pi), whose value is s and whose gradient is that of token t
    l     = max(-A s_t, -A clip(s_t, 1 - low, 1 + high))

    The tensors are (N,); the loss is a scalar. With `mode` seq-mean-token-mean and one advantage per row, objective and
    gradient are those of the paper. With one advantage per token, the loss is GSPO-token. s is much closer to 1 than
    the ratio of a token, so typical clip ranges are about 1e-4. There is no dual clip.

    Metrics (as shares): `pg_clipfrac`, `ppo_kl`. Zheng et al., arXiv:2507.18071.
    """
    log_probs, old_log_probs, advantages = zero_masked(counts, log_probs, old_log_probs, advantages)
    difference = (log_probs - old_log_probs).detach()
    mean_difference = _repeat_rows(_row_means(difference, counts), counts)
    ratio = (log_probs - log_probs.detach() + mean_difference).clamp(-20, 20).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    per_token = torch.maximum(unclipped, clipped)
    metrics = {"pg_clipfrac": share(clipped > unclipped, counts), "ppo_kl": share(-difference, counts)}
    return aggregate(weighted(per_token, weights, counts), counts, mode), metrics


def geo_mean_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    counts: Counts,
    *,
    clip: Clip,
    mode: str,
    weights: Tensor | None = None,
) -> LossAndMetrics:
    """Compute the GMPO loss, whose ratio is the geometric mean of the clipped ratios of a response.

    d_t   = log pi - log pi_old, clamped to +-20
    e_t   = min(d_t, high) where A > 0, max(d_t, -low) where A < 0, and 0 where A = 0
    l     = -(mean_t A) exp(mean_t e_t), equal for all tokens of a row

    The tensors are (N,); the loss is a scalar. The range [-low, high] bounds the log-ratio of a token; the paper uses
    0.4 for both. `mode` must be seq-mean-token-mean, so that the loss is the mean of l over the rows. Weights enter as
    their geometric mean over the row, which is 0 if one of them is 0.

    Metrics (as shares): `pg_clipfrac`, `ppo_kl`. Zhao et al., arXiv:2507.20673.
    """
    log_probs, old_log_probs, advantages = zero_masked(counts, log_probs, old_log_probs, advantages)
    difference, sign = (log_probs - old_log_probs).clamp(-20, 20), advantages.sign()
    clipped = difference.clamp(-clip.low, clip.high)
    pessimistic = torch.minimum(sign * difference, sign * clipped)
    ratio = _row_means(sign * pessimistic, counts).exp()
    per_row = -_row_means(advantages, counts) * ratio
    if weights is not None:
        log_weights = torch.where(counts.mask, weights.detach(), 1).log()
        per_row = per_row * _row_means(log_weights, counts).exp()
    metrics = {
        "pg_clipfrac": share(sign * clipped < sign * difference, counts),
        "ppo_kl": share(-difference, counts),
    }
    return aggregate(_repeat_rows(per_row, counts), counts, mode), metrics


def _row_means(x: Tensor, counts: Counts) -> Tensor:
    """Compute the mean of each row over its masked-in tokens, (N,) -> (B,). `x` must be 0 at other tokens."""
    return row_sums(x, counts.lengths) / row_sums(counts.mask.to(x.dtype), counts.lengths).clamp(min=1)


def _repeat_rows(x: Tensor, counts: Counts) -> Tensor:
    """Repeat the value of each row for all of its tokens, (B,) -> (N,)."""
    return torch.repeat_interleave(x, counts.lengths, output_size=len(counts.mask))


# -- other restrictions of the ratio --------------------------------------------------------------


def cispo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    counts: Counts,
    *,
    clip: Clip,
    mode: str,
    weights: Tensor | None = None,
) -> LossAndMetrics:
    """Compute the CISPO loss, which clips the weight of a token but never removes its gradient.

    l = -sg(clip(ratio, 1 - low, 1 + high)) A log pi

    The tensors are (N,); the loss is a scalar. A `clip.low` of 1 or more disables the lower bound, as in the paper.

    Metrics (as shares): `pg_clipfrac`, `ppo_kl`. MiniMax, arXiv:2506.13585.
    """
    log_probs, old_log_probs, advantages = zero_masked(counts, log_probs, old_log_probs, advantages)
    difference = (log_probs - old_log_probs).detach().clamp(-20, 20)
    ratio = difference.exp()
    clipped = ratio.clamp(1 - clip.low, 1 + clip.high)
    per_token = -clipped * advantages * log_probs
    metrics = {"pg_clipfrac": share(clipped != ratio, counts), "ppo_kl": share(-difference, counts)}
    return aggregate(weighted(per_token, weights, counts), counts, mode), metrics


def sapo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    counts: Counts,
    *,
    clip: Clip,
    mode: str,
    weights: Tensor | None = None,
    tau: tuple[float, float] = (1.0, 1.05),
) -> LossAndMetrics:
    """Compute the SAPO loss, which replaces clipping by a soft gate.

    gate  = 4 / tau sigmoid(tau (ratio - 1)), with tau = tau[0] where A > 0 and tau[1] elsewhere
    l     = -A gate

    The tensors are (N,); the loss is a scalar. The gradient of the gate with respect to the ratio is 1 at ratio 1 and
    decreases on both sides, the faster the larger tau is. The paper averages over the tokens of a response and then
    over responses (`mode` seq-mean-token-mean). `clip` is not read.

    Metric (as a share): `ppo_kl`. Gao et al., arXiv:2511.20347.
    """
    log_probs, old_log_probs, advantages = zero_masked(counts, log_probs, old_log_probs, advantages)
    difference = (log_probs - old_log_probs).clamp(-20, 20)
    taus = torch.full_like(advantages, tau[1]).masked_fill(advantages > 0, tau[0])
    gate = torch.sigmoid(taus * (difference.exp() - 1)) * 4 / taus
    per_token = -advantages * gate
    return aggregate(weighted(per_token, weights, counts), counts, mode), {"ppo_kl": share(-difference, counts)}


def dppo_tv_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    counts: Counts,
    *,
    clip: Clip,
    mode: str,
    weights: Tensor | None = None,
) -> LossAndMetrics:
    """Compute the DPPO loss whose trust region bounds the total variation of a token.

    inside  = pi - pi_old <= high where A > 0, and pi - pi_old >= -low elsewhere
    l       = -sg(min(ratio, dual) inside) A log pi

    |pi - pi_old| is the total variation between the distributions over two outcomes, the sampled token and any other.
    A token outside the trust region has no gradient if its update would move it further away. The tensors are (N,); the
    loss is a scalar. The paper uses 0.15 for `low` and `high`.

    Metrics (as shares): `pg_clipfrac`, the fraction of tokens that are not inside; `pg_clipfrac_lower`, the fraction of
    tokens inside with a ratio above `dual`; `ppo_kl`. Qi et al., arXiv:2602.04879.
    """
    log_probs, old_log_probs, advantages = zero_masked(counts, log_probs, old_log_probs, advantages)
    shift = log_probs.detach().exp() - old_log_probs.exp()
    inside = torch.where(advantages > 0, shift <= clip.high, shift >= -clip.low)
    return _trust_region_loss(log_probs, old_log_probs, advantages, inside, counts, clip, mode, weights)


def dppo_kl_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    counts: Counts,
    *,
    clip: Clip,
    mode: str,
    weights: Tensor | None = None,
) -> LossAndMetrics:
    """Compute the DPPO loss whose trust region bounds the KL divergence of a token.

    D       = pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi))
    inside  = D <= high or pi <= pi_old where A > 0, and D <= low or pi >= pi_old elsewhere
    l       = -sg(min(ratio, dual) inside) A log pi

    D is the KL divergence between the distributions over two outcomes, the sampled token and any other. The tensors are
    (N,); the loss is a scalar. The paper uses 0.05 for `low` and `high`.

    Metrics (as shares): those of `dppo_tv_loss`. Qi et al., arXiv:2602.04879.
    """
    log_probs, old_log_probs, advantages = zero_masked(counts, log_probs, old_log_probs, advantages)
    new, old = log_probs.detach(), old_log_probs
    rest, old_rest = (-torch.expm1(x).clamp(max=0) for x in (new, old))
    # xlogy is 0 if the old policy never chooses another token; the divergence is infinite if only the new one does so.
    divergence = old.exp() * (old - new) + torch.xlogy(old_rest, old_rest) - torch.xlogy(old_rest, rest)
    inside = torch.where(
        advantages > 0, (divergence <= clip.high) | (new <= old), (divergence <= clip.low) | (new >= old)
    )
    return _trust_region_loss(log_probs, old_log_probs, advantages, inside, counts, clip, mode, weights)


def _trust_region_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    inside: Tensor,
    counts: Counts,
    clip: Clip,
    mode: str,
    weights: Tensor | None,
) -> LossAndMetrics:
    """Compute the loss -sg(min(ratio, dual)) A log pi of the tokens inside the trust region; others have none."""
    difference = (log_probs.detach() - old_log_probs).clamp(-20, 20)
    ratio = difference.exp()
    per_token = torch.where(inside, -ratio.clamp(max=clip.dual) * advantages * log_probs, 0)
    metrics = {
        "pg_clipfrac": share(~inside, counts),
        "pg_clipfrac_lower": share(inside & (ratio > clip.dual), counts),
        "ppo_kl": share(-difference, counts),
    }
    return aggregate(weighted(per_token, weights, counts), counts, mode), metrics


# -- without a restriction ------------------------------------------------------------------------


def gpg_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    counts: Counts,
    *,
    clip: Clip,
    mode: str,
    weights: Tensor | None = None,
) -> LossAndMetrics:
    """Compute the policy gradient loss l = -A log pi, without a ratio.

    The tensors are (N,); the loss is a scalar. It is the loss of GPG and of REINFORCE. With several optimizer steps per
    batch, the samples of later steps come from an older policy, which the loss ignores. `clip` is not read.

    Metric (as a share): `ppo_kl`. Chu et al., arXiv:2504.02546; Williams, "Simple statistical gradient-following
    algorithms", 1992.
    """
    log_probs, old_log_probs, advantages = zero_masked(counts, log_probs, old_log_probs, advantages)
    metrics = {"ppo_kl": share(old_log_probs - log_probs, counts)}
    return aggregate(weighted(-advantages * log_probs, weights, counts), counts, mode), metrics


def dro_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    counts: Counts,
    *,
    clip: Clip,
    mode: str,
    weights: Tensor | None = None,
    dro_beta: float,
) -> LossAndMetrics:
    """Compute the DRO loss, which pulls the policy towards pi_old with a quadratic penalty.

    l = -A log pi + dro_beta / 2 (log pi - log pi_old)^2

    The tensors are (N,); the loss is a scalar. The loss of a token is smallest at log pi - log pi_old = A / dro_beta,
    so the penalty replaces clipping. `clip` is not read.

    Metric (as a share): `ppo_kl`. Richemond et al., arXiv:2405.19107.
    """
    log_probs, old_log_probs, advantages = zero_masked(counts, log_probs, old_log_probs, advantages)
    difference = log_probs - old_log_probs
    per_token = dro_beta / 2 * difference.square() - advantages * log_probs
    return aggregate(weighted(per_token, weights, counts), counts, mode), {"ppo_kl": share(-difference, counts)}


# -- entropy ------------------------------------------------------------------------------------------


_NO_DUAL_CLIP = 1e30
_ROUNDING = 1e-4
"""Largest difference of two log-probs that `kl_cov_loss` takes for a rounding error."""


def clip_cov_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    counts: Counts,
    *,
    clip: Clip,
    mode: str,
    weights: Tensor | None = None,
    selected: Tensor,
) -> LossAndMetrics:
    """Compute the Clip-Cov loss: the clipped PPO loss without dual clip, which leaves out selected tokens.

    l = max(-A ratio, -A clip(ratio, 1 - low, 1 + high)), and 0 where `selected`

    The tensors are (N,); the loss is a scalar. `selected` is a random part of the tokens whose covariance of log-prob
    and advantage is large (`tokens_between`). Such tokens reduce the entropy of the policy most. Those left out remain
    in the counts of the mean.

    Metrics (as shares): `pg_clipfrac`; `cov_selected`, the fraction of selected tokens; `ppo_kl`. Cui et al.,
    arXiv:2505.22617.
    """
    kept = (~selected).to(advantages.dtype)
    weights = kept if weights is None else kept * weights
    clip = clip._replace(dual=_NO_DUAL_CLIP)
    loss, metrics = policy_loss(log_probs, old_log_probs, advantages, counts, clip=clip, mode=mode, weights=weights)
    return loss, metrics | {"cov_selected": share(selected, counts)}


def kl_cov_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    counts: Counts,
    *,
    clip: Clip,
    mode: str,
    weights: Tensor | None = None,
    penalties: Tensor,
) -> LossAndMetrics:
    """Compute the KL-Cov loss, which penalizes the change of tokens with a large covariance instead of clipping.

    l = -A ratio + penalty |log pi - log pi_old|

    The tensors are (N,); the loss is a scalar. `penalties` is `ppo_kl_coef` at tokens with the largest covariance of
    log-prob and advantage (`largest_tokens`), and 0 elsewhere. `clip` is not read. Where |log pi - log pi_old| is at
    most 1e-4, the penalty is 0: in the first update, the sign of this difference is that of a rounding error, and would
    be a gradient of full size.

    Metrics (as shares): `cov_selected`, the fraction of tokens with a penalty; `ppo_kl`. Cui et al., arXiv:2505.22617.
    """
    log_probs, old_log_probs, advantages = zero_masked(counts, log_probs, old_log_probs, advantages)
    (penalties,) = zero_masked(counts, penalties)
    difference = log_probs - old_log_probs
    metrics = {"cov_selected": share(penalties > 0, counts), "ppo_kl": share(-difference, counts)}
    penalties = torch.where(difference.abs() > _ROUNDING, penalties, 0)
    per_token = -advantages * difference.clamp(-20, 20).exp() + penalties * difference.abs()
    return aggregate(weighted(per_token, weights, counts), counts, mode), metrics


PolicyLoss = Callable[..., LossAndMetrics]
"""Function with the parameters of `policy_loss` that returns the scalar loss and the shares of the metrics."""

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": policy_loss,
    "gspo": gspo_loss,
    "geo_mean": geo_mean_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "dppo_tv": dppo_tv_loss,
    "dppo_kl": dppo_kl_loss,
    "gpg": gpg_loss,
    "dro": dro_loss,
    "clip_cov": clip_cov_loss,
    "kl_cov": kl_cov_loss,
}
"""Policy loss of each value of `actor.policy_loss.loss_mode`."""
