"""Section `algorithm`: advantage estimation, KL penalty, dynamic sampling and rollout correction."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import AfterValidator, BeforeValidator, NonNegativeFloat, NonNegativeInt, PositiveFloat

from camshaft.config.errors import Problem
from camshaft.config.guards import is_list
from camshaft.config.schema.fields import (
    Count,
    Described,
    Fraction,
    KLPenaltyName,
    Names,
    Numbers,
    Section,
    Text,
    Unread,
    key,
    section,
    unless,
)


class EstimatorInputs(NamedTuple):
    """Inputs of an advantage estimator, besides rewards and mask."""

    values: bool = False
    """Values of a critic."""
    groups: bool = False
    """Groups of responses to the same prompt, which the estimator compares. This requires `rollout.n > 1`."""
    baselines: bool = False
    """Rewards of greedy responses."""
    reward_parts: bool = False
    """Several rewards of each response."""
    probabilities: bool = False
    """Log-probs of the policy before the update, and the sum of its squared probabilities over the vocabulary."""
    keys: tuple[str, ...] = ()
    """Keys of the section `algorithm` that its formula contains."""


ESTIMATORS: dict[str, EstimatorInputs] = {
    "gae": EstimatorInputs(values=True, keys=("gamma", "lam")),
    "grpo": EstimatorInputs(groups=True, keys=("norm_adv_by_std_in_grpo",)),
    "rloo": EstimatorInputs(groups=True),
    "reinforce_plus_plus": EstimatorInputs(keys=("gamma",)),
    "reinforce_plus_plus_baseline": EstimatorInputs(groups=True),
    "remax": EstimatorInputs(baselines=True),
    "opo": EstimatorInputs(groups=True),
    "grpo_passk": EstimatorInputs(groups=True, keys=("norm_adv_by_std_in_grpo",)),
    "gdpo": EstimatorInputs(
        groups=True,
        reward_parts=True,
        keys=("norm_adv_by_std_in_grpo", "gdpo_reward_keys", "gdpo_reward_weights"),
    ),
    "turn_return": EstimatorInputs(groups=True, keys=("gamma", "norm_adv_by_std_in_grpo")),
    "gpg": EstimatorInputs(groups=True),
    "maxrl": EstimatorInputs(groups=True),
    "optimal_token_baseline": EstimatorInputs(groups=True, probabilities=True),
    "tir_optimal_token_baseline": EstimatorInputs(groups=True, probabilities=True),
}
"""Built-in estimators. Their functions are in `camshaft.algorithms`.

The config must not import torch, so the names are repeated here. A test compares them with the functions.
"""


def estimator_inputs(name: str) -> EstimatorInputs:
    """Return the inputs of an estimator. One that is not built in is assumed to compare the responses to a prompt.

    Its module, which imports torch, is not loaded to find out. The wrong assumption costs some variety of the prompts
    in a step, whereas an estimator that compares a single response with itself learns nothing.
    """
    return ESTIMATORS.get(name, EstimatorInputs(groups=True))


EstimatorName = Annotated[Text, Described(f"one of {', '.join(ESTIMATORS)}, or package.module:function")]

RejectionRule = Literal[
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
]  # fmt: skip


def _as_list(value: Any) -> Any:
    """Convert `a,b`, `[a, b]`, `a` or null to a tuple of strings. Numbers become strings too."""
    if value is None:
        return ()
    parts = value.split(",") if isinstance(value, str) else value if is_list(value) else (value,)
    return tuple(part if isinstance(part, bool) else str(part).strip() for part in parts)


RejectionRules = Annotated[
    tuple[RejectionRule, ...],
    BeforeValidator(_as_list),
    Described(f"null, or one or more of {', '.join(get_args(RejectionRule))}"),
]
Thresholds = Annotated[
    tuple[str, ...], BeforeValidator(_as_list), Described("null, or for each rule a number or a range such as 0.5-2.0")
]

_RANGE_SEPARATOR = re.compile(r"(?<![eE])[-_]")
"""Separator of the two numbers of a range. Prefer `-`, because the command line reads 1.0_2 as the number 1.02."""


def _numbers(text: str) -> list[float]:
    """Return the numbers that `_RANGE_SEPARATOR` separates, or an empty list if one of them is not finite."""
    try:
        numbers = [float(part) for part in _RANGE_SEPARATOR.split(text.strip())]
    except ValueError:  # not a number, or an empty string before a leading minus sign
        return []
    return numbers if all(math.isfinite(number) for number in numbers) else []


def parse_weight_threshold(value: float | str) -> tuple[float, float]:
    """Return the (low, high) bounds of importance weights. A number is the upper bound, and `low` is then 0.

    Malformed values raise a `ValueError`.
    """
    numbers = _numbers(str(value))
    if len(numbers) == 1 and numbers[0] > 0:
        return 0.0, numbers[0]
    if len(numbers) == 2 and 0 < numbers[0] < numbers[1]:
        return numbers[0], numbers[1]
    raise ValueError("must be a number > 0, or a range such as 0.5-5.0")


def _weight_threshold(value: float | str) -> float | str:
    parse_weight_threshold(value)
    return value


WeightThreshold = Annotated[
    float | str, AfterValidator(_weight_threshold), Described("a number > 0, or a range such as 0.5-5.0")
]


def parse_threshold(rule: str, text: str) -> tuple[float, float]:
    """Return the (low, high) bounds that `text` describes for a rejection rule.

    A ratio (k1) has two bounds, and a single number `high` stands for the range [1/high, high]. A divergence (k2, k3)
    has only an upper bound, so `low` is 0. Malformed text raises a `ValueError`.
    """
    ratio, parts = rule.endswith("k1"), _numbers(text)
    if ratio and len(parts) == 2 and 0 <= parts[0] < parts[1]:
        return parts[0], parts[1]
    if ratio and len(parts) == 1 and parts[0] >= 1:
        return 1 / parts[0], parts[0]
    if not ratio and len(parts) == 1 and parts[0] >= 0:
        return 0.0, parts[0]
    if ratio:
        raise ValueError("must be a maximum ratio >= 1, or a range such as 0.5-2.0")
    raise ValueError("must be a maximum divergence, one number >= 0 such as 0.01")


_WITHOUT_WEIGHTS = Unread(
    lambda correction: correction.rollout_is is None, "{rollout_is}", "set [rollout_is]=token, or omit the key"
)
_RATIO_IS_WEIGHT = Unread(
    lambda correction: correction.bypass_mode and correction.loss_type == "ppo_clip",
    "{bypass_mode} {loss_type}, whose ratio is the importance weight",
    "set [loss_type]=reinforce (or interpolated, for stale responses), or omit the key",
)
_FIXED_COEFFICIENT = Unread(lambda ctrl: ctrl.type == "fixed", "{type}", "set [type]=adaptive, or omit the key")


def _not_in_formula(name: str, note: str, fix: str) -> Unread:
    """Return the condition of a key that the formula of a built-in estimator does not contain."""
    lacking = [estimator for estimator, inputs in ESTIMATORS.items() if name not in inputs.keys]
    return Unread(lambda algorithm: algorithm.adv_estimator in lacking, f"{{adv_estimator}}{note}", fix)


class RolloutCorrectionConfig(Section):
    """Corrections for the mismatch between the log-probs of the rollout and the trainer. Disabled by default."""

    rollout_is: Literal["token", "sequence"] | None = key(
        None,
        "Truncated importance sampling: weight the policy loss by the ratio of trainer to rollout probabilities, per "
        "token (token) or per response (sequence). null disables the weights.",
        unread=_RATIO_IS_WEIGHT,
    )
    rollout_is_threshold: WeightThreshold = key(
        2.0,
        "Upper bound of the importance weights. Larger weights are truncated to this value. A range such as 0.5-5.0 "
        "sets the weights outside it to 0 instead (IcePop).",
        unread=(_RATIO_IS_WEIGHT, _WITHOUT_WEIGHTS),
    )
    rollout_is_batch_normalize: bool = key(
        False,
        "Divide the importance weights by their mean over the iteration. With bypass_mode, the mean is that of the "
        "policy before the update, which takes a forward pass.",
        unread=(_RATIO_IS_WEIGHT, _WITHOUT_WEIGHTS),
    )
    rollout_rs: RejectionRules = key(
        None,
        "Rejection sampling: rules that mask tokens (token_*) or whole responses (seq_*) out of the loss. *_k1 rules "
        "bound the ratio of trainer to rollout probabilities; *_k2 and *_k3 rules bound a divergence estimate. A "
        "token or response is kept only if it satisfies all rules. null disables rejection.",
    )
    rollout_rs_threshold: Thresholds = key(
        None,
        "Thresholds of the rejection rules: one value per rule, or a single value for all rules of the same kind. A "
        "k1 threshold is a range of ratios such as 0.5-2.0, or its upper end (2.0 means 0.5-2.0). A k2 or k3 "
        "threshold is the maximum divergence.",
    )
    bypass_mode: bool = key(
        False,
        "Use the rollout's log-probs as old log-probs in the policy loss and in the KL penalty, instead of "
        "recomputing them with the trainer.",
    )
    loss_type: Literal["ppo_clip", "interpolated", "reinforce"] = key(
        "ppo_clip",
        "Policy loss with bypass_mode=true. ppo_clip is the loss of actor.policy_loss, whose ratio is that of current "
        "policy to rollout. interpolated is the same loss with the ratio of current policy to an estimate of the "
        "policy before the update, weighted by the ratio of this estimate to the rollout; it requires stale "
        "responses (async_training.max_staleness) and rollout_is. reinforce is the policy gradient, weighted by the "
        "ratio of current policy to rollout with rollout_is.",
        unread=unless("bypass_mode", harmless=("ppo_clip",)),
    )

    def problems(self) -> Iterator[Problem]:
        if self.interpolates() and self.rollout_is is None:
            message = "weights the loss by the ratio of the estimated policy to the rollout. Set [rollout_is]=token."
            yield Problem("loss_type", self.loss_type, message, ("rollout_is",))
        if self.interpolates() and self.rollout_is_batch_normalize:
            message = (
                "takes the mean weight of the policy before the update, whose forward pass loss_type=interpolated "
                "saves. Set [rollout_is_batch_normalize]=false."
            )
            yield Problem("rollout_is_batch_normalize", True, message, ("loss_type",))
        rules, texts, key, related = self.rollout_rs, self.rollout_rs_threshold, "rollout_rs_threshold", ("rollout_rs",)
        if rules and not texts:
            example = "2.0" if rules[0].endswith("k1") else "0.01"
            yield Problem(key, None, f"a threshold is required for {', '.join(rules)}. Set [{key}]={example}.", related)
        elif texts and not rules:
            yield Problem(key, texts, f"has no effect without [rollout_rs]. Set [{key}]=null.", related)
        elif len(texts) not in (1, len(rules)):
            counts = f"{len(texts)} values are set for {len(rules)} rules"
            yield Problem(key, texts, f"{counts}. Set one value for all rules, or one per rule.", related)
        elif len(texts) < len(rules) and len({rule.endswith("k1") for rule in rules}) == 2:
            values = ",".join("2.0" if rule.endswith("k1") else "0.01" for rule in rules)
            message = (
                "a single value cannot apply to both ratios (k1) and divergences (k2, k3). Set one "
                f"value per rule: '[{key}]=[{values}]'."
            )
            yield Problem(key, texts, message, related)
            return
        for rule, text in zip(rules, texts * len(rules) if len(texts) == 1 else texts, strict=False):
            try:
                parse_threshold(rule, text)
            except ValueError as error:
                yield Problem(key, text, f"the threshold of {rule} {error}.", related)

    def interpolates(self) -> bool:
        """Return True if the loss estimates the policy before the update, between rollout and current policy."""
        return self.bypass_mode and self.loss_type == "interpolated"

    def is_enabled(self) -> bool:
        """Return True if importance weights or rejection masks are computed from old log-probs, before the update."""
        return not self.bypass_mode and (self.rollout_is is not None or bool(self.rollout_rs))

    def is_weighted_in_update(self) -> bool:
        """Return True if the loss computes importance weights from the log-probs of the current policy."""
        return self.bypass_mode and self.loss_type != "ppo_clip" and self.rollout_is is not None

    def needs_mean_weight(self) -> bool:
        """Return True if weights that are computed in the update are divided by their mean over the iteration.

        The mean must be known before, so it is that of the policy before the update.
        """
        return self.is_weighted_in_update() and self.rollout_is_batch_normalize

    def weight_bounds(self) -> tuple[float, float]:
        """Return the (low, high) bounds of importance weights. If `low` is above 0, weights outside of them are 0."""
        return parse_weight_threshold(self.rollout_is_threshold)

    def rejection_bounds(self) -> tuple[tuple[str, tuple[float, float]], ...]:
        """Return each rejection rule and its (low, high) bounds."""
        texts = self.rollout_rs_threshold
        texts = texts * len(self.rollout_rs) if len(texts) == 1 else texts
        return tuple((rule, parse_threshold(rule, text)) for rule, text in zip(self.rollout_rs, texts, strict=True))


class KLCtrlConfig(Section):
    type: Literal["fixed", "adaptive"] = key(
        "fixed",
        "fixed keeps kl_coef constant; adaptive adjusts it so that the measured KL divergence approaches target_kl.",
    )
    kl_coef: NonNegativeFloat = key(0.005, "KL coefficient, or its initial value with type=adaptive.")
    horizon: Count = key(
        10000,
        "Horizon of the adaptive coefficient in sequences. Larger values adapt it more slowly.",
        unread=_FIXED_COEFFICIENT,
    )
    target_kl: PositiveFloat = key(0.1, "Target KL divergence of the adaptive coefficient.", unread=_FIXED_COEFFICIENT)


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO): train only on prompts whose responses have different rewards."""

    enable: bool = key(
        False,
        "Drop prompts whose responses all have the same value of metric, and generate responses to further prompts "
        "until data.train_batch_size prompts remain.",
    )
    metric: Text = key(
        "seq_reward",
        "Value that must differ between the responses to a prompt: seq_reward, the reward before the KL penalty "
        "(alias seq_final_reward); score, the reward before the penalty of reward_model.overlong_buffer; or a number "
        "that the scoring function returns, such as acc.",
        unread=unless("enable"),
    )
    max_num_gen_batches: NonNegativeInt = key(
        0,
        "Maximum number of generation batches (data.gen_batch_size prompts each) per iteration. The run stops with "
        "an error if an iteration needs more. 0 sets no limit.",
        unread=unless("enable"),
    )


class AlgorithmConfig(Section):
    gamma: Fraction = key(
        1.0,
        "Discount factor per token.",
        unread=_not_in_formula("gamma", ", which does not discount rewards", "omit the key"),
        alias="gemma",
    )
    lam: Fraction = key(
        1.0,
        "Lambda of generalized advantage estimation. 0 uses one-step temporal differences of the critic's values; 1 "
        "uses the observed returns.",
        unread=_not_in_formula("lam", "", "set [adv_estimator]=gae, or omit the key"),
    )
    adv_estimator: EstimatorName = key(
        "gae",
        "Advantage estimator. gae requires a critic. See algorithms.md.",
        short=("algorithm", "ppo, grpo, rloo, dapo, ...; see below"),
    )
    norm_adv_by_std_in_grpo: bool = key(
        True,
        "Divide the advantages of grpo, grpo_passk and gdpo by the standard deviation of the rewards in the group. "
        "false with grpo corresponds to Dr.GRPO.",
        unread=_not_in_formula("norm_adv_by_std_in_grpo", "", "set [adv_estimator]=grpo, or omit the key"),
    )
    gdpo_reward_keys: Names = key(
        [],
        "Rewards that adv_estimator=gdpo normalizes separately: numbers that the reward function returns in a dict, or "
        "score. An empty list means the functions of custom_reward_function.functions, with their weights.",
        unread=_not_in_formula("gdpo_reward_keys", "", "set [adv_estimator]=gdpo, or omit the key"),
    )
    gdpo_reward_weights: Numbers = key(
        [],
        "Weight of each reward in gdpo_reward_keys. An empty list means a weight of 1 for each.",
        unread=_not_in_formula("gdpo_reward_weights", "", "set [adv_estimator]=gdpo, or omit the key"),
    )
    kl_penalty: KLPenaltyName = key(
        "kl",
        "Estimator of the KL divergence from the reference policy in the reward. full computes the exact divergence "
        "over the vocabulary.",
        unread=unless("use_kl_in_reward"),
    )
    use_kl_in_reward: bool = key(
        False,
        "Subtract the KL divergence from the reference policy, multiplied by the KL coefficient, from the reward of "
        "each token.",
    )
    kl_ctrl: KLCtrlConfig = section("Coefficient of the KL penalty in the reward.", unread=unless("use_kl_in_reward"))
    filter_groups: FilterGroupsConfig = section("Dynamic sampling (DAPO). See algorithms.md.")
    rollout_correction: RolloutCorrectionConfig = section(
        "Corrections for the difference between the log-probs of the rollout and the trainer. See mismatch.md."
    )

    def problems(self) -> Iterator[Problem]:
        names, weights = self.gdpo_reward_keys, self.gdpo_reward_weights
        if len(set(names)) < len(names):
            yield Problem("gdpo_reward_keys", names, "names a reward twice. Name each once.")
        elif weights and len(weights) != len(names):
            message = (
                f"has {len(weights)} numbers for {len(names)} rewards. Set one weight for each of [gdpo_reward_keys]."
            )
            yield Problem("gdpo_reward_weights", weights, message, ("gdpo_reward_keys",))

    def reward_parts(self, functions: Mapping[str, float]) -> dict[str, float]:
        """Return the rewards that the estimator reads separately, with their weights.

        `functions` maps the names of several scoring functions to their weights, the default of GDPO. An estimator that
        is not built in reads the rewards in `gdpo_reward_keys`.
        """
        names, inputs = self.gdpo_reward_keys, ESTIMATORS.get(self.adv_estimator)
        if inputs is not None and not inputs.reward_parts:
            return {}
        if names or inputs is None:
            weights = self.gdpo_reward_weights or [1.0] * len(names)
            return dict(zip(names, weights, strict=False))  # `problems` checks the lengths
        return dict(functions)
