"""Dealing rows to the ranks, so that a mini-batch is made of the same rows on any number of them.

    learn = deal(batch, mini_batch=256, epochs=2, seed=seed, dp_size=4)
    actor.update_actor(learn, dealt=True)

    batch = even_shares(batch, tokens, dp_size=4)    # a batch that is one mini-batch

A call cuts its rows into one consecutive part for each rank. Left to itself, a rank could draw mini-batches from its
part alone, and what trains together would depend on the number of ranks. Here the mini-batches of all epochs are
drawn from all rows, and then each rank's part of each of them is put where that rank will find it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from camshaft.dataproto import DataProto


def deal(batch: DataProto, mini_batch: int, epochs: int, seed: int | None, dp_size: int) -> DataProto:
    """The rows of every epoch: those of rank 0 first, and of each rank mini-batch after mini-batch.

    `mini_batch` counts over all ranks and divides by them. `seed` shuffles each epoch; None keeps the order.
    """
    return batch.reorder(dealt_rows(len(batch), mini_batch, epochs, seed, dp_size))


def dealt_rows(count: int, mini_batch: int, epochs: int, seed: int | None, dp_size: int) -> Tensor:
    """The numbers of the rows, out of `count`, in the order that `deal` puts them."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    rows = torch.arange(count)
    passes = [rows if generator is None else torch.randperm(count, generator=generator) for _ in range(epochs)]
    places = torch.cat(passes).view(-1, dp_size, mini_batch // dp_size)
    return places.transpose(0, 1).flatten()


def even_shares(batch: DataProto, tokens: Tensor, dp_size: int) -> DataProto:
    """The rows in an order that gives each rank as many rows as the others and about as many tokens.

    `tokens` (B,) counts those of each row. Longest first, each goes to the rank with the fewest tokens that has room.
    """
    sizes: list[int] = tokens.tolist()
    room = len(batch) // dp_size
    shares: list[list[int]] = [[] for _ in range(dp_size)]
    loads = [0] * dp_size
    for row in sorted(range(len(batch)), key=lambda row: (-sizes[row], row)):
        rank = min((rank for rank in range(dp_size) if len(shares[rank]) < room), key=lambda rank: (loads[rank], rank))
        shares[rank].append(row)
        loads[rank] += sizes[row]
    return batch.reorder([row for share in shares for row in sorted(share)])
