"""Rewards, advantages and rollout correction: computations of the driver on the whole batch.

    rewards, metrics = token_rewards(batch, algorithm, kl)                           # score minus KL penalty
    batch = batch.union(rewards)
    batch = batch.union(estimate(batch, algorithm, load_estimator(algorithm)))       # advantages, returns
    corrections, metrics = correct(batch, algorithm.rollout_correction)              # importance weights
    batch = batch.union(corrections)

The formulas are in `algorithms`; this module converts the ragged columns to the (B, T) grids that they expect.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from camshaft.algorithms import (
    ESTIMATORS,
    AdaptiveKL,
    AdvantageInputs,
    AdvantageOptions,
    FixedKL,
    accepted,
    effective_share,
    importance_weights,
    kl_penalty,
)
from camshaft.config import AlgorithmConfig, RolloutCorrectionConfig
from camshaft.dataproto import DataProto, Ragged
from camshaft.plugins import load_function

Estimate = Callable[[AdvantageInputs, AdvantageOptions], tuple[Tensor, Tensor]]
"""An `Estimator`, or a user's function with its signature."""


def build_kl_controller(algorithm: AlgorithmConfig) -> FixedKL:
    """Build the controller of the KL coefficient in the reward."""
    control = algorithm.kl_ctrl
    if control.type == "adaptive":
        return AdaptiveKL(control.kl_coef, target=control.target_kl, horizon=control.horizon)
    return FixedKL(control.kl_coef)


def token_rewards(batch: DataProto, algorithm: AlgorithmConfig, kl: FixedKL) -> tuple[DataProto, dict[str, float]]:
    """Compute `token_level_rewards` and the metrics of the KL penalty, then update the KL controller."""
    scores = batch.ragged("token_level_scores")
    if not algorithm.use_kl_in_reward:
        return DataProto.from_dict({"token_level_rewards": scores}), {}
    mask = batch.ragged("response_mask")
    if algorithm.kl_penalty == "full":
        divergence = batch["full_kl"].values
    else:
        divergence = kl_penalty(batch["old_log_probs"].values, batch["ref_log_prob"].values, algorithm.kl_penalty)
    divergence = scores.like(torch.where(mask.values, divergence, 0))
    rewards = scores.like(scores.values - kl.coef * divergence.values)
    counted = mask.sum() > 0
    current = float(mean_of_rows(divergence, mask)[counted].mean())
    metrics = {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": kl.coef}
    kl.update(current, int(counted.sum()))
    return DataProto.from_dict({"token_level_rewards": rewards}), metrics


def mean_of_rows(column: Ragged, mask: Ragged) -> Tensor:
    """Return the mean of each row over its unmasked tokens, (B,); masked values must be 0."""
    return column.sum() / mask.map(Tensor.float).sum().clamp(min=1)


def load_estimator(algorithm: AlgorithmConfig) -> Estimate:
    """Return the configured estimator."""
    return load_function(algorithm.adv_estimator, ESTIMATORS, "camshaft.estimators")


def estimate(batch: DataProto, algorithm: AlgorithmConfig, estimator: Estimate) -> DataProto:
    """Compute `advantages` and `returns`."""
    rewards, mask = batch.ragged("token_level_rewards"), batch.ragged("response_mask")
    inputs = AdvantageInputs(
        rewards=rewards.padded(),
        mask=mask.padded(value=False),
        values=batch.ragged("values").padded() if "values" in batch else None,
        groups=group_ids(batch) if "uid" in batch else None,
        baselines=batch["reward_baselines"] if "reward_baselines" in batch else None,  # noqa: SIM401
    )
    options = AdvantageOptions(algorithm.gamma, algorithm.lam, algorithm.norm_adv_by_std_in_grpo)
    filled = rewards.mask()
    advantages, returns = (Ragged.from_padded(grid, filled) for grid in estimator(inputs, options))
    return DataProto.from_dict({"advantages": advantages, "returns": returns})


def group_ids(batch: DataProto) -> Tensor:
    """Return the number of each row's group, (B,): rows with the same `uid` share it.

    A row without unmasked tokens was dropped because its reward failed. It forms a separate group, so that it does not
    change the statistics of the others.
    """
    scored = (batch.ragged("response_mask").sum() > 0).tolist()
    numbers: dict[str | int, int] = {}
    keys = (uid if kept else row for row, (uid, kept) in enumerate(zip(batch["uid"], scored, strict=True)))
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])


# -- rollout correction ---------------------------------------------------------------------------


def correct(batch: DataProto, correction: RolloutCorrectionConfig) -> tuple[DataProto, dict[str, float]]:
    """Correct the actor's loss for the mismatch of rollout and trainer; returns columns and `rollout_corr/...` metrics.

    The actor multiplies its loss by `rollout_is_weights` and masks tokens outside `rollout_rs_mask`. Advantages and the
    critic are unaffected. Weights are normalized over the whole iteration. Formulas: `algorithms/mismatch.py`.
    """
    columns: dict[str, Ragged] = {}
    metrics: dict[str, float] = {}
    train, mask = batch.ragged("old_log_probs"), batch["response_mask"].values
    flat = (train.values, batch["rollout_log_probs"].values, mask, train.lengths)
    if correction.rollout_is is not None:
        weights = importance_weights(
            *flat,
            level=correction.rollout_is,
            threshold=correction.rollout_is_threshold,
            normalize=correction.rollout_is_batch_normalize,
        )
        columns["rollout_is_weights"] = train.like(weights)
        metrics |= _weight_metrics(flat, correction, weights)
    if correction.rollout_rs:
        kept = mask
        for rule, bounds in correction.rejection_bounds():
            kept = kept & accepted(*flat, rule, bounds)
        columns["rollout_rs_mask"] = train.like(kept)
        metrics |= _rejection_metrics(train.like(mask), train.like(kept))
    return DataProto.from_dict(columns), {f"rollout_corr/{name}": value for name, value in metrics.items()}


def _weight_metrics(
    flat: tuple[Tensor, Tensor, Tensor, Tensor], correction: RolloutCorrectionConfig, weights: Tensor
) -> dict[str, float]:
    """Summarize the weights, and the share of tokens whose weight was truncated."""
    assert correction.rollout_is is not None
    untruncated = importance_weights(*flat, level=correction.rollout_is, threshold=torch.inf)
    counted = weights[flat[2]].double()
    if not len(counted):
        return {}
    truncated = untruncated[flat[2]] > correction.rollout_is_threshold
    return {
        "rollout_is_mean": float(counted.mean()),
        "rollout_is_max": float(counted.max()),
        "rollout_is_min": float(counted.min()),
        "rollout_is_eff_sample_size": float(effective_share(counted)),
        "rollout_is_ratio_fraction_high": float(truncated.double().mean()),
    }


def _rejection_metrics(mask: Ragged, kept: Ragged) -> dict[str, float]:
    """Return the shares of tokens, and of responses, that the rejection masks."""
    counted, remaining = mask.sum(), kept.sum()
    rows, shortened = counted > 0, remaining < counted
    return {
        "rollout_rs_masked_fraction": 1 - float(remaining.sum() / counted.sum().clamp(min=1)),
        "rollout_rs_seq_masked_fraction": float(shortened[rows].double().mean()) if bool(rows.any()) else 0.0,
    }
