"""Add the rewards of environments to the scores of optional other rewards.

    rewards = EnvironmentRewards(manager)           # None uses only the rewards of the environments
    result = rewards.score(batch, decode)           # requires the columns of episodes

    score = score of the other rewards + sum of the rewards of the turns

A reward function receives the text of the last answer as the response, and by name `messages`, `turns` and
`stop_reason`. A row whose environment has failed, or whose prompt was too long, has no score: it is dropped, also with
`custom_reward_function.on_error=zero`, and validation leaves it out. With `raise`, a failed environment is an error.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import RewardError
from camshaft.rewards.combined import RewardsWrapper
from camshaft.rewards.manager import COUNTS, Decode, PendingScores, RewardFailure, RewardManager, RewardResult

ENVIRONMENT = "environment"
TOO_LONG = "prompt"
"""Stop reason of an episode whose prompt is too long after `reset`."""
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
        failures = list(_failures(batch))
        lost = {failure.row: failure.kind for failure in failures}
        self._report(failures, len(batch))
        played = [row for row in range(len(batch)) if row not in lost]
        result = self._other_scores(batch.reorder(torch.tensor(played, dtype=torch.int64)))
        result = _spread(result, played, turn_scores)
        return replace(
            result,
            token_level_scores=result.token_level_scores.map(lambda values: values + turn_scores.values),
            scores=result.scores + scores,
            metrics=result.metrics | {f"reward/{ENVIRONMENT}/mean": _mean(scores, lost)} | _episode_metrics(batch),
            parts=tuple(
                parts | {ENVIRONMENT: score} for parts, score in zip(result.parts, scores.tolist(), strict=True)
            ),
            failures=tuple(failures) + result.failures,
            failed={**result.failed, **lost},
            dropped=tuple(sorted({*result.dropped, *lost})),
            unplayed=tuple(lost),
        )

    def _other_scores(self, batch: DataProto) -> RewardResult:
        if self.rewards is None or not len(batch):
            counts = {f"reward/{name}": 0.0 for name in (*COUNTS.values(), "slow")}
            zeros, count = batch.ragged("env_scores").map(torch.zeros_like), len(batch)
            return RewardResult(torch.zeros(count), counts, (), ({},) * count, (None,) * count, zeros)
        columns = zip(batch["transcript"], batch["turns"].tolist(), batch["stop_reason"], strict=True)
        arguments = [episode_arguments(*values) for values in columns]
        answers = [last_answer(messages) for messages in batch["transcript"]]
        return self.rewards.score(_with_arguments(batch, arguments), lambda ids: answers)

    def _report(self, failures: Sequence[RewardFailure], num_episodes: int) -> None:
        """Log the episodes without a score, or raise the first failure of an environment."""
        faults = [failure for failure in failures if failure.kind != TOO_LONG]
        if faults and self.raises:
            raise RewardError(f"the environment failed: {faults[0]}")
        if failures:
            distinct = {(failure.kind, failure.message, failure.trace): failure for failure in reversed(failures)}
            logger.warning(
                "%d of %d episodes have no score: the environment failed in %d, and %d prompts are too long after "
                "reset. First failures:\n%s",
                *(len(failures), num_episodes, len(faults), len(failures) - len(faults)),
                "\n".join(str(failure) for failure in list(distinct.values())[: -_NUM_SHOWN - 1 : -1]),
            )


def _spread(result: RewardResult, rows: Sequence[int], like: Ragged) -> RewardResult:
    """Return the result for `rows` of a batch as that for the whole batch, in which other rows have 0.

    `like` has the lengths of the rows of the batch.
    """
    count = len(like.lengths)
    if len(rows) == count:
        return result
    is_scored = torch.zeros(count, dtype=torch.bool)
    is_scored[list(rows)] = True
    parts: list[dict[str, float]] = [{}] * count
    answers: list[str | None] = [None] * count
    for row, values, answer in zip(rows, result.parts, result.answers, strict=True):
        parts[row], answers[row] = values, answer
    tokens = torch.zeros_like(like.values)
    tokens[is_scored[like.row_ids()]] = result.token_level_scores.values
    scores = torch.zeros(count)
    scores[is_scored] = result.scores
    return replace(
        result,
        scores=scores,
        parts=tuple(parts),
        answers=tuple(answers),
        token_level_scores=like.like(tokens),
        failures=tuple(replace(failure, row=rows[failure.row]) for failure in result.failures),
        failed={rows[row]: kind for row, kind in result.failed.items()},
        dropped=tuple(rows[row] for row in result.dropped),
    )


def _failures(batch: DataProto) -> Iterator[RewardFailure]:
    """Yield the episodes without a score."""
    columns = (batch[name] for name in ("stop_reason", "env_failure", "transcript", "data_source"))
    for row, (reason, fault, messages, source) in enumerate(zip(*columns, strict=True)):
        if reason != TOO_LONG and fault is None:
            continue
        text = fault or f"{TOO_LONG}: the prompt is longer than data.max_prompt_length after reset"
        message, _, trace = text.partition("\n")
        kind, _, message = message.partition(": ")
        yield RewardFailure(row, kind, source, message, trace, 0.0, last_answer(messages), ENVIRONMENT)


def _episode_metrics(batch: DataProto) -> dict[str, float]:
    """Compute the number of answers of an episode, the tokens that were not sampled, and why episodes ended."""
    reasons: list[str] = list(batch["stop_reason"])
    metrics = {f"agent/stop/{reason}": reasons.count(reason) / len(reasons) for reason in STOP_REASONS}
    metrics["agent/turns"] = float(batch["turns"].float().mean())
    return metrics | {"agent/tokens_not_sampled": float((~batch["response_mask"].values).sum())}


def _with_arguments(rows: DataProto, arguments: list[dict[str, Any]]) -> DataProto:
    data_rows = rows["data_row"] if "data_row" in rows else [{}] * len(rows)
    return rows.with_columns(data_row=[row | more for row, more in zip(data_rows, arguments, strict=True)])


def episode_arguments(messages: Sequence[Mapping[str, Any]], turns: int, stop_reason: str | None) -> dict[str, Any]:
    """Return the arguments of reward functions that describe an episode."""
    return dict(zip(EPISODE_ARGUMENTS, (messages, turns, stop_reason), strict=True))


def last_answer(messages: list[dict[str, Any]]) -> str:
    """Return the text of the last answer in a conversation, or an empty one."""
    return next((str(m["content"]) for m in reversed(messages) if m["role"] == "assistant"), "")


def _mean(scores: Tensor, lost: Mapping[int, str]) -> float:
    kept = [score for row, score in enumerate(scores.tolist()) if row not in lost]
    return sum(kept) / len(kept) if kept else 0.0
