"""Algorithms as pure functions on tensors, independent of the rest of the package.

    masked.py         masked sums, means and variances
    kl.py             estimators of the KL to the reference policy, and controllers of the KL coefficient
    entropy.py        coefficient of the entropy bonus with a target
    advantages.py     advantages and returns from rewards and values; runs on the driver on (B, T) grids
    losses.py         PPO, value, entropy, KL and SFT losses; run on the workers on flat (N,) tokens
    policy_losses.py  other policy losses; run on the workers on flat (N,) tokens
    token_selection.py  tokens that a policy loss selects by covariance or entropy; runs on the driver
    token_losses.py   losses that are sums over tokens, of training loops that run outside; run on the workers
    preference.py     loss of preference pairs; runs on the workers on the (B,) pairs of a micro-batch
    mismatch.py       compares log-probs of rollout and trainer: statistics, importance weights, rejection; runs on the
                      driver
    at_n.py           mean@n, best@k, worst@k and maj@k of n responses to one prompt, on Python numbers
    partition.py      balanced partitions of rows into micro-batches, on Python numbers

To add a variant, write a function with the parameters of the existing ones. Add it to the dict of its kind (ESTIMATORS,
POLICY_LOSSES, KL_PENALTIES or AGGREGATIONS) and to the names that the config accepts (config/schema/algorithm.py,
fields.py).

Glossary of names and formulas:

    B, T, N, V, H   number of sequences, response tokens and flat tokens; vocabulary size; hidden size
    G               group size: number of responses to one prompt
    m_t             mask, which is 1 at tokens that the policy sampled
    r_t, R          reward of a token; total reward of a row, the sum of its r_t
    V_t, V_old      value of the critic; the same before the update
    A_t, G_t        advantage; reward-to-go
    pi, pi_old, pi_ref      trained policy, sampling policy, reference policy
    d               log pi - log pi_ref of the sampled token
    ratio           pi / pi_old of the sampled token
    beta            KL coefficient
    gamma, lam      discount factor; GAE lambda
    share           contribution of a micro-batch to a mini-batch mean: micro-batch sum / mini-batch count
"""

from camshaft.algorithms.advantages import ESTIMATORS, AdvantageInputs, AdvantageOptions, Estimator, group_advantages
from camshaft.algorithms.entropy import AdaptiveEntropy
from camshaft.algorithms.kl import KL_PENALTIES, AdaptiveKL, FixedKL, kl_penalty
from camshaft.algorithms.losses import (
    AGGREGATIONS,
    Clip,
    Counts,
    aggregate,
    entropy_loss,
    full_kl_loss,
    kl_loss,
    policy_loss,
    sft_loss,
    value_loss,
)
from camshaft.algorithms.masked import masked_mean, masked_sum, masked_var, whiten
from camshaft.algorithms.mismatch import (
    accept_tokens,
    effective_sample_share,
    importance_weights,
    interpolated_log_probs,
    mean_importance_weight,
    mismatch,
    off_policy_diagnostics,
)
from camshaft.algorithms.policy_losses import (
    POLICY_LOSSES,
    PolicyLoss,
    cispo_loss,
    clip_cov_loss,
    dppo_kl_loss,
    dppo_tv_loss,
    dro_loss,
    geo_mean_loss,
    gpg_loss,
    gspo_loss,
    kl_cov_loss,
    sapo_loss,
)
from camshaft.algorithms.preference import preference_loss
from camshaft.algorithms.token_selection import covariances, high_entropy_tokens, largest_tokens, tokens_between

__all__ = [
    "ESTIMATORS", "POLICY_LOSSES", "KL_PENALTIES", "AGGREGATIONS",
    "AdvantageInputs", "AdvantageOptions", "Estimator", "group_advantages",
    "FixedKL", "AdaptiveKL", "kl_penalty",
    "Clip", "PolicyLoss", "policy_loss", "gspo_loss", "geo_mean_loss", "cispo_loss", "sapo_loss", "dppo_tv_loss",
    "dppo_kl_loss", "gpg_loss", "dro_loss", "clip_cov_loss", "kl_cov_loss",
    "covariances", "largest_tokens", "tokens_between", "high_entropy_tokens",
    "AdaptiveEntropy",
    "Counts", "aggregate", "value_loss", "entropy_loss", "kl_loss", "full_kl_loss", "sft_loss",
    "preference_loss",
    "mismatch", "off_policy_diagnostics", "importance_weights", "mean_importance_weight",
    "interpolated_log_probs", "accept_tokens",
    "effective_sample_share",
    "masked_sum", "masked_mean", "masked_var", "whiten",
]  # fmt: skip
