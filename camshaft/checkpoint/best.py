"""The best step so far by a validation metric.

    best = BestStep("val-core/gsm8k/reward/mean", "max")
    best.offer({"val-core/gsm8k/reward/mean": 0.5, ...}, step=20)      # True: the best so far, to be saved
    best.step                                                          # 20, which retention keeps

Among equal values the earliest step is the best, and nan never is. The validation before training (step 0) only checks
that the metric exists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from camshaft.config.tree import nearest_keys
from camshaft.errors import ConfigError


class BestStep:
    """Track the best step; `step` is None before the first offer and without a metric."""

    def __init__(self, metric: str | None, mode: str):
        self.metric, self.mode = metric, mode
        self.step: int | None = None
        self.value = math.nan

    def offer(self, metrics: Mapping[str, float], step: int) -> bool:
        """Record a validation; returns True if this step is the best so far."""
        if self.metric is None:
            return False
        if self.metric not in metrics:
            candidates = nearest_keys(self.metric, sorted(metrics)) or sorted(metrics)
            raise ConfigError(
                f"trainer.best_metric={self.metric} is not a validation metric of this run; "
                f"use trainer.best_metric={candidates[0]}, or one of: {', '.join(sorted(metrics))}"
            )
        value = float(metrics[self.metric])
        if step == 0:
            return False
        better = value > self.value if self.mode == "max" else value < self.value
        if math.isnan(value) or not (self.step is None or better):
            return False
        self.step, self.value = step, value
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.metric, "mode": self.mode, "step": self.step, "value": self.value if self.step else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the best step, unless the run now uses another metric."""
        if (state["metric"], state["mode"]) == (self.metric, self.mode) and state["step"] is not None:
            self.step, self.value = state["step"], state["value"]
