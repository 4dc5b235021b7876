"""Section `algorithm`: advantage estimation, KL penalty, dynamic sampling and rollout correction."""

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from camshaft.config.schema.fields import Described, KLPenalty, Section, Text

ESTIMATORS = ("gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo")
POLICY_LOSSES = ("vanilla", "gspo", "cispo")
"""Built-in names. The functions are in `camshaft.algorithms`, which imports torch; a test compares the two."""

EstimatorName = Annotated[Text, Described(f"one of {', '.join(ESTIMATORS)}, or package.module:function")]
GROUP_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus_baseline", "opo")
"""Estimators that compare the responses to one prompt with each other; they require rollout.n > 1."""


RejectionRule = Literal[
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
]  # fmt: skip


def _as_list(value: Any) -> Any:
    """Parse `a,b`, `[a, b]`, `a` or null into a tuple of strings; numbers keep their spelling."""
    if value is None:
        return ()
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, Sequence) else (value,)
    return tuple(part if isinstance(part, bool) else str(part).strip() for part in parts)


RejectionRules = Annotated[
    tuple[RejectionRule, ...],
    BeforeValidator(_as_list),
    Described(f"null, or one or a list of {', '.join(get_args(RejectionRule))}"),
]
Thresholds = Annotated[
    tuple[str, ...],
    BeforeValidator(_as_list),
    Described("null, or per rule a number or a low-high range such as 0.5-2.0"),
]

_TWO = re.compile(r"(?<![eE])[-_]")
"""Separator of low and high. Prefer `-`: the command line reads `_` as a digit separator (1.0_2 is 1.02)."""


def threshold(rule: str, text: str) -> tuple[float, float]:
    """Parse the threshold of one rejection rule into (low, high); raise ValueError if it is malformed.

    A ratio (k1) has two bounds; a single number `high` is shorthand for the range [1/high, high]. A divergence (k2, k3)
    has only an upper bound.
    """
    ratio = rule.endswith("k1")
    try:
        parts = [float(part) for part in _TWO.split(text.strip())]
    except ValueError:  # also raised for an empty part, as before a leading minus
        parts = []
    parts = parts if all(math.isfinite(part) for part in parts) else []
    if ratio and len(parts) == 2 and 0 <= parts[0] < parts[1]:
        return parts[0], parts[1]
    if ratio and len(parts) == 1 and parts[0] >= 1:
        return 1 / parts[0], parts[0]
    if not ratio and len(parts) == 1 and parts[0] >= 0:
        return 0.0, parts[0]
    if ratio:
        raise ValueError("must be a maximum ratio >= 1, or a range such as 0.5-2.0")
    raise ValueError("must be a maximum divergence, one number >= 0 such as 0.01")


class RolloutCorrectionConfig(Section):
    """Corrections for the mismatch between the rollout's and the trainer's log-probs; off by default."""

    rollout_is: Literal["token", "sequence"] | None = Field(
        description="Truncated importance sampling weights in the policy loss, per token or per sequence; null "
        "disables them."
    )
    rollout_is_threshold: float = Field(gt=0, description="Maximum importance weight; larger weights are truncated.")
    rollout_is_batch_normalize: bool = Field(description="Divide importance weights by their mean over the iteration.")
    rollout_rs: RejectionRules = Field(
        description="Rejection rules that mask tokens (token_*) or responses (seq_*) out of the loss. *_k1 bounds the "
        "probability ratio, *_k2 and *_k3 a divergence. A sample must satisfy all rules."
    )
    rollout_rs_threshold: Thresholds = Field(
        description="Threshold of each rule, or one for all rules of a kind. For k1 a ratio: 2.0 (0.5 to 2) or "
        "0.5-2.0. For k2 and k3 the maximum divergence."
    )
    bypass_mode: bool = Field(
        description="Use the rollout's log-probs as old log-probs in the loss and in the KL penalty, and skip the "
        "trainer's old log-prob pass."
    )

    def is_on(self) -> bool:
        """Return True if any correction is enabled."""
        return self.rollout_is is not None or bool(self.rollout_rs)

    def rejections(self) -> tuple[tuple[str, tuple[float, float]], ...]:
        """Return each rejection rule with its (low, high) bounds."""
        texts = self.rollout_rs_threshold
        texts = texts * len(self.rollout_rs) if len(texts) == 1 else texts
        return tuple((rule, threshold(rule, text)) for rule, text in zip(self.rollout_rs, texts, strict=True))


class KLCtrlConfig(Section):
    """Coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = Field(description="Constant coefficient, or adapted towards target_kl.")
    kl_coef: float = Field(ge=0, description="KL coefficient; the initial value if adaptive.")
    horizon: int = Field(ge=1, description="Adaptive: horizon in sequences; larger values adapt more slowly.")
    target_kl: float = Field(gt=0, description="Adaptive: target KL divergence.")


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO): train only on prompts whose responses have different rewards."""

    enable: bool = Field(
        description="Drop prompts whose responses all have the same reward, and generate for further prompts until "
        "data.train_batch_size prompts remain."
    )
    metric: Text = Field(
        description="Value that must differ within a group: seq_reward (the reward used for advantages; alias "
        "seq_final_reward), score (before the penalty of reward_model.overlong_buffer), or a number that the reward "
        "function returns, such as acc."
    )
    max_num_gen_batches: int = Field(
        ge=0,
        description="Maximum batches of data.gen_batch_size prompts per iteration; exceeding it raises an error. 0: no "
        "limit.",
    )


class AlgorithmConfig(Section):
    """Advantage estimation and the KL penalty in the reward."""

    gamma: float = Field(ge=0, le=1, description="Discount factor per token.")
    lam: float = Field(ge=0, le=1, description="GAE lambda: 0 relies on the critic, 1 on observed rewards.")
    adv_estimator: EstimatorName = Field(description="Advantage estimator; see algorithms.md.")
    norm_adv_by_std_in_grpo: bool = Field(
        description="GRPO: divide advantages by the group's standard deviation; false is Dr.GRPO."
    )
    kl_penalty: KLPenalty = Field(
        description="Estimator of the KL divergence between actor and reference; full computes it over the vocabulary."
    )
    use_kl_in_reward: bool = Field(description="Subtract the KL penalty from the reward of every token.")
    kl_ctrl: KLCtrlConfig = Field(description="Coefficient of the KL penalty in the reward.")
    filter_groups: FilterGroupsConfig = Field(description="Dynamic sampling; see algorithms.md.")
    rollout_correction: RolloutCorrectionConfig = Field(
        description="Corrections for the mismatch between rollout and trainer; see mismatch.md."
    )
