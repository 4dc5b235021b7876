"""Correction of the actor's loss where the rollout drew from another distribution than the trainer computes.

    columns, metrics = correct(batch, config.algorithm.rollout_correction)
    batch = batch.union(columns)

On the driver, on the rows of all ranks at once: what is normalised is normalised over the iteration. The formulas
are in `algorithms/mismatch.py`; the actor multiplies by `rollout_is_weights` and leaves out what `rollout_rs_mask` does
not keep. Advantages and the critic see the batch as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from camshaft.algorithms import accepted, effective_share, importance_weights
from camshaft.config import RolloutCorrectionConfig
from camshaft.dataproto import DataProto, Ragged


def correct(batch: DataProto, correction: RolloutCorrectionConfig) -> tuple[DataProto, dict[str, float]]:
    """The columns that the config asks for, none if it asks for nothing, and metrics named `rollout_corr/...`."""
    if not correction.is_on():
        return DataProto({}), {}
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
        metrics |= _of_weights(flat, correction, weights)
    if correction.rollout_rs:
        kept = mask
        for rule, bounds in correction.rejections():
            kept = kept & accepted(*flat, rule, bounds)
        columns["rollout_rs_mask"] = train.like(kept)
        metrics |= _of_rejection(train.like(mask), train.like(kept))
    return DataProto.from_dict(columns), {f"rollout_corr/{name}": value for name, value in metrics.items()}


def _of_weights(
    flat: tuple[Tensor, Tensor, Tensor, Tensor], correction: RolloutCorrectionConfig, weights: Tensor
) -> dict[str, float]:
    """The weights as they are used, and the share of tokens where they were cut."""
    assert correction.rollout_is is not None
    whole = importance_weights(*flat, level=correction.rollout_is, threshold=torch.inf)
    counted = weights[flat[2]].double()
    if not len(counted):
        return {}
    return {
        "rollout_is_mean": float(counted.mean()),
        "rollout_is_max": float(counted.max()),
        "rollout_is_min": float(counted.min()),
        "rollout_is_eff_sample_size": float(effective_share(counted)),
        "rollout_is_ratio_fraction_high": float((whole[flat[2]] > correction.rollout_is_threshold).double().mean()),
    }


def _of_rejection(mask: Ragged, kept: Ragged) -> dict[str, float]:
    """Shares of the counted tokens, and of the responses with such tokens, that lost something."""
    counted, left = mask.sum(), kept.sum()
    rows = counted > 0
    return {
        "rollout_rs_masked_fraction": 1 - float(left.sum() / counted.sum().clamp(min=1)),
        "rollout_rs_seq_masked_fraction": float((left < counted)[rows].double().mean()) if bool(rows.any()) else 0.0,
    }
