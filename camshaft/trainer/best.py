"""The best step so far, by one metric of validation.

    best = BestStep("val-core/gsm8k/reward/mean", "max")
    best.offer({"val-core/gsm8k/reward/mean": 0.5, ...}, step=20)      # True: the best so far, and to be saved
    best.step                                                          # 20, which retention spares

Of equal ones the earlier is the best, and what is not a number is never one. The weights that a run starts from are no
step: of the validation before training the metric's name alone is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from camshaft.config.tree import nearest
from camshaft.errors import ConfigError


class BestStep:
    """None as long as nothing was offered, and for ever without a metric."""

    def __init__(self, metric: str | None, mode: str):
        self.metric, self.mode = metric, mode
        self.step: int | None = None
        self.value = math.nan

    def offer(self, metrics: Mapping[str, float], step: int) -> bool:
        """Is this step the best so far?"""
        if self.metric is None:
            return False
        if self.metric not in metrics:
            meant = nearest(self.metric, sorted(metrics)) or sorted(metrics)
            raise ConfigError(
                f"trainer.best_metric={self.metric}: this run's validation has no such metric. "
                f"Type trainer.best_metric={meant[0]}, or another of: {', '.join(sorted(metrics))}"
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
        """Go on from there; a run that looks for something else begins anew."""
        if (state["metric"], state["mode"]) == (self.metric, self.mode) and state["step"] is not None:
            self.step, self.value = state["step"], state["value"]
