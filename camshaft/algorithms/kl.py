"""Estimators of the KL divergence from the reference policy, and controllers of the KL coefficient.

    kl = kl_penalty(old_log_probs, ref_log_prob, "low_var_kl")      # elementwise, for any shape
    rewards = scores - controller.coef * kl
    controller.update(mean_kl, num_sequences)

`kl_penalty` estimates the divergence from the sampled tokens. The exact KL over the vocabulary is an output of the
engine, `full_kl`. The trainer owns the controller and saves its state in checkpoints.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def _k3(d: Tensor) -> Tensor:
    d = d.clamp(-20, 20)
    return (torch.exp(-d) + d - 1).clamp(-10, 10)


def _k2(d: Tensor) -> Tensor:
    return d.square() / 2


def _straight_through(estimator: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return an estimator with the value of `estimator` and the gradient of k2."""

    def estimate(d: Tensor) -> Tensor:
        gradient = _k2(d)
        return estimator(d).detach() + (gradient - gradient.detach())

    return estimate


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "kl": lambda d: d,
    "abs": torch.abs,
    "mse": _k2,
    "low_var_kl": _k3,
}
KL_PENALTIES = _ESTIMATORS | {
    f"{name}+": _straight_through(estimator) for name, estimator in _ESTIMATORS.items() if name != "mse"
}
"""Estimator of each penalty name, as a function of d = log pi - log pi_ref.

With the suffix +, as in `low_var_kl+`, the value is that of the estimator and the gradient that of mse. Averaged over
tokens of pi, the gradient of mse is that of the KL divergence; those of kl and low_var_kl are not: Tang and Munos, "On
a few pitfalls in KL divergence gradient estimation for RL", arXiv:2506.09477.
"""


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Estimate the KL of each token from d = log pi(token) - log pi_ref(token), elementwise for any shape.

    kl          d                       unbiased, can be negative
    abs         |d|
    mse         d^2 / 2                 non-negative, low variance, biased
    low_var_kl  exp(-d) + d - 1         non-negative, low variance, unbiased

    For low_var_kl, d is clamped to +-20 and the result to +-10. kl, mse and low_var_kl are k1, k2 and k3 in
    Schulman, "Approximating KL divergence", 2020.
    """
    if kind not in KL_PENALTIES:
        raise ValueError(
            f"unknown KL penalty '{kind}'; use one of {', '.join(KL_PENALTIES)} "
            "(the exact KL over the vocabulary is the engine output `full_kl`)"
        )
    return KL_PENALTIES[kind](log_probs - ref_log_probs)


class FixedKL:
    """Constant KL coefficient beta. It has no state, so a resumed run uses the value of its config."""

    def __init__(self, coef: float):
        self.coef = coef

    def update(self, current_kl: float, num_sequences: int) -> None:
        """Update beta with the mean KL of a step. This controller keeps beta constant."""

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state; this controller has none."""


class AdaptiveKL(FixedKL):
    """Adaptive KL coefficient: beta <- beta (1 + clip(KL / target - 1, +-0.2) n / horizon).

    n is the number of sequences in the step, so `horizon` is a number of sequences. A NaN KL leaves beta unchanged.
    Checkpoints contain beta but not `target` and `horizon`, which are read from the config.
    Ziegler et al., arXiv:1909.08593.
    """

    def __init__(self, coef: float, target: float, horizon: float):
        super().__init__(coef)
        self.target = target
        self.horizon = horizon

    def update(self, current_kl: float, num_sequences: int) -> None:
        if math.isnan(current_kl):
            return
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * num_sequences / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore beta. The empty state of a `FixedKL` keeps the initial value from the config."""
        self.coef = state.get("coef", self.coef)
