"""Preference loss of reward models. Called by the role once per micro-batch.

    loss, metrics = preference_loss(chosen, rejected, margin, num_pairs=ctx["num_sequences"])

As in `losses.py`, every result is a share of the mini-batch; shares of micro-batches and ranks sum to the result.
"""

import torch.nn.functional as F
from torch import Tensor

from camshaft.algorithms.losses import LossAndMetrics


def preference_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor, num_pairs: float, *, center: float = 0.0
) -> LossAndMetrics:
    """Bradley-Terry loss of chosen and rejected scores r_c and r_r, (B,) each -> (loss (), shares).

    l = -log sigmoid(r_c - r_r - margin) + center (r_c + r_r)^2

    The loss without `center` depends only on differences; `center` centers the scores at 0. `num_pairs` is the number
    of pairs of the mini-batch, over all micro-batches and ranks.

    Metrics: `accuracy`, fraction of pairs with r_c > r_r; `margin`, mean of r_c - r_r; `chosen_reward`,
    `rejected_reward`. Margins: Touvron et al., arXiv:2307.09288; centering: Eisenstein et al., arXiv:2312.09244.
    """
    difference = chosen - rejected
    per_pair = -F.logsigmoid(difference - margin)
    if center:
        per_pair = per_pair + center * (chosen + rejected).square()
    values = {
        "accuracy": difference > 0,
        "margin": difference,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }
    metrics = {name: value.detach().float().sum() / num_pairs for name, value in values.items()}
    return per_pair.sum() / num_pairs, metrics
