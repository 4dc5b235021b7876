"""From scores to advantages: the part of the step that runs on the driver, on the whole batch at once.

    rewards, metrics = token_rewards(batch, algorithm, kl)      # score minus KL penalty
    batch = batch.union(rewards)
    batch = batch.union(estimate(batch, algorithm))             # advantages, returns

The formulas are in `algorithms`; here the ragged columns become the (B, T) grids that they are written for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from camshaft.algorithms import ESTIMATORS, AdaptiveKL, AdvantageInputs, AdvantageOptions, FixedKL, kl_penalty
from camshaft.config import AlgorithmConfig
from camshaft.dataproto import DataProto, Ragged
from camshaft.plugins import load_function


def build_kl_controller(algorithm: AlgorithmConfig) -> FixedKL:
    """The controller of the KL coefficient in the reward."""
    control = algorithm.kl_ctrl
    if control.type == "adaptive":
        return AdaptiveKL(control.kl_coef, target=control.target_kl, horizon=control.horizon)
    return FixedKL(control.kl_coef)


def token_rewards(batch: DataProto, algorithm: AlgorithmConfig, kl: FixedKL) -> tuple[DataProto, dict[str, float]]:
    """`token_level_rewards`, and what the penalty was. The controller moves after it was used."""
    scores = batch.ragged("token_level_scores")
    if not algorithm.use_kl_in_reward:
        return DataProto.from_dict({"token_level_rewards": scores}), {}
    mask = batch.ragged("response_mask")
    if algorithm.kl_penalty == "full":
        distance = batch["full_kl"].values
    else:
        distance = kl_penalty(batch["old_log_probs"].values, batch["ref_log_prob"].values, algorithm.kl_penalty)
    distance = scores.like(torch.where(mask.values, distance, 0))
    rewards = scores.like(scores.values - kl.coef * distance.values)
    counted = mask.sum() > 0
    current = float(mean_of_rows(distance, mask)[counted].mean())
    metrics = {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": kl.coef}
    kl.update(current, int(counted.sum()))
    return DataProto.from_dict({"token_level_rewards": rewards}), metrics


def mean_of_rows(column: Ragged, mask: Ragged) -> Tensor:
    """(B,) the mean of each row over its counted tokens; the values are already 0 elsewhere."""
    return column.sum() / mask.map(Tensor.float).sum().clamp(min=1)


def load_estimator(algorithm: AlgorithmConfig) -> Callable[[AdvantageInputs, AdvantageOptions], tuple[Tensor, Tensor]]:
    """The estimator that the config names; one of the user's own has the parameters and results of `Estimator`."""
    return load_function(algorithm.adv_estimator, ESTIMATORS, "camshaft.estimators")


def estimate(batch: DataProto, algorithm: AlgorithmConfig) -> DataProto:
    """`advantages` and `returns` by the estimator that the config names."""
    estimator = load_estimator(algorithm)
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
    """(B,) a number per prompt, equal for the rows of one `uid`.

    A row without a token that counts (its reward function failed, and it was dropped) has a number of its own: it has
    no score that the others could be held against.
    """
    counted = (batch.ragged("response_mask").sum() > 0).tolist()
    numbers: dict[str | int, int] = {}
    keys = (uid if counts else row for row, (uid, counts) in enumerate(zip(batch["uid"], counted, strict=True)))
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])
