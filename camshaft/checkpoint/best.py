"""Selection of the best step by a validation metric.

    best = BestStep("val-core/gsm8k/reward/mean", "max")
    best.update({"val-core/gsm8k/reward/mean": 0.5, ...}, step=20)     # True: step 20 is the best so far
    best.step                                                          # 20; retention keeps its checkpoint

If several steps have the same value, the earliest of them is the best. A step whose value is nan is never the best. For
the validation before training (step 0), only the existence of the metric is checked.
"""

import math
from collections.abc import Mapping
from typing import Any

from camshaft.config.tree import nearest_keys
from camshaft.errors import ConfigError


class BestStep:
    """Track the best step. `step` is None until a step has been recorded, and always if `metric` is None."""

    def __init__(self, metric: str | None, mode: str):
        self.metric, self.mode = metric, mode
        self.step: int | None = None
        self.value = math.nan

    def update(self, metrics: Mapping[str, float], step: int) -> bool:
        """Record the metrics of a validation, and return True if `step` is the best so far."""
        if self.metric is None:
            return False
        if self.metric not in metrics:
            candidates = nearest_keys(self.metric, sorted(metrics)) or sorted(metrics)
            raise ConfigError(
                f"trainer.best_metric={self.metric} is not a validation metric of this run; "
                f"use trainer.best_metric={candidates[0]}, or another one of: {', '.join(sorted(metrics))}"
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
        """Restore the best step, unless `state` was saved with another metric or mode."""
        if (state["metric"], state["mode"]) == (self.metric, self.mode) and state["step"] is not None:
            self.step, self.value = state["step"], state["value"]
