"""Section `actor_rollout_ref.actor.policy_loss`: the policy loss and its parameters."""

from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, NonNegativeFloat, PositiveFloat

from camshaft.config.errors import Problem
from camshaft.config.schema.fields import (
    Described,
    Fraction,
    LossAggMode,
    PositiveFraction,
    Section,
    Text,
    Unread,
    key,
)


class PolicyLossInputs(NamedTuple):
    """Settings that a policy loss reads."""

    clip: bool = True
    """The clip ranges."""
    dual: bool = False
    """`clip_ratio_c`."""
    aggregation: LossAggMode = "token-mean"
    """Aggregation in which the paper defines the loss."""
    per_response: bool = False
    """All tokens of a response share one ratio, so no other aggregation is valid."""


POLICY_LOSSES: dict[str, PolicyLossInputs] = {
    "vanilla": PolicyLossInputs(dual=True),
    "gspo": PolicyLossInputs(aggregation="seq-mean-token-mean", per_response=True),
    "geo_mean": PolicyLossInputs(aggregation="seq-mean-token-mean", per_response=True),
    "cispo": PolicyLossInputs(),
    "sapo": PolicyLossInputs(clip=False, aggregation="seq-mean-token-mean"),
    "dppo_tv": PolicyLossInputs(dual=True),
    "dppo_kl": PolicyLossInputs(dual=True),
    "gpg": PolicyLossInputs(clip=False),
    "dro": PolicyLossInputs(clip=False),
    "clip_cov": PolicyLossInputs(),
    "kl_cov": PolicyLossInputs(clip=False),
}
"""Built-in policy losses. Their functions are in `camshaft.algorithms`.

The config must not import torch, so the names are repeated here. A test compares them with the functions.
"""


def policy_loss_inputs(name: str) -> PolicyLossInputs:
    """Return the settings that a policy loss reads. One that is not built in may read those of the PPO loss."""
    return POLICY_LOSSES.get(name, PolicyLossInputs(dual=True))


def _loss_name(value: object) -> object:
    """Accept hyphens in the names of built-in losses, and `gmpo` for `geo_mean`."""
    name = str(value).replace("-", "_")
    name = "geo_mean" if name == "gmpo" else name
    return name if name in POLICY_LOSSES else value


def _parameter_of(*losses: str) -> Unread:
    """Return the condition of a key that is a parameter of some built-in losses."""
    others = set(POLICY_LOSSES) - set(losses)
    fix = f"set [loss_mode]={losses[0]}, or omit the key"
    return Unread(lambda section: section.loss_mode in others, "{loss_mode}", fix)


PolicyLossName = Annotated[
    Text, BeforeValidator(_loss_name), Described(f"one of {', '.join(POLICY_LOSSES)}, or package.module:function")
]


class PolicyLossConfig(Section):
    loss_mode: PolicyLossName = key("vanilla", "Policy loss. vanilla is the clipped PPO loss. See algorithms.md.")
    tau_pos: PositiveFloat = key(
        1.0,
        "Temperature of the soft gate of sapo for tokens with a positive advantage. Larger values reduce the gradient "
        "of tokens whose probability has changed more strongly.",
        unread=_parameter_of("sapo"),
    )
    tau_neg: PositiveFloat = key(
        1.05, "Temperature of the soft gate of sapo for the other tokens.", unread=_parameter_of("sapo")
    )
    dro_beta: PositiveFloat | None = key(
        None,
        "Coefficient of the quadratic penalty of dro, which must be set: the loss is smallest where the log-prob has "
        "changed by advantage / dro_beta.",
        unread=_parameter_of("dro"),
    )

    clip_cov_ratio: PositiveFraction = key(
        2e-4,
        "Fraction of the tokens of a mini-batch, at least one, that clip_cov leaves out of the loss.",
        unread=_parameter_of("clip_cov"),
    )
    clip_cov_lb: float = key(
        1.0,
        "Lower bound of the covariance of log-prob and advantage of the tokens that clip_cov leaves out.",
        unread=_parameter_of("clip_cov"),
    )
    clip_cov_ub: float = key(
        5.0, "Upper bound of the covariance of the tokens that clip_cov leaves out.", unread=_parameter_of("clip_cov")
    )
    kl_cov_ratio: PositiveFraction = key(
        2e-4,
        "Fraction of the tokens of a mini-batch, at least one, whose change kl_cov penalizes: those with the largest "
        "covariance of log-prob and advantage.",
        unread=_parameter_of("kl_cov"),
    )
    ppo_kl_coef: NonNegativeFloat = key(
        0.1, "Coefficient of the penalty of kl_cov, |log pi - log pi_old|.", unread=_parameter_of("kl_cov")
    )
    top_entropy_quantile: Fraction = key(
        1.0,
        "Fraction of the tokens of a mini-batch, those of highest entropy before the update, that the policy loss "
        "includes. 1 includes all.",
    )

    def problems(self) -> Iterator[Problem]:
        if self.loss_mode == "dro" and self.dro_beta is None:
            message = "is required with [loss_mode]=dro. Set [dro_beta]=0.1."
            yield Problem("dro_beta", None, message, ("loss_mode",))
        if self.loss_mode == "clip_cov" and self.clip_cov_lb >= self.clip_cov_ub:
            message = f"must be less than [clip_cov_ub]={self.clip_cov_ub:g}. Set [clip_cov_lb]=1.0 [clip_cov_ub]=5.0."
            yield Problem("clip_cov_lb", self.clip_cov_lb, message, ("clip_cov_ub",))
        if self.loss_mode == "geo_mean" and self.top_entropy_quantile < 1:
            message = "geo_mean has one loss per response, which includes all tokens. Set [top_entropy_quantile]=1."
            yield Problem("top_entropy_quantile", self.top_entropy_quantile, message, ("loss_mode",))

    def selects_by_covariance(self) -> bool:
        """Return True if the loss reads the column `selected_tokens`."""
        return self.loss_mode in ("clip_cov", "kl_cov")

    def parameters(self) -> dict[str, Any]:
        """Return the keyword arguments that only the function of this loss has."""
        if self.loss_mode == "sapo":
            return {"tau": (self.tau_pos, self.tau_neg)}
        return {"dro_beta": self.dro_beta} if self.loss_mode == "dro" else {}
