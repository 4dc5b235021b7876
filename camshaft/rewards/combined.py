"""Add the scores of a reward model to those of an optional scoring function.

    rewards = CombinedRewards(manager, weight=1.0)      # manager=None uses only the reward model
    result = rewards.score(batch, decode)               # requires column `rm_scores`

    score = function score + weight * model score

`CombinedRewards` has the interface of `RewardManager`. The mean scores of the function and of the model, without
weight, are the metrics `reward/function/mean` and `reward/model/mean`. For validation, `RewardResult.parts` contains
both scores of each row as `function` and `model`.
"""

from abc import ABC, abstractmethod
from dataclasses import replace

from torch import Tensor

from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import RewardError
from camshaft.rewards.manager import COUNTS, Decode, PendingScores, RewardManager, RewardResult
from camshaft.rewards.messages import Spec

FUNCTION, MODEL = "function", "model"


class RewardsWrapper(ABC):
    """Base class of rewards that change the scores of other `rewards`, if there are any.

    It forwards all methods of `RewardManager` except `score`.
    """

    def __init__(self, rewards: "RewardManager | RewardsWrapper | None"):
        self.rewards = rewards

    @property
    def columns(self) -> tuple[str, ...] | None:
        return () if self.rewards is None else self.rewards.columns

    @property
    def environment_functions(self) -> Spec | None:
        return None if self.rewards is None else self.rewards.environment_functions

    def check_rows(self, rows: DataProto) -> None:
        if self.rewards is not None:
            self.rewards.check_rows(rows)

    def begin(self, rows: DataProto) -> PendingScores | None:
        return None if self.rewards is None else self.rewards.begin(rows)

    @abstractmethod
    def score(self, batch: DataProto, decode: Decode, pending: PendingScores | None = None) -> RewardResult:
        """Score a batch, as `RewardManager.score` does."""

    def close(self) -> None:
        if self.rewards is not None:
            self.rewards.close()


class CombinedRewards(RewardsWrapper):
    """Scoring with a reward model and an optional scoring function."""

    def __init__(self, function: RewardManager | None, weight: float = 1.0):
        super().__init__(function)
        self.weight = 1.0 if function is None else weight

    def score(self, batch: DataProto, decode: Decode, pending: PendingScores | None = None) -> RewardResult:
        """Score a batch with the function as `RewardManager.score` does, and add the weighted column `rm_scores`."""
        model_scores = batch.ragged("rm_scores").map(Tensor.float)
        scores = _finite_scores(model_scores)
        metrics = {f"reward/{MODEL}/mean": float(scores.mean())}
        if "rm_truncated" in batch:  # custom reward workers may omit it
            metrics[f"reward/{MODEL}/truncated"] = float(batch["rm_truncated"].sum())
        weighted = model_scores.map(lambda values: self.weight * values)
        if self.rewards is None:
            counts = {f"reward/{name}": 0.0 for name in (*COUNTS.values(), "slow")}
            parts = tuple({MODEL: score} for score in scores.tolist())
            return RewardResult(self.weight * scores, counts | metrics, (), parts, (None,) * len(batch), weighted)
        result = self.rewards.score(batch, decode, pending)
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


def _finite_scores(model_scores: Ragged) -> Tensor:
    """Return the model score of each row, (B,). Raise RewardError if a score is not finite."""
    scores = model_scores.sum()
    rows = (~scores.isfinite()).nonzero().flatten().tolist()
    if rows:
        raise RewardError(
            f"the score of the reward model for row {rows[0]} is {float(scores[rows[0]])} ({len(rows)} of "
            f"{len(scores)} scores are not finite). Check the weights of the model; if it computes in low precision, "
            "use reward_model.model.fsdp_config.model_dtype=float32 "
            "reward_model.model.fsdp_config.mixed_precision.param_dtype=null"
        )
    return scores


def _reject_reserved_names(components: dict[str, float]) -> dict[str, float]:
    for name in (FUNCTION, MODEL):
        if name in components:
            raise RewardError(
                f"the result of the reward function contains '{name}', which is reserved for the score of the {name} "
                "if a reward model is used; rename it"
            )
    return components
