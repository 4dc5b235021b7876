"""Seeds of a step, and mini-batches: row orders that make a mini-batch contain the same rows on any number of ranks.

    rows = sharded_rows(len(batch), mini_batch=256, epochs=2, seed=seed, dp_size=4)
    actor.update_actor(batch.reorder(rows), presharded=True)

    batch = even_shares(batch, tokens, dp_size=4)    # a batch that is one mini-batch

A call splits its rows into one consecutive part per rank. If each rank drew mini-batches from its own part, the rows of
a mini-batch would depend on the number of ranks. Instead the driver draws the mini-batches of all epochs from all rows
and arranges the rows so that each rank receives its part of every mini-batch, in order.

Seeds are functions of the run's seed, the step and the row. A run that resumes at step 10 draws the same numbers in
step 11 as an uninterrupted run, without a saved generator state. The samples of a row do not depend on the rank that
generates them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from camshaft.dataproto import DataProto


def sharded_rows(count: int, mini_batch: int, epochs: int, seed: int | None, dp_size: int) -> Tensor:
    """Return row numbers, of `count` rows, for all epochs: first those of rank 0, mini-batch after mini-batch.

    `mini_batch` counts rows over all ranks and is a multiple of `dp_size`. `seed` shuffles each epoch; None keeps the
    order.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    rows = torch.arange(count)
    passes = [rows if generator is None else torch.randperm(count, generator=generator) for _ in range(epochs)]
    parts = torch.cat(passes).view(-1, dp_size, mini_batch // dp_size)
    return parts.transpose(0, 1).flatten()


def even_shares(batch: DataProto, tokens: Tensor, dp_size: int) -> DataProto:
    """Reorder the rows so that every rank gets the same number of rows and about the same number of tokens.

    `tokens` (B,) counts the tokens of each row. Rows are assigned longest first, each to the rank with the fewest
    tokens among those that are not full.
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
"""Step number of validation; training steps start at 1."""

_ROWS = 1 << 24
_STEPS = 1 << 20


def sampling_seeds(seed: int, step: int, num_rows: int, first: int = 0) -> Tensor:
    """Return a seed per row from row `first` on, (num_rows,) int64, unique per (seed mod 2**18, step, row)."""
    return torch.arange(first, first + num_rows) + _ROWS * (step + _STEPS * (seed % (1 << 18)))


def shuffle_seed(seed: int, step: int) -> int:
    """Return the seed of the mini-batch order of a step; torch uses 32 bits, so it is unique per seed mod 2**12."""
    return step + _STEPS * seed
