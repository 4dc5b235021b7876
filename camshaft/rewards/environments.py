"""Add the rewards of environments to the scores of optional other rewards.

    rewards = EnvironmentRewards(manager)           # None uses only the rewards of the environments
    result = rewards.score(batch, decode)           # requires the columns of episodes

    score = score of the other rewards + sum of the rewards of the turns

A reward function receives the text of the last answer as the response, and by name `messages`, `turns` and
`stop_reason`. A row whose environment has failed, or whose prompt was too long, has no score: it is dropped. With
`custom_reward_function.on_error=raise`, a failed environment is an error.
"""

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from camshaft.dataproto import DataProto
from camshaft.errors import RewardError
from camshaft.rewards.combined import RewardsWrapper
from camshaft.rewards.manager import COUNTS, Decode, PendingScores, RewardManager, RewardResult

ENVIRONMENT = "environment"
STOP_REASONS = ("done", "turns", "length", "prompt", "timeout", "error")
"""Values of the column `stop_reason`."""
EPISODE_ARGUMENTS = {"messages": [], "turns": 0, "stop_reason": ""}
"""Arguments of reward functions that describe an episode."""

_NUM_SHOWN = 3

logger = logging.getLogger(__name__)


class EnvironmentRewards(RewardsWrapper):
    """Scoring with the rewards of environments and optional other rewards."""

    def __init__(self, rewards: RewardManager | RewardsWrapper | None, raises: bool = False):
        """With `raises`, a failed environment is an error."""
        super().__init__(rewards)
        self.raises = raises

    def check_rows(self, rows: DataProto) -> None:
        super().check_rows(_with_arguments(rows, [EPISODE_ARGUMENTS] * len(rows)))

    def begin(self, rows: DataProto) -> PendingScores | None:
        """Return None, because the arguments of reward functions exist only when the episodes have ended."""
        return None

    def score(self, batch: DataProto, decode: Decode, pending: PendingScores | None = None) -> RewardResult:
        """Score a batch of episodes."""
        turn_scores = batch.ragged("env_scores")
        scores = turn_scores.sum()
        result = self._other_scores(batch)
        lost = {
            row: str(reason)
            for row, reason in enumerate(batch["stop_reason"])
            if reason == "prompt" or batch["env_failure"][row] is not None
        }
        self._report(batch, lost)
        return replace(
            result,
            token_level_scores=result.token_level_scores.map(lambda values: values + turn_scores.values),
            scores=result.scores + scores,
            metrics=result.metrics | {f"reward/{ENVIRONMENT}/mean": _mean(scores, lost)} | _episode_metrics(batch),
            parts=tuple(
                parts | {ENVIRONMENT: score} for parts, score in zip(result.parts, scores.tolist(), strict=True)
            ),
            failed={**result.failed, **lost},
            dropped=tuple(sorted({*result.dropped, *lost})),
        )

    def _other_scores(self, batch: DataProto) -> RewardResult:
        if self.rewards is None:
            counts = {f"reward/{name}": 0.0 for name in (*COUNTS.values(), "slow")}
            zeros, count = batch.ragged("env_scores").map(torch.zeros_like), len(batch)
            return RewardResult(torch.zeros(count), counts, (), ({},) * count, (None,) * count, zeros)
        columns = zip(batch["transcript"], batch["turns"].tolist(), batch["stop_reason"], strict=True)
        arguments = [dict(zip(EPISODE_ARGUMENTS, values, strict=True)) for values in columns]
        answers = [last_answer(messages) for messages in batch["transcript"]]
        return self.rewards.score(_with_arguments(batch, arguments), lambda ids: answers)

    def _report(self, batch: DataProto, lost: dict[int, str]) -> None:
        """Log the failures of environments, or raise the first one."""
        failures = [text for text in batch["env_failure"] if text is not None]
        if failures and self.raises:
            raise RewardError(f"the environment failed: {failures[0]}")
        if lost:
            logger.warning(
                "%d of %d episodes are not trained on: the environment failed in %d, and %d prompts are too long after "
                "reset (data.max_prompt_length). First failures:\n%s",
                *(len(lost), len(batch), len(failures), len(lost) - len(failures)),
                "\n".join(list(dict.fromkeys(failures))[:_NUM_SHOWN]) or "none",
            )


def _episode_metrics(batch: DataProto) -> dict[str, float]:
    """Compute the number of answers of an episode, the tokens that were not sampled, and why episodes ended."""
    reasons: list[str] = list(batch["stop_reason"])
    metrics = {f"agent/stop/{reason}": reasons.count(reason) / len(reasons) for reason in STOP_REASONS}
    metrics["agent/turns"] = float(batch["turns"].float().mean())
    return metrics | {"agent/tokens_not_sampled": float((~batch["response_mask"].values).sum())}


def _with_arguments(rows: DataProto, arguments: list[dict[str, Any]]) -> DataProto:
    data_rows = rows["data_row"] if "data_row" in rows else [{}] * len(rows)
    return rows.with_columns(data_row=[row | more for row, more in zip(data_rows, arguments, strict=True)])


def last_answer(messages: list[dict[str, Any]]) -> str:
    """Return the text of the last answer in a conversation, or an empty one."""
    return next((str(m["content"]) for m in reversed(messages) if m["role"] == "assistant"), "")


def _mean(scores: Tensor, lost: dict[int, str]) -> float:
    kept = [score for row, score in enumerate(scores.tolist()) if row not in lost]
    return sum(kept) / len(kept) if kept else 0.0
