"""Find out why a step gives the policy no signal, from the metrics of the step. Neither trainer nor torch is needed.

    cause = find_cause(metrics, config.algorithm.adv_estimator, SeenScores(lowest=0.0, highest=1.0, recent=1.0))
    cause.kind, cause.text

A step has no signal if no token has a coefficient other than 0 in the policy loss (the metric `actor/signal_share` is
0). The trainer and the advice on a run report the cause.
"""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from camshaft.config.schema.algorithm import ESTIMATORS, estimator_inputs
from camshaft.tracking.console import format_number

SHARE = "actor/signal_share"
PATIENCE = 3
"""Number of consecutive steps without a signal after which the cause is reported."""
MAX_EMPTY_LENGTH = 1.5
"""Mean length in tokens below which most responses are empty, if they do not end at the length limit."""

Kind = Literal["masked", "empty", "solved", "equal scores", "single responses", "equal groups", "estimator"]


class SeenScores(NamedTuple):
    """Scores of responses in the steps of a run."""

    lowest: float
    highest: float
    recent: float
    """The lowest score since the last step with a signal."""


class Cause(NamedTuple):
    """Reason why a step has no signal, and what to try."""

    kind: Kind
    text: str


def find_cause(metrics: Mapping[str, float], estimator: str, seen: SeenScores) -> Cause:
    """Return the cause for a step without a signal.

    The prompts are solved if all responses since the last step with a signal have the highest score of the run, this
    score is positive, and other responses had a lower one before. A score that never differs proves nothing, and a
    highest score of 0 often means that silence avoids all penalties.
    """
    if metrics.get("critic/advantages/min") or metrics.get("critic/advantages/max"):
        rejected = metrics.get("rollout_corr/rollout_rs_masked_fraction", 0.0)
        return Cause(
            "masked",
            "the mask or the weight of every token with an advantage is 0; rollout correction rejects "
            f"{rejected:.0%} of the tokens. Compare trainer and generator with `camshaft parity`, or widen "
            "algorithm.rollout_correction.rollout_rs_threshold",
        )
    lowest, highest = metrics.get("critic/score/min"), metrics.get("critic/score/max")
    if lowest is None or highest is None:
        return Cause("masked", "all tokens are masked. Check the mask of the responses")
    score = format_number(highest)
    length = metrics.get("response_length/mean", math.inf)
    if are_empty(length, metrics.get("response_length/clip_ratio", 0.0)):
        return Cause(
            "empty",
            f"the responses are empty ({format_number(length)} tokens on average), with scores up to {score}. Give an "
            "empty response a lower score than any other, and weaken penalties of length",
        )
    if seen.lowest < seen.recent == seen.highest > 0:
        return Cause("solved", f"every response has the highest score of the run, {score}: the prompts are solved")
    if lowest == highest:
        since = " in all steps" if seen.lowest == seen.highest else ""
        return Cause(
            "equal scores",
            f"all scores are equal ({score}{since}): the prompts are too hard or too easy, or the reward does not "
            "depend on the response. Check it with `camshaft check-data`, read responses, or use other prompts",
        )
    share = metrics.get("groups/same_share")
    if share is None and estimator_inputs(estimator).groups:
        return Cause(
            "single responses",
            f"the scores differ, but each prompt has a single response, which algorithm.adv_estimator={estimator} "
            "compares with itself. Increase actor_rollout_ref.rollout.n, for example to 8",
        )
    if share == 1:
        return Cause(
            "equal groups",
            "the responses to each prompt have equal scores. Increase actor_rollout_ref.rollout.n or its temperature, "
            "use other prompts, or a reward that depends on the response",
        )
    problem = f"algorithm.adv_estimator={estimator} returns advantages of 0, although the scores differ"
    fix = "Increase actor_rollout_ref.rollout.n, or use algorithm.adv_estimator=grpo"
    return Cause("estimator", f"{problem}. {fix if estimator in ESTIMATORS else 'Correct it'}")


def explain_equal_advantages(metrics: Mapping[str, float], estimator: str) -> str | None:
    """Return why an update does not distinguish the responses of a step: all advantages are equal, and not 0."""
    lowest, highest = metrics.get("critic/advantages/min", 0.0), metrics.get("critic/advantages/max", 0.0)
    if lowest != highest or not highest or metrics.get("critic/score/min") == metrics.get("critic/score/max"):
        return None
    return (
        f"all advantages are {format_number(highest)}, although the scores differ, so the update does not distinguish "
        f"the responses. Correct algorithm.adv_estimator={estimator}, or increase actor_rollout_ref.rollout.n if it "
        "compares the responses to a prompt"
    )


def are_empty(length: float, clip_ratio: float) -> bool:
    """Return True if most responses end with their only token, rather than at the length limit."""
    return length < MAX_EMPTY_LENGTH and clip_ratio < 0.5
