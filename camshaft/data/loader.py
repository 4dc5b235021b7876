"""Data loader that shuffles each epoch and resumes at the exact row where it stopped.

    loader = StatefulLoader(rows.batch, batch_size=256, seed=1, total_epochs=15)
    for batch in loader:
        ...
        state = loader.state_dict()      # saved in the checkpoint
    loader.load_state_dict(state)        # continue after the last batch before `state_dict`

    batch = loader.next_batch()          # one more batch for the same step
    loader.return_rows(3)                # return its last 3 rows, which then start the next batch

The row order of an epoch depends only on the seed and the epoch number, so an epoch and a position define the state.
"""

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch

from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import BatchError

_CHANGES = {
    "num_rows": "rows were added or removed",
    "shuffle": "the order of the rows differs",
    "seed": "the order of the rows differs",
    "tokens": "the tokens or the order of the rows in the files differ",
}
"""Reason to report if a value of the saved state differs from that of this loader."""


class StatefulLoader:
    """Iterator over batches of `data` that covers `total_epochs` epochs and starts at the current position.

    With `total_epochs=None`, it has no end.

    `drop_last`, which PPO requires, drops the rows at the end of an epoch that do not fill a batch. With `shuffle`,
    each epoch drops different rows. Column `uid` becomes `<epoch>/<uid>`, which is unique in the run.
    """

    def __init__(
        self,
        data: DataProto,
        batch_size: int,
        *,
        total_epochs: int | None = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        rows_per_step: int | None = None,
    ):
        """Set `rows_per_step` to the rows per training step if a step may use several batches; None means one batch."""
        if batch_size < 1:
            raise BatchError(f"batch_size={batch_size} must be at least 1")
        if not len(data):
            raise BatchError("the data has no rows; add rows")
        if drop_last and len(data) < batch_size:
            key = "data.train_batch_size" if rows_per_step in (None, batch_size) else "data.gen_batch_size"
            raise BatchError(
                f"the data has {len(data)} rows, but one batch needs {batch_size}. "
                f"Lower {key} to at most {len(data)}, or add at least {batch_size - len(data)} rows"
            )
        self.data, self.batch_size, self.total_epochs = data, batch_size, total_epochs
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.rows_per_step = rows_per_step or batch_size
        self.epoch = 0
        """Epoch of the next batch, starting from 0."""
        self.position = 0
        """Number of rows of that epoch that were already returned."""
        self._last_end = (0, 0)
        """Epoch and position at the end of the last batch, before a change of epoch."""
        self._cached_order: tuple[int, np.ndarray] = (-1, np.arange(0))
        """Cached row order as (epoch, permutation)."""

    @property
    def steps_per_epoch(self) -> int:
        num_full, remainder = divmod(len(self.data), self.rows_per_step)
        return num_full if self.drop_last or not remainder else num_full + 1

    def __len__(self) -> int:
        """Return the number of steps in all epochs, which is an upper bound if steps use more rows."""
        assert self.total_epochs is not None, "the loader has no end"
        return self.steps_per_epoch * self.total_epochs

    @property
    def exhausted(self) -> bool:
        """True after the last batch of the last epoch."""
        return self.total_epochs is not None and self.epoch >= self.total_epochs

    def __iter__(self) -> Iterator[DataProto]:
        while not self.exhausted:
            yield self.next_batch()

    def next_batch(self) -> DataProto:
        """Return the next batch. After the last epoch, start another one."""
        epoch = self.epoch
        rows = self._order(epoch)[self.position : self.position + self.batch_size]
        self._last_end = epoch, self.position + len(rows)
        self._advance(len(rows))
        batch = self.data.reorder(torch.from_numpy(rows))
        return batch.with_columns(uid=[f"{epoch}/{uid}" for uid in batch["uid"]]) if "uid" in batch else batch

    def return_rows(self, rows: int) -> None:
        """Return the last `rows` rows of the last batch to the loader, so that the next batch starts with them.

        At the end of an epoch, they are dropped if they and the remaining rows do not fill a batch.
        """
        self.epoch, self.position = self._last_end
        self._advance(-rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and position, and values that identify the data and its order."""
        return {"epoch": self.epoch, "position": self.position} | self._identity()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raise BatchError if it was saved with different data or in a different order."""
        for name, expected in self._identity().items():
            if name in state and state[name] != expected:
                raise BatchError(
                    f"the checkpoint was saved with {name}={state[name]}, but this run has {name}={expected}: "
                    f"{_CHANGES[name]}. Resume with the same data, lengths, tokenizer and seed, or start a new run "
                    "with trainer.resume_mode=disable or another trainer.experiment_name"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._advance(0)  # with a larger batch size, the remaining rows may not fill a batch

    def _identity(self) -> dict[str, Any]:
        return {"num_rows": len(self.data), "shuffle": self.shuffle, "seed": self.seed, "tokens": self._tokens}

    @cached_property
    def _tokens(self) -> str:
        """Checksum of all tokens, which differs if the data changed but the number of rows did not."""
        digest = hashlib.sha256()
        for name, column in sorted(self.data.columns.items()):
            for tensor in (column.values, column.lengths) if isinstance(column, Ragged) else ():
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
                digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()[:16]

    def _order(self, epoch: int) -> np.ndarray:
        if self._cached_order[0] != epoch:
            count = len(self.data)
            order = np.random.default_rng((self.seed, epoch)).permutation(count) if self.shuffle else np.arange(count)
            self._cached_order = epoch, order
        return self._cached_order[1]

    def _advance(self, rows: int) -> None:
        self.position += rows
        num_remaining = len(self.data) - self.position
        if num_remaining < (self.batch_size if self.drop_last else 1):
            self.epoch, self.position = self.epoch + 1, 0
