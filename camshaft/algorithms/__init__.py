"""The mathematics of the step: pure tensor functions that import torch and nothing else of the package.

    masked.py      sums, means, variances over the tokens that count
    kl.py          distance to the reference policy, and the controllers of its weight
    advantages.py  rewards (and values) -> advantages and returns; on the driver, (B, T) grids
    policy.py      log-probs and advantages -> the loss of the policy; on the workers, flat (N,) tokens of a micro-batch
    losses.py      the other losses, and how tokens become one number; likewise
    preference.py  scores of two answers -> a loss; on the workers, (B,) pairs of a micro-batch
    mismatch.py    the rollout's log-probs against the trainer's: a report, weights, rejection; on the driver
    at_n.py        scores of n responses to one prompt: mean@n, best@k, maj@k; on plain numbers
    partition.py   rows -> groups of equal cost, for micro-batches; on plain numbers

Add a variant by writing a function with the same parameters, one line in its dict (ESTIMATORS, POLICY_LOSSES,
KL_PENALTIES, AGGREGATIONS) and its name among those that the config takes (config/part_names.py, fields.py).

Glossary, for names and formulas alike:

    B, T, N, V, H   sequences, response tokens, tokens of a flat batch, vocabulary, hidden size
    G               rows of one group: the responses to one prompt
    m_t             the mask: 1 at tokens that the policy chose
    r_t, R          the reward of a token; of a row, the sum of its r_t
    V_t, V_old      the critic's value, now and before the update
    A_t, G_t        the advantage; the reward-to-go
    pi, pi_old, pi_ref      the policy that is trained, that which sampled, that which is not left far behind
    d               log pi - log pi_ref of the sampled token
    ratio           pi / pi_old of the sampled token
    beta            the weight of the KL penalty
    gamma, lam      the discount; GAE's trade of bias for variance
    share           a part of a mini-batch's mean, divided by the counts of the whole
"""

from camshaft.algorithms.advantages import ESTIMATORS, AdvantageInputs, AdvantageOptions, Estimator
from camshaft.algorithms.kl import KL_PENALTIES, AdaptiveKL, FixedKL, kl_penalty
from camshaft.algorithms.losses import (
    AGGREGATIONS,
    Counts,
    aggregate,
    entropy_loss,
    full_kl_loss,
    kl_loss,
    sft_loss,
    value_loss,
)
from camshaft.algorithms.masked import masked_mean, masked_sum, masked_var, whiten
from camshaft.algorithms.mismatch import accepted, effective_share, importance_weights, mismatch
from camshaft.algorithms.policy import POLICY_LOSSES, Clip, PolicyLoss, cispo_loss, gspo_loss, policy_loss
from camshaft.algorithms.preference import preference_loss

__all__ = [
    "ESTIMATORS", "POLICY_LOSSES", "KL_PENALTIES", "AGGREGATIONS",
    "AdvantageInputs", "AdvantageOptions", "Estimator",
    "FixedKL", "AdaptiveKL", "kl_penalty",
    "Clip", "PolicyLoss", "policy_loss", "gspo_loss", "cispo_loss",
    "Counts", "aggregate", "value_loss", "entropy_loss", "kl_loss", "full_kl_loss", "sft_loss",
    "preference_loss",
    "mismatch", "importance_weights", "accepted", "effective_share",
    "masked_sum", "masked_mean", "masked_var", "whiten",
]  # fmt: skip
