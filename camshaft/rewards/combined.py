"""The scores of a reward model, and those of a scoring function beside it if there is one, as one score.

    with CombinedRewards(manager, weight=1.0) as rewards:       # or None in the place of the manager
        result = rewards.score(batch, decode)                   # the batch has `rm_scores`

    score = function's + weight x model's

Used as a `RewardManager` is. What each contributes is told apart, unweighted: `reward/function/mean`,
`reward/model/mean`, and, for validation, `function` and `model` in the numbers of each row.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import RewardError
from camshaft.rewards.manager import COUNTS, Begun, Decode, RewardManager, RewardResult

FUNCTION, MODEL = "function", "model"


class CombinedRewards:
    """Scores that a model gave, with those of a function added."""

    def __init__(self, function: RewardManager | None, weight: float = 1.0):
        self.function, self.weight = function, weight

    def begin(self, rows: DataProto) -> Begun | None:
        """`RewardManager.begin`: the function does not wait for the model."""
        return None if self.function is None else self.function.begin(rows)

    def score(self, batch: DataProto, decode: Decode, begun: Begun | None = None) -> RewardResult:
        """`RewardManager.score`, with `rm_scores` of the batch, weighted, in its scores."""
        found = batch.ragged("rm_scores").map(Tensor.float)
        scores = _finite(found)
        metrics = {f"reward/{MODEL}/mean": float(scores.mean())}
        if "rm_truncated" in batch:  # a worker of the user's own need not know of it
            metrics[f"reward/{MODEL}/truncated"] = float(batch["rm_truncated"].sum())
        weighted = found.map(lambda values: self.weight * values)
        if self.function is None:
            none = {f"reward/{name}": 0.0 for name in (*COUNTS.values(), "slow")}
            parts = tuple({MODEL: score} for score in scores.tolist())
            return RewardResult(self.weight * scores, none | metrics, (), parts, (None,) * len(batch), weighted)
        given = self.function.score(batch, decode, begun)
        metrics[f"reward/{FUNCTION}/mean"] = float(given.scores.mean())
        return replace(
            given,
            token_level_scores=given.token_level_scores.map(lambda values: values + weighted.values),
            scores=given.scores + self.weight * scores,
            metrics=given.metrics | metrics,
            parts=tuple(
                _unclaimed(part) | {FUNCTION: function, MODEL: model}
                for part, function, model in zip(given.parts, given.scores.tolist(), scores.tolist(), strict=True)
            ),
        )

    def close(self) -> None:
        """End the function's processes."""
        if self.function is not None:
            self.function.close()

    def __enter__(self) -> CombinedRewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _finite(found: Ragged) -> Tensor:
    """(B,) the model's score of each row; one that is no number would spoil the whole batch."""
    scores = found.sum()
    wrong = (~scores.isfinite()).nonzero().flatten().tolist()
    if wrong:
        raise RewardError(
            f"the reward model gave {float(scores[wrong[0]])} for row {wrong[0]} ({len(wrong)} of {len(scores)} rows "
            "have no finite score). Type reward_model.model.fsdp_config.model_dtype=float32 "
            "reward_model.model.fsdp_config.mixed_precision.param_dtype=null if it computes in less, and look at its "
            "weights"
        )
    return scores


def _unclaimed(part: dict[str, float]) -> dict[str, float]:
    for name in (FUNCTION, MODEL):
        if name in part:
            raise RewardError(
                f"the reward function's result has a number '{name}', which beside a reward model is what the "
                f"{name} gave. Call it another name"
            )
    return part
