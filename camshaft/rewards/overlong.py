"""Soft overlong penalty: subtract a penalty from the training scores of responses near the length limit.

    rewards = OverlongPenalty(manager, limit=20480, buffer=4096, factor=1.0, log=True)
    result = rewards.score(batch, decode)       # wraps a `RewardManager` or `CombinedRewards`

The penalty is 0 up to `limit - buffer` tokens and grows linearly to `factor` at the limit, where generation stops (Yu
et al., arXiv:2503.14476, soft overlong punishment). It applies to `token_level_scores`; `scores`, which validation
reads, are unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from camshaft.dataproto import DataProto
from camshaft.ragged import on_last_token
from camshaft.rewards.combined import CombinedRewards
from camshaft.rewards.manager import Begun, Decode, RewardManager, RewardResult


def penalty(lengths: Tensor, limit: int, buffer: int, factor: float) -> Tensor:
    """Compute -factor * clip((length - (limit - buffer)) / buffer, 0, 1) for lengths (B,)."""
    return -factor * ((lengths - (limit - buffer)) / buffer).clamp(0, 1)


class OverlongPenalty:
    """Scores of `rewards` minus the penalty."""

    def __init__(
        self, rewards: RewardManager | CombinedRewards, *, limit: int, buffer: int, factor: float, log: bool = False
    ):
        self.rewards, self.limit, self.buffer, self.factor, self.log = rewards, limit, buffer, factor, log

    def begin(self, rows: DataProto) -> Begun | None:
        """Start scoring before all responses are generated; see `RewardManager.begin`."""
        return self.rewards.begin(rows)

    def score(self, batch: DataProto, decode: Decode, begun: Begun | None = None) -> RewardResult:
        """Score a batch; with `log`, add the mean penalty and the fraction of penalized responses to the metrics."""
        result = self.rewards.score(batch, decode, begun)
        responses = batch.ragged("responses")
        penalties = penalty(responses.lengths, self.limit, self.buffer, self.factor)
        shaped = result.token_level_scores.values + on_last_token(penalties, batch.ragged("response_mask")).values
        metrics = {
            "reward/overlong_reward/mean": float(penalties.mean()),
            "reward/overlong/mean": float((penalties < 0).float().mean()),
        }
        return replace(
            result,
            token_level_scores=result.token_level_scores.like(shaped),
            metrics=result.metrics | (metrics if self.log else {}),
        )

    def close(self) -> None:
        """Stop the processes of the scoring function."""
        self.rewards.close()
