"""A penalty for responses that come close to the length limit, taken from the scores that are trained on.

    rewards = OverlongPenalty(manager, limit=20480, buffer=4096, factor=1.0, log=True)
    result = rewards.score(batch, decode)       # as a `RewardManager` or `CombinedRewards`, which it is made of

It is 0 up to `limit - buffer` tokens and grows from there in a straight line to `factor` at the limit, where generation
stops (Yu et al., arXiv:2503.14476, soft overlong punishment). `token_level_scores` have it; `scores`, which validation
reads, stay what functions and model gave.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from camshaft.dataproto import DataProto
from camshaft.rewards.combined import CombinedRewards
from camshaft.rewards.last_token import on_last_token
from camshaft.rewards.manager import Begun, Decode, RewardManager, RewardResult


def penalty(lengths: Tensor, limit: int, buffer: int, factor: float) -> Tensor:
    """(B,) lengths -> (B,) -factor clip((length - (limit - buffer)) / buffer, 0, 1)."""
    return -factor * ((lengths - (limit - buffer)) / buffer).clamp(0, 1)


class OverlongPenalty:
    """Scores of `rewards`, less the penalty."""

    def __init__(
        self, rewards: RewardManager | CombinedRewards, *, limit: int, buffer: int, factor: float, log: bool = False
    ):
        self.rewards, self.limit, self.buffer, self.factor, self.log = rewards, limit, buffer, factor, log

    def begin(self, rows: DataProto) -> Begun | None:
        """`RewardManager.begin`."""
        return self.rewards.begin(rows)

    def score(self, batch: DataProto, decode: Decode, begun: Begun | None = None) -> RewardResult:
        """`RewardManager.score`; with `log`, the mean penalty and the share of responses that have one."""
        given = self.rewards.score(batch, decode, begun)
        responses = batch.ragged("responses")
        taken = penalty(responses.lengths, self.limit, self.buffer, self.factor)
        shaped = given.token_level_scores.values + on_last_token(taken, batch.ragged("response_mask")).values
        told = {
            "reward/overlong_reward/mean": float(taken.mean()),
            "reward/overlong/mean": float((taken < 0).float().mean()),
        }
        return replace(
            given,
            token_level_scores=given.token_level_scores.like(shaped),
            metrics=given.metrics | (told if self.log else {}),
        )

    def close(self) -> None:
        """End the function's processes."""
        self.rewards.close()
