"""Policy losses, selected by `actor.policy_loss.loss_mode`. Called once per micro-batch.

    loss, metrics = POLICY_LOSSES["gspo"](
        log_probs, old_log_probs, advantages, counts, clip=Clip(3e-4, 4e-4), mode="seq-mean-token-mean"
    )

Flat tokens, shares and masks follow `losses.py`. Rows are complete, also under sequence parallelism. A custom loss has
the same parameters and is selected by `package.module:function`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from camshaft.algorithms.losses import Counts, LossAndMetrics, aggregate, row_sums, share, zero_masked


class Clip(NamedTuple):
    """Clip range [1 - low, 1 + high] of the ratio; `dual` bounds the loss for A < 0."""

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
    """Clipped PPO loss with separate clip ranges and a dual clip. (N,) each -> (loss (), shares of metrics).

    ratio = exp(log pi - log pi_old), the difference clamped to +-20
    l     = max(-A ratio, -A clip(ratio, 1 - low, 1 + high));     for A < 0:  l = min(l, -A dual)

    `weights` multiply l after clipping: importance weights of samples from a policy other than pi_old (`mismatch.py`),
    without gradient.

    Metrics: `pg_clipfrac`, fraction of tokens where clipping increases the loss; `pg_clipfrac_lower`, fraction of
    tokens where the dual clip decreases it; `ppo_kl`, mean of log pi_old - log pi.
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
    """GSPO loss with one clipped ratio per response. (N,) each -> (loss (), shares of metrics).

    s     = exp(mean_t (log pi - log pi_old)), over the masked-in tokens of the row; the mean is clamped to +-20
    s_t   = sg(s) pi / sg(pi), where sg stops the gradient: its value is s, its gradient is that of token t
    l     = max(-A s_t, -A clip(s_t, 1 - low, 1 + high))

    With `mode` seq-mean-token-mean and one advantage per row, objective and gradient are those of the paper; with an
    advantage per token it is GSPO-token. s stays much closer to 1 than a token's ratio, so typical clip ranges are
    about 1e-4. There is no dual clip.

    Metrics: `pg_clipfrac`, fraction of tokens in rows where clipping increases the loss; `ppo_kl`, mean of
    log pi_old - log pi.
    Zheng et al., arXiv:2507.18071.
    """
    log_probs, old_log_probs, advantages = zero_masked(counts, log_probs, old_log_probs, advantages)
    difference = (log_probs - old_log_probs).detach()
    sizes = row_sums(counts.mask.to(difference.dtype), counts.lengths).clamp(min=1)
    means = row_sums(difference, counts.lengths) / sizes
    spread = torch.repeat_interleave(means, counts.lengths, output_size=len(difference))
    ratio = (log_probs - log_probs.detach() + spread).clamp(-20, 20).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    per_token = torch.maximum(unclipped, clipped)
    metrics = {"pg_clipfrac": share(clipped > unclipped, counts), "ppo_kl": share(-difference, counts)}
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
    """CISPO loss, in which every token keeps its gradient with a clipped weight. (N,) each -> (loss (), shares).

    ratio = exp(log pi - log pi_old), the difference clamped to +-20
    l     = -sg(clip(ratio, 1 - low, 1 + high)) A log pi, where sg stops the gradient

    `low` of 1 or more disables the lower bound, as in the paper.

    Metrics: `pg_clipfrac`, fraction of tokens with a clipped weight; `ppo_kl`, mean of log pi_old - log pi.
    MiniMax, arXiv:2506.13585.
    """
    log_probs, old_log_probs, advantages = zero_masked(counts, log_probs, old_log_probs, advantages)
    difference = (log_probs - old_log_probs).detach().clamp(-20, 20)
    ratio = difference.exp()
    clipped = ratio.clamp(1 - clip.low, 1 + clip.high)
    per_token = -clipped * advantages * log_probs
    metrics = {"pg_clipfrac": share(clipped != ratio, counts), "ppo_kl": share(-difference, counts)}
    return aggregate(_weighted(per_token, weights, counts), counts, mode), metrics


def _weighted(per_token: Tensor, weights: Tensor | None, counts: Counts) -> Tensor:
    return per_token if weights is None else per_token * zero_masked(counts, weights.detach())[0]


PolicyLoss = Callable[..., LossAndMetrics]
"""A function with the parameters of `policy_loss` that returns (loss (), shares of metrics)."""

POLICY_LOSSES: dict[str, PolicyLoss] = {"vanilla": policy_loss, "gspo": gspo_loss, "cispo": cispo_loss}
"""Values of `actor.policy_loss.loss_mode`."""
