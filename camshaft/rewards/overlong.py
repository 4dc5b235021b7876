"""Soft overlong penalty: lower the training scores of responses near the length limit.

    rewards = OverlongPenalty(manager, limit=20480, buffer=4096, factor=1.0, log=True)
    result = rewards.score(batch, decode)       # wraps a `RewardManager` or `CombinedRewards`

The penalty is 0 up to `limit - buffer` tokens and grows linearly to `factor` at the limit, where generation stops. It
is the soft overlong punishment of Yu et al., arXiv:2503.14476. The penalty is added to `token_level_scores`, which
training uses, but not to `scores`, which validation uses.
"""

from dataclasses import replace

import torch
from torch import Tensor

from camshaft.dataproto import DataProto
from camshaft.ragged import on_last_token
from camshaft.rewards.combined import RewardsWrapper
from camshaft.rewards.manager import Decode, PendingScores, RewardManager, RewardResult


def penalty(lengths: Tensor, limit: int, buffer: int, factor: float) -> Tensor:
    """Compute -factor * clip((length - (limit - buffer)) / buffer, 0, 1) for each of the `lengths`, (B,)."""
    return -factor * ((lengths - (limit - buffer)) / buffer).clamp(0, 1)


class OverlongPenalty(RewardsWrapper):
    """Scoring with `rewards` and the overlong penalty."""

    def __init__(self, rewards: RewardManager | RewardsWrapper, *, limit: int, buffer: int, factor: float, log: bool):
        super().__init__(rewards)
        self.limit, self.buffer, self.factor, self.log = limit, buffer, factor, log

    def score(self, batch: DataProto, decode: Decode, pending: PendingScores | None = None) -> RewardResult:
        """Score a batch. With `log`, the metrics include the mean penalty and the fraction of penalized responses."""
        assert self.rewards is not None
        result = self.rewards.score(batch, decode, pending)
        penalties = penalty(_lengths(batch), self.limit, self.buffer, self.factor)
        penalized = result.token_level_scores.values + on_last_token(penalties, batch.ragged("response_mask")).values
        metrics = {
            "reward/overlong_reward/mean": float(penalties.mean()),
            "reward/overlong/mean": float((penalties < 0).float().mean()),
        }
        scores = result.token_level_scores.like(penalized)
        return replace(result, token_level_scores=scores, metrics=result.metrics | (metrics if self.log else {}))


def _lengths(batch: DataProto) -> Tensor:
    """Return the number of tokens behind the prompt of each row, (B,): of several sequences, that of the longest."""
    if "sequence_lengths" not in batch:
        return batch.ragged("responses").lengths
    return torch.stack([parts[:, 1].max() for parts in batch.ragged("sequence_lengths").rows()])
