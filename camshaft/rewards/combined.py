"""Combine the scores of a reward model with those of an optional scoring function.

    with CombinedRewards(manager, weight=1.0) as rewards:       # manager=None: reward model only
        result = rewards.score(batch, decode)                   # the batch has a column `rm_scores`

    score = function score + weight * model score

The interface equals that of `RewardManager`. The unweighted contributions are logged as `reward/function/mean` and
`reward/model/mean`, and are `function` and `model` in the parts of each row for validation.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import RewardError
from camshaft.rewards.manager import COUNTS, Begun, Decode, RewardManager, RewardResult

FUNCTION, MODEL = "function", "model"


class CombinedRewards:
    """Scores of a reward model plus those of an optional scoring function."""

    def __init__(self, function: RewardManager | None, weight: float = 1.0):
        self.function, self.weight = function, weight

    def begin(self, rows: DataProto) -> Begun | None:
        """Start scoring with the function before the model scores are available; see `RewardManager.begin`."""
        return None if self.function is None else self.function.begin(rows)

    def score(self, batch: DataProto, decode: Decode, begun: Begun | None = None) -> RewardResult:
        """Score a batch as `RewardManager.score` and add the weighted `rm_scores` of the batch."""
        model_scores = batch.ragged("rm_scores").map(Tensor.float)
        scores = _finite(model_scores)
        metrics = {f"reward/{MODEL}/mean": float(scores.mean())}
        if "rm_truncated" in batch:  # optional for custom reward workers
            metrics[f"reward/{MODEL}/truncated"] = float(batch["rm_truncated"].sum())
        weighted = model_scores.map(lambda values: self.weight * values)
        if self.function is None:
            none = {f"reward/{name}": 0.0 for name in (*COUNTS.values(), "slow")}
            parts = tuple({MODEL: score} for score in scores.tolist())
            return RewardResult(self.weight * scores, none | metrics, (), parts, (None,) * len(batch), weighted)
        result = self.function.score(batch, decode, begun)
        metrics[f"reward/{FUNCTION}/mean"] = float(result.scores.mean())
        return replace(
            result,
            token_level_scores=result.token_level_scores.map(lambda values: values + weighted.values),
            scores=result.scores + self.weight * scores,
            metrics=result.metrics | metrics,
            parts=tuple(
                _reject_reserved_names(components) | {FUNCTION: function, MODEL: model}
                for components, function, model in zip(
                    result.parts, result.scores.tolist(), scores.tolist(), strict=True
                )
            ),
        )

    def close(self) -> None:
        """Stop the processes of the scoring function."""
        if self.function is not None:
            self.function.close()

    def __enter__(self) -> CombinedRewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _finite(model_scores: Ragged) -> Tensor:
    """Return the model score of each row (B,); raise RewardError if one is not finite."""
    scores = model_scores.sum()
    rows = (~scores.isfinite()).nonzero().flatten().tolist()
    if rows:
        raise RewardError(
            f"the reward model returned {float(scores[rows[0]])} for row {rows[0]} ({len(rows)} of {len(scores)} rows "
            "have no finite score). Check its weights; if it computes in a lower precision, use "
            "reward_model.model.fsdp_config.model_dtype=float32 "
            "reward_model.model.fsdp_config.mixed_precision.param_dtype=null"
        )
    return scores


def _reject_reserved_names(components: dict[str, float]) -> dict[str, float]:
    for name in (FUNCTION, MODEL):
        if name in components:
            raise RewardError(
                f"the reward function's result has a number '{name}', which is reserved for the score of the {name} "
                "when a reward model is used; rename it"
            )
    return components
