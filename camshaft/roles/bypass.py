"""Rollout correction in bypass mode, in which the loss compares the current policy with the rollout.

    bypass = BypassCorrection.of(config.algorithm.rollout_correction)
    old_log_probs, counts, weights, metrics = bypass.apply(log_probs, data, counts)

The old log-probs are those of the rollout, so the difference from the current policy is known only in the update. A
token that is rejected has no policy loss, but remains in the counts of its mini-batch.
"""

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from camshaft.algorithms import Counts, accept_tokens, aggregate, importance_weights, interpolated_log_probs
from camshaft.config import RolloutCorrectionConfig
from camshaft.dataproto import DataProto


@dataclass(frozen=True)
class BypassCorrection:
    """Importance weights and rejection rules that the loss applies."""

    correction: RolloutCorrectionConfig

    @classmethod
    def of(cls, correction: RolloutCorrectionConfig) -> Self | None:
        """Return None if the loss applies neither weights nor rules."""
        applies = correction.bypass_mode and (correction.is_weighted_in_update() or correction.rollout_rs)
        return cls(correction) if applies else None

    def apply(
        self, log_probs: Tensor, data: DataProto, counts: Counts
    ) -> tuple[Tensor, Counts, Tensor | None, dict[str, Tensor]]:
        """Return what a policy loss reads of a micro-batch.

        These are the log-probs to which the ratio refers, the counts without rejected tokens, the weights, and metrics
        (as shares). With `loss_type=interpolated`, the ratio refers to the estimated policy before the update, and
        weights and rules compare it with the rollout. Otherwise, the current policy is compared with the rollout.
        """
        train, old = log_probs.detach(), data["old_log_probs"].values
        flat = (train, old, counts.mask, counts.lengths)
        if self.correction.interpolates():
            estimate = interpolated_log_probs(train, old, data["policy_ages"].values)
            flat, old = (estimate, *flat[1:]), estimate
        weights, metrics = None, dict[str, Tensor]()
        if self.correction.is_weighted_in_update():
            assert self.correction.rollout_is is not None
            lower, threshold = self.correction.weight_bounds()
            weights = importance_weights(*flat, level=self.correction.rollout_is, threshold=threshold, lower=lower)
            if self.correction.needs_mean_weight():
                weights = weights / data["rollout_is_mean"].repeat_interleave(counts.lengths, output_size=len(weights))
            metrics["rollout_is_mean"] = aggregate(weights, counts, "token-mean")
        accepted, rules = counts.mask, self.correction.rejection_bounds()
        for rule, bounds in rules:
            kept = accept_tokens(*flat, rule, bounds)
            accepted = accepted & kept
            if len(rules) > 1:
                metrics[f"rollout_rs_{rule}_masked_fraction"] = aggregate((~kept).float(), counts, "token-mean")
        if rules:
            metrics["rollout_rs_masked_fraction"] = aggregate((~accepted).float(), counts, "token-mean")
        return old, replace(counts, mask=accepted), weights, metrics
