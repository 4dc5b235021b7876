"""Preference loss of reward models, which the role computes once per micro-batch.

    loss, metrics = preference_loss(chosen, rejected, margin, num_pairs=ctx["num_sequences"])

As in `losses.py`, every result is a share of the mini-batch result: the shares of all micro-batches and ranks sum to
it.
"""

import torch.nn.functional as F
from torch import Tensor

from camshaft.algorithms.losses import LossAndMetrics


def preference_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor, num_pairs: float, *, center: float = 0.0
) -> LossAndMetrics:
    """Compute the Bradley-Terry loss of the scores r_c of chosen and r_r of rejected responses.

    l = -log sigmoid(r_c - r_r - margin) + center (r_c + r_r)^2

    The tensors are (B,), one entry per pair; the loss is a scalar. The first term depends only on score differences.
    The coefficient `center` weights a penalty that centers the scores at 0. `num_pairs` is the number of pairs in the
    mini-batch, over all micro-batches and ranks.

    Metrics (as shares): `accuracy`, the fraction of pairs with r_c > r_r; `margin`, the mean of r_c - r_r;
    `chosen_reward` and `rejected_reward`, the mean scores. Margins: Touvron et al., arXiv:2307.09288; centering:
    Eisenstein et al., arXiv:2312.09244.
    """
    difference = chosen - rejected
    per_pair = -F.logsigmoid(difference - margin)
    if center:
        per_pair = per_pair + center * (chosen + rejected).square()
    values = {"accuracy": difference > 0, "margin": difference, "chosen_reward": chosen, "rejected_reward": rejected}
    metrics = {name: value.detach().float().sum() / num_pairs for name, value in values.items()}
    return per_pair.sum() / num_pairs, metrics
