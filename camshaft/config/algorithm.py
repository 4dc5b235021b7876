"""Section `algorithm`: how rewards become advantages."""

from typing import Literal

from pydantic import Field

from camshaft.config.fields import KLPenalty, Section

Estimator = Literal[
    "gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo"
]  # fmt: skip
GROUP_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus_baseline", "opo")
"""These compare the responses to one prompt with each other, so they need rollout.n > 1."""


class KLCtrlConfig(Section):
    """Weight of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = Field(description="Constant, or steered towards target_kl.")
    kl_coef: float = Field(ge=0, description="The weight; where an adaptive one starts.")
    horizon: int = Field(ge=1, description="Adaptive: sequences over which the weight moves; larger is slower.")
    target_kl: float = Field(gt=0, description="Adaptive: the divergence to keep.")


class AlgorithmConfig(Section):
    """Advantages and the KL penalty in the reward."""

    gamma: float = Field(ge=0, le=1, description="Discount per token.")
    lam: float = Field(ge=0, le=1, description="GAE: 0 trusts the critic, 1 the observed rewards.")
    adv_estimator: Estimator = Field(description="How advantages are computed; gae alone needs the critic.")
    norm_adv_by_std_in_grpo: bool = Field(description="GRPO: divide by the group's standard deviation.")
    kl_penalty: KLPenalty = Field(description="Estimator of the KL divergence between actor and reference.")
    use_kl_in_reward: bool = Field(description="Subtract the KL divergence from the reward of every token.")
    kl_ctrl: KLCtrlConfig = Field(description="Weight of that KL divergence.")
