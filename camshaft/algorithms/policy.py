"""Losses of the policy, by the name that `actor.policy_loss.loss_mode` takes. Called once per micro-batch.

    loss, metrics = POLICY_LOSSES["gspo"](
        log_probs, old_log_probs, advantages, counts, clip=Clip(3e-4, 4e-4), mode="seq-mean-token-mean"
    )

Flat tokens, shares and masks as in `losses.py`; a row of tokens is whole here, however the ranks shared the work of its
forward pass. One of the user's own has the same parameters and is named `package.module:function`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from camshaft.algorithms.losses import Counts, LossAndMetrics, aggregate, known, row_sums, share


class Clip(NamedTuple):
    """How far the ratio may move: within [1 - low, 1 + high]; `dual` bounds the loss for A < 0."""

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
    """PPO with separate clips and a dual clip. (N,) each -> (loss (), shares of metrics).

    ratio = exp(log pi - log pi_old), the difference clamped to +-20
    l     = max(-A ratio, -A clip(ratio, 1 - low, 1 + high));     for A < 0:  l = min(l, -A dual)

    `weights` multiply l once it is clipped: the importance weights of samples that another policy than pi_old drew
    (`mismatch.py`), which have no gradient.

    Metrics: `pg_clipfrac`, tokens where the clip raised the loss; `pg_clipfrac_lower`, tokens where the dual
    clip lowered it; `ppo_kl`, the mean of log pi_old - log pi.
    Schulman et al., arXiv:1707.06347; dual clip: Ye et al., arXiv:1912.09729.
    """
    log_probs, old_log_probs, advantages = known(counts, log_probs, old_log_probs, advantages)
    difference = (log_probs - old_log_probs).clamp(-20, 20)
    ratio = difference.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    pessimistic = torch.maximum(plain, clipped)
    ceiling = -advantages * clip.dual
    per_token = torch.where(advantages < 0, torch.minimum(pessimistic, ceiling), pessimistic)
    metrics = {
        "pg_clipfrac": share(clipped > plain, counts),
        "pg_clipfrac_lower": share((advantages < 0) & (pessimistic > ceiling), counts),
        "ppo_kl": share(-difference, counts),
    }
    return aggregate(_weighted(per_token, weights, counts), counts, mode), metrics


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
    """GSPO: one ratio for a whole response, clipped as one. (N,) each -> (loss (), shares of metrics).

    s     = exp(mean_t (log pi - log pi_old)), over the counted tokens of the row; the mean is clamped to +-20
    s_t   = sg(s) pi / sg(pi), sg being what has no gradient: its value is s, its gradient that of token t alone
    l     = max(-A s_t, -A clip(s_t, 1 - low, 1 + high))

    With `mode` seq-mean-token-mean and one advantage for all tokens of a row, this is the objective of the paper and
    has its gradient; with an advantage for each token it is GSPO-token. s stays much closer to 1 than a token's ratio,
    so that the clip takes values of some 1e-4; there is no dual clip.

    Metrics: `pg_clipfrac`, tokens of rows where the clip raised the loss; `ppo_kl`, the mean of log pi_old - log pi.
    Zheng et al., arXiv:2507.18071.
    """
    log_probs, old_log_probs, advantages = known(counts, log_probs, old_log_probs, advantages)
    difference = (log_probs - old_log_probs).detach()
    sizes = row_sums(counts.mask.to(difference.dtype), counts.lengths).clamp(min=1)
    means = row_sums(difference, counts.lengths) / sizes
    spread = torch.repeat_interleave(means, counts.lengths, output_size=len(difference))
    ratio = (log_probs - log_probs.detach() + spread).clamp(-20, 20).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    per_token = torch.maximum(plain, clipped)
    metrics = {"pg_clipfrac": share(clipped > plain, counts), "ppo_kl": share(-difference, counts)}
    return aggregate(_weighted(per_token, weights, counts), counts, mode), metrics


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
    """CISPO: every token keeps its gradient, with a bounded weight. (N,) each -> (loss (), shares of metrics).

    ratio = exp(log pi - log pi_old), the difference clamped to +-20
    l     = -sg(clip(ratio, 1 - low, 1 + high)) A log pi, sg being what has no gradient

    `low` of 1 or more is no lower bound, as in the paper.

    Metrics: `pg_clipfrac`, tokens whose weight was clipped; `ppo_kl`, the mean of log pi_old - log pi.
    MiniMax, arXiv:2506.13585.
    """
    log_probs, old_log_probs, advantages = known(counts, log_probs, old_log_probs, advantages)
    difference = (log_probs - old_log_probs).detach().clamp(-20, 20)
    ratio = difference.exp()
    clipped = ratio.clamp(1 - clip.low, 1 + clip.high)
    per_token = -clipped * advantages * log_probs
    metrics = {"pg_clipfrac": share(clipped != ratio, counts), "ppo_kl": share(-difference, counts)}
    return aggregate(_weighted(per_token, weights, counts), counts, mode), metrics


def _weighted(per_token: Tensor, weights: Tensor | None, counts: Counts) -> Tensor:
    return per_token if weights is None else per_token * known(counts, weights.detach())[0]


PolicyLoss = Callable[..., LossAndMetrics]
"""What has the parameters of `policy_loss` and returns (loss (), shares of metrics)."""

POLICY_LOSSES: dict[str, PolicyLoss] = {"vanilla": policy_loss, "gspo": gspo_loss, "cispo": cispo_loss}
"""By name."""
