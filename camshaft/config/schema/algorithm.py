"""Section `algorithm`: how rewards become advantages."""

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from camshaft.config.part_names import ESTIMATORS
from camshaft.config.schema.fields import KLPenalty, Says, Section, Text

EstimatorName = Annotated[Text, Says(f"one of {', '.join(ESTIMATORS)}, or package.module:function")]
GROUP_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus_baseline", "opo")
"""These compare the responses to one prompt with each other, so they need rollout.n > 1."""


RejectionRule = Literal[
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
]  # fmt: skip


def _as_list(value: Any) -> Any:
    """`a,b` and `[a, b]` are two, `a` is one, null is none; numbers are taken as they are written."""
    if value is None:
        return ()
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, Sequence) else (value,)
    return tuple(part if isinstance(part, bool) else str(part).strip() for part in parts)


RejectionRules = Annotated[
    tuple[RejectionRule, ...],
    BeforeValidator(_as_list),
    Says(f"null, or one or a list of {', '.join(get_args(RejectionRule))}"),
]
Thresholds = Annotated[
    tuple[str, ...], BeforeValidator(_as_list), Says("null, or for each rule a number, or low-high such as 0.5-2.0")
]

_TWO = re.compile(r"(?<![eE])[-_]")
"""Between low and high. `_` as others write it is in a command line part of a number: 1.0_2 is 1.02 there."""


def threshold(rule: str, text: str) -> tuple[float, float]:
    """(low, high) of one rejection rule; a ValueError says what it must be.

    A ratio (k1) has two sides, and high alone stands for 1/high .. high; a divergence (k2, k3) has no lower one.
    """
    ratio = rule.endswith("k1")
    try:
        parts = [float(part) for part in _TWO.split(text.strip())]
    except ValueError:  # one that is empty, before a minus, among them
        parts = []
    parts = parts if all(math.isfinite(part) for part in parts) else []
    if ratio and len(parts) == 2 and 0 <= parts[0] < parts[1]:
        return parts[0], parts[1]
    if ratio and len(parts) == 1 and parts[0] >= 1:
        return 1 / parts[0], parts[0]
    if not ratio and len(parts) == 1 and parts[0] >= 0:
        return 0.0, parts[0]
    if ratio:
        raise ValueError("must be the largest ratio, 1 or more, or the least and the largest such as 0.5-2.0")
    raise ValueError("must be the largest divergence, one number of 0 or more such as 0.01")


class RolloutCorrectionConfig(Section):
    """What the actor's loss does where the generator's log-probs are not the trainer's; all off by default."""

    rollout_is: Literal["token", "sequence"] | None = Field(
        description="Weigh samples by their importance, truncated, token by token or a response as a whole; null: off."
    )
    rollout_is_threshold: float = Field(gt=0, description="Largest of these weights; larger ones are cut to it.")
    rollout_is_batch_normalize: bool = Field(description="Divide the weights by their mean over the iteration.")
    rollout_rs: RejectionRules = Field(
        description="Leave tokens or responses out of the loss that differ too much: token_* looks at tokens, seq_* at "
        "responses; *_k1 bounds the ratio of probabilities, *_k2 and *_k3 a divergence. Several must all hold."
    )
    rollout_rs_threshold: Thresholds = Field(
        description="What each rule allows, or one for all of a kind: for k1 a ratio, 2.0 for 1/2 .. 2 or 0.5-2.0; "
        "for k2 and k3 the largest divergence. A list has one for each rule."
    )
    bypass_mode: bool = Field(
        description="The generator's log-probs are the old ones of the loss and of the KL in the reward; the trainer's "
        "own are not computed."
    )

    def is_on(self) -> bool:
        """Whether anything is corrected."""
        return self.rollout_is is not None or bool(self.rollout_rs)

    def rejections(self) -> tuple[tuple[str, tuple[float, float]], ...]:
        """Each rule with its (low, high)."""
        texts = self.rollout_rs_threshold
        texts = texts * len(self.rollout_rs) if len(texts) == 1 else texts
        return tuple((rule, threshold(rule, text)) for rule, text in zip(self.rollout_rs, texts, strict=True))


class KLCtrlConfig(Section):
    """Weight of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = Field(description="Constant, or steered towards target_kl.")
    kl_coef: float = Field(ge=0, description="The weight; where an adaptive one starts.")
    horizon: int = Field(ge=1, description="Adaptive: sequences over which the weight moves; larger is slower.")
    target_kl: float = Field(gt=0, description="Adaptive: the divergence to keep.")


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO): train on prompts alone whose responses differ in what they are worth."""

    enable: bool = Field(
        description="Drop prompts whose responses are all worth the same, and generate for further prompts until "
        "data.train_batch_size of them are left."
    )
    metric: Text = Field(
        description="What must differ: seq_reward (what the advantages are made of), score (the same before the "
        "penalty of reward_model.overlong_buffer), or a number of the reward function's results, such as acc. "
        "seq_final_reward is seq_reward."
    )
    max_num_gen_batches: int = Field(
        ge=0, description="Most batches of data.gen_batch_size prompts in one iteration, then it is an error; 0: any."
    )


class AlgorithmConfig(Section):
    """Advantages and the KL penalty in the reward."""

    gamma: float = Field(ge=0, le=1, description="Discount per token.")
    lam: float = Field(ge=0, le=1, description="GAE: 0 trusts the critic, 1 the observed rewards.")
    adv_estimator: EstimatorName = Field(description="How advantages are computed; see algorithms.md.")
    norm_adv_by_std_in_grpo: bool = Field(
        description="GRPO: divide by the group's standard deviation; Dr.GRPO does not."
    )
    kl_penalty: KLPenalty = Field(
        description="Estimator of the KL divergence between actor and reference; full is exact, over the vocabulary."
    )
    use_kl_in_reward: bool = Field(description="Subtract the KL divergence from the reward of every token.")
    kl_ctrl: KLCtrlConfig = Field(description="Weight of that KL divergence.")
    filter_groups: FilterGroupsConfig = Field(description="Dynamic sampling; see algorithms.md.")
    rollout_correction: RolloutCorrectionConfig = Field(
        description="What to do where generator and trainer differ; see mismatch.md."
    )
