"""Soft overlong penalty: lower the training scores of responses near the length limit.

    rewards = OverlongPenalty(manager, limit=20480, buffer=4096, factor=1.0, log=True)
    result = rewards.score(batch, decode)       # wraps a `RewardManager` or `CombinedRewards`

The penalty is 0 up to `limit - buffer` tokens and grows linearly to `factor` at the limit, where generation stops. It
is the soft overlong punishment of Yu et al., arXiv:2503.14476. The penalty is added to `token_level_scores`, which
training uses, but not to `scores`, which validation uses.
"""

from dataclasses import replace

from torch import Tensor

from camshaft.dataproto import DataProto
from camshaft.ragged import on_last_token
from camshaft.rewards.combined import CombinedRewards
from camshaft.rewards.manager import Decode, PendingScores, RewardManager, RewardResult


def penalty(lengths: Tensor, limit: int, buffer: int, factor: float) -> Tensor:
    """Compute -factor * clip((length - (limit - buffer)) / buffer, 0, 1) for each of the `lengths`, (B,)."""
    return -factor * ((lengths - (limit - buffer)) / buffer).clamp(0, 1)


class OverlongPenalty:
    """Scoring with `rewards` and the overlong penalty."""

    def __init__(
        self, rewards: RewardManager | CombinedRewards, *, limit: int, buffer: int, factor: float, log: bool = False
    ):
        self.rewards, self.limit, self.buffer, self.factor, self.log = rewards, limit, buffer, factor, log

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Columns of the data file that the scoring function reads; see `RewardManager.columns`."""
        return self.rewards.columns

    def check_rows(self, rows: DataProto) -> None:
        """Check that the scoring function can be called; see `RewardManager.check_rows`."""
        self.rewards.check_rows(rows)

    def begin(self, rows: DataProto) -> PendingScores | None:
        """Start scoring while responses are still being generated; see `RewardManager.begin`."""
        return self.rewards.begin(rows)

    def score(self, batch: DataProto, decode: Decode, pending: PendingScores | None = None) -> RewardResult:
        """Score a batch. With `log`, the metrics include the mean penalty and the fraction of penalized responses."""
        result = self.rewards.score(batch, decode, pending)
        responses = batch.ragged("responses")
        penalties = penalty(responses.lengths, self.limit, self.buffer, self.factor)
        penalized = result.token_level_scores.values + on_last_token(penalties, batch.ragged("response_mask")).values
        metrics = {
            "reward/overlong_reward/mean": float(penalties.mean()),
            "reward/overlong/mean": float((penalties < 0).float().mean()),
        }
        return replace(
            result,
            token_level_scores=result.token_level_scores.like(penalized),
            metrics=result.metrics | (metrics if self.log else {}),
        )

    def close(self) -> None:
        """Stop the worker processes of the scoring function."""
        self.rewards.close()
