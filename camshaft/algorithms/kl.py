"""KL penalties with respect to the reference policy, and controllers of the KL coefficient.

    kl = kl_penalty(old_log_probs, ref_log_prob, "low_var_kl")      # any shape, elementwise
    rewards = scores - controller.coef * kl
    controller.update(mean_kl, num_sequences)

`kl_penalty` estimates the divergence from sampled tokens. The exact KL over the vocabulary is the engine output
`full_kl`. The trainer owns the controller and checkpoints its state.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def _k1(d: Tensor) -> Tensor:
    return d


def _absolute(d: Tensor) -> Tensor:
    return d.abs()


def _k2(d: Tensor) -> Tensor:
    return d.square() / 2


def _k3(d: Tensor) -> Tensor:
    d = d.clamp(-20, 20)
    return (torch.exp(-d) + d - 1).clamp(-10, 10)


KL_PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {
    "kl": _k1,
    "abs": _absolute,
    "mse": _k2,
    "low_var_kl": _k3,
}
"""Estimators as functions of d = log pi - log pi_ref."""


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Estimate the KL per token from d = log pi(token) - log pi_ref(token); any shape, without a mask.

    kl          d                       unbiased, can be negative
    abs         |d|
    mse         d^2 / 2                 non-negative, low variance, biased
    low_var_kl  exp(-d) + d - 1         non-negative, low variance, unbiased;
                                        d is clamped to +-20 and the result to +-10

    Schulman, "Approximating KL divergence", 2020 (kl, mse and low_var_kl are k1, k2 and k3).
    """
    if kind not in KL_PENALTIES:
        raise ValueError(
            f"unknown KL penalty '{kind}'; use one of {', '.join(KL_PENALTIES)} "
            "(the exact KL over the vocabulary is the engine output `full_kl`)"
        )
    return KL_PENALTIES[kind](log_probs - ref_log_probs)


class FixedKL:
    """Constant beta. It has no state, so a resumed run uses the current config."""

    def __init__(self, coef: float):
        self.coef = coef

    def update(self, current_kl: float, num_sequences: int) -> None:
        """Update beta after a step with the mean KL of its batch; constant here."""

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a `state_dict`."""


class AdaptiveKL(FixedKL):
    """Adaptive beta: beta <- beta (1 + clip(KL / target - 1, +-0.2) n / horizon).

    n is the number of sequences of the step, so `horizon` counts sequences. A NaN KL leaves beta unchanged. beta is
    checkpointed; target and horizon come from the config. Ziegler et al., arXiv:1909.08593.
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
        """Restore beta; the empty state of a `FixedKL` leaves the initial value of the config."""
        self.coef = state.get("coef", self.coef)
