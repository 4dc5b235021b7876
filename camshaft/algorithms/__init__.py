"""Algorithms as pure functions on tensors, independent of the rest of the package.

    masked.py      masked sums, means and variances
    kl.py          KL estimators for the reference policy, and KL controllers
    advantages.py  rewards (and values) -> advantages and returns; on the driver, (B, T) grids
    losses.py      policy, value, entropy, KL and SFT losses, and their aggregation; on the workers, flat (N,) tokens
    preference.py  scores of preference pairs -> loss; on the workers, (B,) pairs of a micro-batch
    mismatch.py    rollout log-probs against trainer log-probs: statistics, weights, rejection; on the driver
    at_n.py        scores of n responses to one prompt: mean@n, best@k, maj@k; plain numbers
    partition.py   balanced partitions of rows for micro-batches; plain numbers

To add a variant, write a function with the same parameters and add it to its dict (ESTIMATORS, POLICY_LOSSES,
KL_PENALTIES, AGGREGATIONS) and to the names that the config accepts (config/schema/algorithm.py, fields.py).

Glossary of names and formulas:

    B, T, N, V, H   sequences, response tokens, tokens of a flat batch, vocabulary size, hidden size
    G               rows of one group: the responses to one prompt
    m_t             mask: 1 at tokens that the policy sampled
    r_t, R          reward of a token; reward of a row, the sum of its r_t
    V_t, V_old      value of the critic, current and before the update
    A_t, G_t        advantage; reward-to-go
    pi, pi_old, pi_ref      trained policy, sampling policy, reference policy
    d               log pi - log pi_ref of the sampled token
    ratio           pi / pi_old of the sampled token
    beta            KL coefficient
    gamma, lam      discount factor; GAE lambda
    share           contribution of a micro-batch to a mini-batch mean: its sum divided by the mini-batch count
"""

from camshaft.algorithms.advantages import ESTIMATORS, AdvantageInputs, AdvantageOptions, Estimator
from camshaft.algorithms.kl import KL_PENALTIES, AdaptiveKL, FixedKL, kl_penalty
from camshaft.algorithms.losses import (
    AGGREGATIONS,
    POLICY_LOSSES,
    Clip,
    Counts,
    PolicyLoss,
    aggregate,
    cispo_loss,
    entropy_loss,
    full_kl_loss,
    gspo_loss,
    kl_loss,
    policy_loss,
    sft_loss,
    value_loss,
)
from camshaft.algorithms.masked import masked_mean, masked_sum, masked_var, whiten
from camshaft.algorithms.mismatch import accepted, effective_share, importance_weights, mismatch
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
