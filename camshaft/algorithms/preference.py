"""What a reward model learns from pairs of answers. Called by its role, once per micro-batch.

    loss, metrics = preference_loss(chosen, rejected, margin, num_pairs=ctx["num_sequences"])

As in `losses.py`, every result is a share of the mini-batch: shares of micro-batches and ranks add up.
"""

import torch.nn.functional as F
from torch import Tensor

from camshaft.algorithms.losses import LossAndMetrics


def preference_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor, num_pairs: float, *, center: float = 0.0
) -> LossAndMetrics:
    """Bradley-Terry: the scores r_c and r_r of both answers of each pair, (B,) each -> (loss (), shares).

    l = -log sigmoid(r_c - r_r - margin) + center (r_c + r_r)^2

    Only differences are learnt from pairs; `center` pulls the mean of the scores to 0.
    `num_pairs` counts the whole mini-batch, over all micro-batches and ranks.

    Metrics: `accuracy`, pairs with r_c > r_r; `margin`, the mean of r_c - r_r; `chosen_reward`, `rejected_reward`.
    Margins: Touvron et al., arXiv:2307.09288; centering: Eisenstein et al., arXiv:2312.09244.
    """
    difference = chosen - rejected
    per_pair = -F.logsigmoid(difference - margin)
    if center:
        per_pair = per_pair + center * (chosen + rejected).square()
    shown = {
        "accuracy": difference > 0,
        "margin": difference,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }
    metrics = {name: value.detach().float().sum() / num_pairs for name, value in shown.items()}
    return per_pair.sum() / num_pairs, metrics
