"""Coefficient of the entropy bonus with a target for the entropy.

    coefficient = AdaptiveEntropy(0.0, target=0.3, delta=0.005, bounds=(0.0, 1.0))
    coefficient.value                       # of the next update
    coefficient.update(mean_entropy)        # after it

The trainer owns the coefficient, and saves its state in checkpoints.
"""

import math


class AdaptiveEntropy:
    """Coefficient that keeps the entropy H from falling below a target.

    After a step, c <- c + delta if H < target and c - delta if H > target, within `bounds`. The bonus of the next
    update has the coefficient c if H <= target, and 0 otherwise. A NaN entropy changes nothing. Checkpoints contain c
    and the coefficient of the next update, but not the settings. He et al., "Skywork Open Reasoner 1",
    arXiv:2505.22312.
    """

    def __init__(self, value: float, target: float, delta: float, bounds: tuple[float, float]):
        self.value = value
        """Coefficient of the next update."""
        self.target, self.delta, self.bounds = target, delta, bounds
        self._coef = value

    def update(self, entropy: float) -> None:
        """Update the coefficient with the mean entropy of a step."""
        if math.isnan(entropy):
            return
        step = math.copysign(self.delta, self.target - entropy) if entropy != self.target else 0.0
        self._coef = min(max(self._coef + step, self.bounds[0]), self.bounds[1])
        self.value = self._coef if entropy <= self.target else 0.0

    def state_dict(self) -> dict[str, float]:
        return {"coef": self._coef, "value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the coefficient. An empty state keeps the initial value from the config."""
        self._coef, self.value = state.get("coef", self._coef), state.get("value", self.value)
