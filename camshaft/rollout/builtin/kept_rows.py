"""Rows that a rollout keeps between calls, so that a later call computes only what has been added to them.

    kept = KeptRows()
    resumed = kept.take(row_id, context)     # the row and the number of its tokens that `context` begins with
    cache.write(slot, *resumed)
    kept.release(resumed.row)                # counts until then
    kept.add(row_id, cache.read(slot, length))
    kept.set_tokens(row_id, tokens)

A kept row is a copy of its slot and needs no more memory than its tokens. When memory is short, the rows that have not
been used for the longest time are dropped; they are then computed again.
"""

import os
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from camshaft.machine import memory_limit
from camshaft.rollout.builtin.kv_cache import CachedRow

BUDGET_SHARE = 1 / 3
"""Share of the device memory for the KV cache that kept rows may use."""

MACHINE_SHARE = 1 / 4
"""Share of the memory of the machine or container that the kept rows of all its ranks may use on a CPU."""


class Resumed(NamedTuple):
    """A kept row that is continued."""

    row: CachedRow
    length: int
    """Number of its positions that are valid for the new context, at least 1."""


class KeptRows:
    """Kept rows by id, in the order of their last use."""

    def __init__(self) -> None:
        self._rows: dict[Hashable, CachedRow] = {}
        self.tokens: dict[Hashable, Tensor] = {}
        """Tokens of the rows that can be taken."""
        self.num_bytes = 0
        """Size of all rows, and of those that have been taken and not released."""
        self.max_bytes = memory_limit() * MACHINE_SHARE / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        """Maximum size of all rows. The size of the device's memory replaces that of the machine."""

    def limit(self, budget: int) -> int:
        """Reserve a share of the device memory for kept rows, and return the rest."""
        self.max_bytes = budget * BUDGET_SHARE
        self._evict()
        return int(budget - self.max_bytes)

    def take(self, row_id: Hashable, context: Tensor) -> Resumed | None:
        """Remove a row. Return it if tokens at the beginning of `context` are those of the row.

        A recurrent state is valid only if all tokens of the row are. A returned row counts until it is released.
        """
        tokens = self.tokens.get(row_id)
        row = self._remove(row_id)
        if row is None or tokens is None:
            return None
        size = min(len(tokens), len(context) - 1)  # the last token is computed, because its logits are needed
        differs = (tokens[:size] != context[:size]).nonzero()
        length = int(differs[0, 0]) if len(differs) else size
        if length < (len(tokens) if row.states else 1):
            return None
        self.num_bytes += row.num_bytes
        return Resumed(row, length)

    def release(self, row: CachedRow) -> None:
        """Count a row that was taken no longer, because a slot contains it."""
        self.num_bytes -= row.num_bytes

    def add(self, row_id: Hashable, row: CachedRow) -> None:
        """Keep a row, whose tokens must be set before it can be taken. Rows beyond `max_bytes` are dropped."""
        self._remove(row_id)
        self._rows[row_id] = row
        self.num_bytes += row.num_bytes
        self._evict()

    def set_tokens(self, row_id: Hashable, tokens: Tensor) -> None:
        """Set the tokens (length,) of a row that was added. A row that was dropped stays dropped."""
        if row_id in self._rows:
            self.tokens[row_id] = tokens.to("cpu", torch.int64)

    def close(self, row_ids: Iterable[Hashable]) -> None:
        for row_id in row_ids:
            self._remove(row_id)

    def clear(self) -> None:
        """Drop all rows, and no longer count those that were taken."""
        self.close(list(self._rows))
        self.num_bytes = 0

    def _evict(self) -> None:
        while self._rows and self.num_bytes > self.max_bytes:
            self._remove(next(iter(self._rows)))

    def _remove(self, row_id: Hashable) -> CachedRow | None:
        row = self._rows.pop(row_id, None)
        self.tokens.pop(row_id, None)
        self.num_bytes -= 0 if row is None else row.num_bytes
        return row
