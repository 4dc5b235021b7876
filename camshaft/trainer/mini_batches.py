"""Seeds of a step, and row orders that make mini-batches independent of the number of ranks.

    rows = shard_rows(len(batch), mini_batch=256, epochs=2, seed=seed, dp_size=4)
    actor.update_actor(batch.reorder(rows), presharded=True)

    batch = balance_ranks(batch, tokens, dp_size=4)    # for a batch that is one mini-batch

A worker call splits its rows into one consecutive shard per rank. If each rank drew mini-batches from its shard, the
rows of a mini-batch would depend on the number of ranks. Instead, the driver draws the mini-batches of all epochs from
all rows. It orders the rows such that the shard of each rank contains the rank's rows of every mini-batch, in order.

`TokenSelection` selects tokens for a policy loss by statistics over each mini-batch.

Seeds are functions of the seed of the run, the step and the row. A run that resumes after step 10 therefore uses the
same seeds in step 11 as an uninterrupted run, without saving a generator state. The samples of a row do not depend on
the rank that generates them.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from camshaft.algorithms import covariances, high_entropy_tokens, largest_tokens, tokens_between
from camshaft.config import PPOConfig
from camshaft.config.schema.policy_loss import PolicyLossConfig
from camshaft.dataproto import DataProto, Ragged
from camshaft.rollout import uniform_numbers


def shard_rows(count: int, mini_batch: int, epochs: int, seed: int | None, dp_size: int) -> Tensor:
    """Return the row indices of all epochs, ordered by rank, then by mini-batch.

    `count` is the number of rows. `mini_batch` is the number of rows of a mini-batch over all ranks, a multiple of
    `dp_size`. `seed` shuffles each epoch; None disables shuffling.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    rows = torch.arange(count)
    epoch_rows = [rows if generator is None else torch.randperm(count, generator=generator) for _ in range(epochs)]
    parts = torch.cat(epoch_rows).view(-1, dp_size, mini_batch // dp_size)
    return parts.transpose(0, 1).flatten()


def first_mini_batch(rows: Tensor, mini_batch: int, dp_size: int) -> Tensor:
    """Return the rows of the first mini-batch in the result of `shard_rows`, ordered by rank."""
    return rows.view(dp_size, -1)[:, : mini_batch // dp_size].flatten()


def balance_ranks(batch: DataProto, tokens: Tensor, dp_size: int) -> DataProto:
    """Reorder the rows such that each rank receives the same number of rows and about the same number of tokens.

    `tokens` (B,) is the number of tokens of each row. In order of decreasing length, each row is assigned to the rank
    with the fewest tokens among the ranks that need more rows.
    """
    sizes: list[int] = tokens.tolist()
    rows_per_rank = len(batch) // dp_size
    shares: list[list[int]] = [[] for _ in range(dp_size)]
    loads = [0] * dp_size
    for row in sorted(range(len(batch)), key=lambda row: (-sizes[row], row)):
        open_ranks = (rank for rank in range(dp_size) if len(shares[rank]) < rows_per_rank)
        rank = min(open_ranks, key=lambda rank: (loads[rank], rank))
        shares[rank].append(row)
        loads[rank] += sizes[row]
    return batch.reorder([row for share in shares for row in sorted(share)])


VALIDATION = 0
"""Step number that validation uses for seeds. Training steps start at 1."""

_ROWS = 1 << 24
_STEPS = 1 << 20


def sampling_seeds(seed: int, step: int, num_rows: int, first: int = 0) -> Tensor:
    """Return a seed for each of `num_rows` rows from `first` on, (num_rows,) int64.

    The seed is unique for (seed mod 2**18, step, row).
    """
    return torch.arange(first, first + num_rows) + _ROWS * (step + _STEPS * (seed % (1 << 18)))


def shuffle_seed(seed: int, step: int) -> int:
    """Return the seed for the mini-batch order of a step.

    torch uses 32 bits of it, so it is unique for (seed mod 2**12, step).
    """
    return step + _STEPS * seed


# -- tokens of a policy loss ----------------------------------------------------------------------

_OFFSET = 1 << 40
"""Position of the first random number. Smaller ones belong to the sampling of the tokens."""


@dataclass(frozen=True)
class TokenSelection:
    """Selects the tokens of `clip_cov`, `kl_cov` and `top_entropy_quantile` by statistics over a mini-batch.

        columns = selection.columns(batch, rows, mini_batch=64, dp_size=4)     # selected_tokens, high_entropy

    The statistics come from the columns of the batch before the update, of all rows of a mini-batch. The selection
    depends neither on micro-batches nor on ranks; its random numbers are a function of (seed, step, row, position).
    """

    loss: PolicyLossConfig

    @classmethod
    def of(cls, config: PPOConfig) -> Self | None:
        """Return None if the loss of a run selects no tokens."""
        return cls(config.actor_rollout_ref.actor.policy_loss) if config.selects_tokens() else None

    def columns(self, batch: DataProto, rows: Tensor, mini_batch: int, dp_size: int) -> dict[str, Ragged]:
        """Return the columns of the selection for the rows `rows` of the batch.

        `rows` is the result of `shard_rows` for the same sizes.
        """
        shape = (dp_size, -1, mini_batch // dp_size)
        mini_batches = rows.view(shape).transpose(0, 1).flatten(1).contiguous()
        positions = torch.arange(len(rows)).view(shape).transpose(0, 1).flatten()
        parts: dict[str, list[Ragged]] = {}
        for members in mini_batches:
            ordered = members.sort().values  # so that equal statistics select the same tokens on any number of ranks
            for name, column in self._select(batch.reorder(ordered)).items():
                parts.setdefault(name, []).append(column.select(torch.searchsorted(ordered, members)))
        order = positions.argsort()
        return {name: Ragged.concat(columns).select(order) for name, columns in parts.items()}

    def _select(self, batch: DataProto) -> dict[str, Ragged]:
        """Return the columns for the rows of a mini-batch."""
        like, mask = batch.ragged("response_mask"), batch["response_mask"].values
        if "rollout_rs_mask" in batch:
            mask = mask & batch["rollout_rs_mask"].values
        columns: dict[str, Tensor] = {}
        if self.loss.selects_by_covariance():
            columns["selected_tokens"] = self._select_by_covariance(batch, mask)
        if self.loss.top_entropy_quantile < 1:
            columns["high_entropy"] = high_entropy_tokens(batch["entropy"].values, mask, self.loss.top_entropy_quantile)
        return {name: like.like(column) for name, column in columns.items()}

    def _select_by_covariance(self, batch: DataProto, mask: Tensor) -> Tensor:
        covariance = covariances(batch["old_log_probs"].values, batch["advantages"].values, mask)
        if self.loss.loss_mode == "kl_cov":
            return largest_tokens(covariance, mask, self.loss.kl_cov_ratio)
        responses = batch.ragged("responses")
        seeds = batch["sampling_seed"][responses.row_ids()]
        numbers = uniform_numbers(seeds, responses.positions() + _OFFSET)
        bounds = (self.loss.clip_cov_lb, self.loss.clip_cov_ub)
        return tokens_between(covariance, mask, self.loss.clip_cov_ratio, bounds, numbers)
