"""Scores, rewards, advantages and rollout correction, which the driver computes on the whole batch.

    batch = add_scores(batch, result)                                                      # token_level_scores
    rewards, metrics = compute_token_rewards(batch, algorithm, kl)                         # scores minus KL penalty
    batch = batch.union(rewards)
    corrections, metrics = compute_corrections(batch, algorithm.rollout_correction)        # importance weights
    batch = batch.union(corrections)
    batch = batch.union(compute_advantages(batch, algorithm, load_estimator(algorithm)))   # advantages, returns

The package `algorithms` contains the formulas. This module converts ragged columns to the (B, T) grids that they use.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from camshaft.algorithms import (
    ESTIMATORS,
    AdaptiveEntropy,
    AdaptiveKL,
    AdvantageInputs,
    AdvantageOptions,
    Estimator,
    FixedKL,
    accept_tokens,
    effective_sample_share,
    importance_weights,
    kl_penalty,
    mean_importance_weight,
)
from camshaft.config import AlgorithmConfig, RolloutCorrectionConfig
from camshaft.config.schema.roles import ActorConfig
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import ConfigError, RewardError
from camshaft.plugins import load_function
from camshaft.rewards.manager import RewardResult


def build_kl_controller(algorithm: AlgorithmConfig) -> FixedKL:
    """Build the controller for the coefficient of the KL penalty in the reward."""
    control = algorithm.kl_ctrl
    if control.type == "adaptive":
        return AdaptiveKL(control.kl_coef, target=control.target_kl, horizon=control.horizon)
    return FixedKL(control.kl_coef)


def build_entropy_coefficient(actor: ActorConfig) -> AdaptiveEntropy | None:
    """Build the coefficient of the entropy bonus; return None if it is constant."""
    if actor.entropy_target is None:
        return None
    bounds = actor.entropy_coeff_min, actor.entropy_coeff_max
    return AdaptiveEntropy(actor.entropy_coeff, actor.entropy_target, actor.entropy_coeff_delta, bounds)


def add_scores(batch: DataProto, result: RewardResult) -> DataProto:
    """Add the scores, their parts and the failures of calls, and mask out all tokens of dropped rows.

    With `on_error=drop`, a row is dropped if its scoring or that of its greedy baseline failed. Dropped rows remain in
    the batch.
    """
    batch = batch.with_columns(
        token_level_scores=result.token_level_scores,
        score_parts=result.parts,
        score_failure=[result.failed.get(row) for row in range(len(batch))],
    )
    keep_mask = result.keep_mask
    if "reward_baselines" in batch:
        baselines = batch["reward_baselines"]
        keep_mask = keep_mask & ~baselines.isnan()
        batch = batch.with_columns(reward_baselines=baselines.nan_to_num(0.0))
    if keep_mask.all():
        return batch
    if not keep_mask.any():
        raise RewardError(
            f"custom_reward_function.on_error=drop drops all {len(keep_mask)} responses of a step, because their "
            "scoring or that of their greedy baseline failed; correct the function. The first failure is "
            f"{result.failures[0]}"
        )
    mask = batch.ragged("response_mask")
    return batch.with_columns(response_mask=mask.like(mask.values & keep_mask[mask.row_ids()]))


def check_scored(result: RewardResult, num_rows: int, noun: str) -> None:
    """Raise RewardError if the reward function or the environment failed for all rows of a training step."""
    if num_rows and len(result.unplayed) == num_rows:
        raise RewardError(
            f"the environment failed for all {num_rows} {noun} of a step; correct the environment. The first failure "
            f"is {result.failures[0]}"
        )
    if num_rows and result.num_failed >= num_rows:
        raise RewardError(
            f"the reward function failed for all {num_rows} {noun} of a step; correct the function. The first failure "
            f"is {result.failures[0]}"
        )


def compute_token_rewards(
    batch: DataProto, algorithm: AlgorithmConfig, kl: FixedKL
) -> tuple[DataProto, dict[str, float]]:
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
    has_tokens = mask.sum() > 0
    mean_kl = float(row_means(divergence, mask)[has_tokens].mean())
    metrics = {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": kl.coef}
    kl.update(mean_kl, int(has_tokens.sum()))
    return DataProto.from_dict({"token_level_rewards": rewards}), metrics


def row_means(column: Ragged, mask: Ragged) -> Tensor:
    """Return the mean of each row over its masked-in tokens, (B,). Values of other tokens must be 0."""
    return column.sum() / mask.map(Tensor.float).sum().clamp(min=1)


def load_estimator(algorithm: AlgorithmConfig) -> Estimator:
    return load_function(algorithm.adv_estimator, ESTIMATORS, "camshaft.estimators")


def compute_advantages(
    batch: DataProto, algorithm: AlgorithmConfig, estimator: Estimator, part_weights: Mapping[str, float] | None = None
) -> DataProto:
    """Compute `advantages` and `returns`; `part_weights` maps rewards that are read separately to their weights."""
    rewards, mask = batch.ragged("token_level_rewards"), batch.ragged("response_mask")
    inputs = AdvantageInputs(
        rewards=rewards.padded(),
        mask=mask.padded(value=False),
        values=_padded(batch, "values"),
        groups=group_ids(batch) if "uid" in batch else None,
        baselines=batch["reward_baselines"] if "reward_baselines" in batch else None,  # noqa: SIM401
        reward_parts=reward_parts(batch, list(part_weights)) if part_weights else None,
        old_log_probs=_padded(batch, "old_log_probs"),
        sum_pi_squared=_padded(batch, "sum_pi_squared"),
        importance_weights=_padded(batch, "rollout_is_weights"),
    )
    weights = tuple((part_weights or {}).values())
    options = AdvantageOptions(algorithm.gamma, algorithm.lam, algorithm.norm_adv_by_std_in_grpo, weights)
    row_mask, grids = rewards.mask(), estimator(inputs, options)
    parts = grids if isinstance(grids, tuple | list) else [grids]
    if [isinstance(part, Tensor) and part.shape for part in parts] != [inputs.rewards.shape] * 2:
        raise ConfigError(_describe_wrong_grids(algorithm.adv_estimator, parts, inputs.rewards.shape))
    advantages, returns = (Ragged.from_padded(grid, row_mask) for grid in grids)
    return DataProto.from_dict({"advantages": advantages, "returns": returns})


def _padded(batch: DataProto, name: str) -> Tensor | None:
    return batch.ragged(name).padded() if name in batch else None


def _describe_wrong_grids(estimator: str, parts: Sequence[Any], shape: torch.Size) -> str:
    returned = [tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts]
    return (
        f"algorithm.adv_estimator={estimator} returned {returned}; return two tensors, advantages and returns, both of "
        f"the shape (B, T) of the rewards, {tuple(shape)}"
    )


def reward_parts(batch: DataProto, names: Sequence[str]) -> Tensor:
    """Return several rewards of each row, (B, K) float64: `score`, or numbers that the reward functions returned.

    A failed call counts as 0. Other rows without a number have NaN.
    """
    scores, parts = batch.ragged("token_level_scores").sum().tolist(), batch["score_parts"]
    columns: list[list[float]] = []
    for name in names:
        rows = [{"score": score} | row for score, row in zip(scores, parts, strict=True)]
        require_part(rows, name, "algorithm.gdpo_reward_keys")
        missing = [math.nan if kind is None else 0.0 for kind in batch["score_failure"]]
        columns.append([row.get(name, default) for row, default in zip(rows, missing, strict=True)])
    return torch.tensor(columns, dtype=torch.float64).T


def require_part(parts: Sequence[Mapping[str, float]], name: str, key: str) -> None:
    """Raise RewardError if no row has the number that a key names."""
    if any(name in part for part in parts):
        return
    names = sorted({name for part in parts for name in part} - {"score"})
    raise RewardError(
        f"{key}={name}: the results of the reward function contain no number '{name}', only "
        f"{', '.join(names) or 'the score'}; use {key}=score, or return a dict with '{name}'"
    )


def group_ids(batch: DataProto) -> Tensor:
    """Return the group index of each row, (B,), which is equal for rows with the same `uid`.

    A row without masked-in tokens was dropped because its scoring failed. It forms a separate group, so that it does
    not affect the statistics of other rows.
    """
    has_tokens = (batch.ragged("response_mask").sum() > 0).tolist()
    group_of_key: dict[str | int, int] = {}
    keys = (uid if scored else row for row, (uid, scored) in enumerate(zip(batch["uid"], has_tokens, strict=True)))
    return torch.tensor([group_of_key.setdefault(key, len(group_of_key)) for key in keys])


# -- rollout correction ---------------------------------------------------------------------------


def compute_corrections(batch: DataProto, correction: RolloutCorrectionConfig) -> tuple[DataProto, dict[str, float]]:
    """Compute columns that correct the actor loss for the mismatch between rollout and trainer, and their metrics.

    The actor multiplies its loss by `rollout_is_weights` and masks tokens outside `rollout_rs_mask`. The critic is not
    affected, and of the advantages only those with an optimal token baseline. Weights are normalized over all rows of
    the step. The formulas are in `algorithms/mismatch.py`; the metrics are named `rollout_corr/...`.
    """
    columns: dict[str, Ragged] = {}
    metrics: dict[str, float] = {}
    train, mask = batch.ragged("old_log_probs"), batch["response_mask"].values
    flat = (train.values, batch["rollout_log_probs"].values, mask, train.lengths)
    if correction.rollout_is is not None:
        lower, threshold = correction.weight_bounds()
        weights = importance_weights(
            *flat,
            level=correction.rollout_is,
            threshold=threshold,
            lower=lower,
            normalize=correction.rollout_is_batch_normalize,
        )
        columns["rollout_is_weights"] = train.like(weights)
        metrics |= _weight_metrics(flat, correction, weights)
    if correction.rollout_rs:
        rules = [(f"{rule}_", accept_tokens(*flat, rule, bounds)) for rule, bounds in correction.rejection_bounds()]
        accepted_mask = torch.stack([accepted for _, accepted in rules]).all(dim=0)
        columns["rollout_rs_mask"] = train.like(accepted_mask)
        for rule, accepted in [("", accepted_mask), *(rules if len(rules) > 1 else [])]:
            metrics |= _rejection_metrics(rule, train.like(mask), train.like(accepted))
    return DataProto.from_dict(columns), {f"rollout_corr/{name}": value for name, value in metrics.items()}


def mean_weight(batch: DataProto, train: Ragged, correction: RolloutCorrectionConfig) -> Tensor:
    """Return the mean importance weight of the iteration for each row, (B,), with log-probs `train` of the policy."""
    assert correction.rollout_is is not None
    lower, threshold = correction.weight_bounds()
    mean = mean_importance_weight(
        train.values,
        batch["rollout_log_probs"].values,
        batch["response_mask"].values,
        train.lengths,
        level=correction.rollout_is,
        threshold=threshold,
        lower=lower,
    )
    return mean.float().expand(len(batch)).clone()


def _weight_metrics(
    flat: tuple[Tensor, Tensor, Tensor, Tensor], correction: RolloutCorrectionConfig, weights: Tensor
) -> dict[str, float]:
    """Compute statistics of the weights, and the fractions of tokens whose weight was outside the bounds."""
    assert correction.rollout_is is not None
    mask, level = flat[2], correction.rollout_is
    if not mask.any():
        return {}
    lower, threshold = correction.weight_bounds()
    token_weights = weights[mask].double()
    unbounded_weights = importance_weights(*flat, level=level, threshold=torch.inf)[mask]
    metrics = {
        "rollout_is_mean": float(token_weights.mean()),
        "rollout_is_max": float(token_weights.max()),
        "rollout_is_min": float(token_weights.min()),
        "rollout_is_std": float(token_weights.std(correction=0)),
        "rollout_is_eff_sample_size": float(effective_sample_share(token_weights)),
        "rollout_is_ratio_fraction_high": float((unbounded_weights > threshold).double().mean()),
    }
    if lower > 0:
        metrics["rollout_is_ratio_fraction_low"] = float((unbounded_weights < lower).double().mean())
    if correction.rollout_is_batch_normalize:
        factor = mean_importance_weight(*flat, level=level, threshold=threshold, lower=lower)
        metrics["rollout_is_batch_norm_factor"] = float(factor)
    return metrics


def _rejection_metrics(rule: str, mask: Ragged, accepted_mask: Ragged) -> dict[str, float]:
    """Return the fraction of tokens that a rule rejected, and of responses with a rejected token.

    `rule` is the name of the rule with an underscore, or empty for all rules together.
    """
    counts, accepted_counts = mask.sum(), accepted_mask.sum()
    num_rejected_from = (accepted_counts < counts).sum()
    return {
        f"rollout_rs_{rule}masked_fraction": 1 - float(accepted_counts.sum() / counts.sum().clamp(min=1)),
        f"rollout_rs_{rule}seq_masked_fraction": float(num_rejected_from / (counts > 0).sum().clamp(min=1)),
    }
