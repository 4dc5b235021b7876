"""Data loader with shuffled epochs that resumes exactly at the row where it stopped.

    loader = StatefulLoader(rows.batch, batch_size=256, seed=1, total_epochs=15)
    for batch in loader:
        ...
        state = loader.state_dict()      # saved in the checkpoint
    loader.load_state_dict(state)        # continue with the batch after the last one returned

    batch = loader.next_batch()          # an additional batch within a step
    loader.give_back(3)                  # return its last 3 rows; they start the next batch

The order of an epoch depends only on the seed and the epoch number, so the state is an epoch and a position. Used by
the trainers.
"""

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch

from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import BatchError

_MEANS = {
    "num_rows": "rows were added or removed",
    "shuffle": "the order of the rows differs",
    "seed": "the order of the rows differs",
    "tokens": "the tokens or the order of the rows in the files differ",
}
"""Reason for the error if a value of the saved state differs from the loader's."""


class StatefulLoader:
    """Iterate over `data` in batches for `total_epochs` epochs, from the current position.

    `drop_last` (required by PPO) drops the rows of an epoch that do not fill a batch; with `shuffle` they differ
    between epochs. `uid` becomes `<epoch>/<uid>`, which is unique over the run.
    """

    def __init__(
        self,
        data: DataProto,
        batch_size: int,
        *,
        total_epochs: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        rows_per_step: int | None = None,
    ):
        """`rows_per_step` is the number of rows per training step if a step takes several batches; None: one batch."""
        if batch_size < 1:
            raise BatchError(f"batch_size={batch_size} must be at least 1")
        if not len(data):
            raise BatchError("the data has no rows")
        if drop_last and len(data) < batch_size:
            key = "data.train_batch_size" if rows_per_step in (None, batch_size) else "data.gen_batch_size"
            raise BatchError(
                f"the data has {len(data)} rows, one batch needs {batch_size}: {batch_size - len(data)} are missing. "
                f"Lower {key} to {len(data)} or less, or add data"
            )
        self.data = data
        self.batch_size = batch_size
        self.total_epochs = total_epochs
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.rows_per_step = rows_per_step or batch_size
        self.epoch = 0
        """Epoch of the next batch, counted from 0."""
        self.position = 0
        """Rows of that epoch that were already returned."""
        self._last = (0, 0)
        """Epoch and position at the end of the last batch."""
        self._shuffled: tuple[int, np.ndarray] = (-1, np.arange(0))
        """Cached row order: epoch and permutation."""

    @property
    def steps_per_epoch(self) -> int:
        full, rest = divmod(len(self.data), self.rows_per_step)
        return full if self.drop_last or not rest else full + 1

    def __len__(self) -> int:
        """Return the number of steps in all epochs, including finished ones; an upper bound if steps take more rows."""
        return self.steps_per_epoch * self.total_epochs

    @property
    def exhausted(self) -> bool:
        """True if all batches were returned."""
        return self.epoch >= self.total_epochs

    def __iter__(self) -> Iterator[DataProto]:
        while not self.exhausted:
            yield self.next_batch()

    def next_batch(self) -> DataProto:
        """Return the next batch; after the last epoch, continue with a further epoch."""
        epoch = self.epoch
        rows = self._order(epoch)[self.position : self.position + self.batch_size]
        self._last = epoch, self.position + len(rows)
        self._advance(len(rows))
        batch = self.data.reorder(torch.from_numpy(rows))
        return batch.with_columns(uid=[f"{epoch}/{uid}" for uid in batch["uid"]]) if "uid" in batch else batch

    def give_back(self, rows: int) -> None:
        """Return the last `rows` rows of the last batch to the loader.

        They start the next batch. At the end of an epoch they are dropped if the remaining rows do not fill a batch.
        """
        self.epoch, self.position = self._last
        self._advance(-rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, with facts that identify the data."""
        return {"epoch": self.epoch, "position": self.position} | self._identity()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; raise BatchError if it was saved with other data or another order."""
        for name, current in self._identity().items():
            if name in state and state[name] != current:
                raise BatchError(
                    f"the saved data position has {name}={state[name]}, this run has {name}={current}: {_MEANS[name]}. "
                    "Resume with the same data, lengths, tokenizer and seed, or start a new run with "
                    "trainer.resume_mode=disable or another trainer.experiment_name"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._advance(0)  # with another batch size the remaining rows may not fill a batch

    def _identity(self) -> dict[str, Any]:
        return {"num_rows": len(self.data), "shuffle": self.shuffle, "seed": self.seed, "tokens": self._tokens}

    @cached_property
    def _tokens(self) -> str:
        """Checksum of all tokens, which detects changed data with the same number of rows."""
        digest = hashlib.sha256()
        for name, column in sorted(self.data.columns.items()):
            for tensor in (column.values, column.lengths) if isinstance(column, Ragged) else ():
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
                digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()[:16]

    def _order(self, epoch: int) -> np.ndarray:
        if self._shuffled[0] != epoch:
            count = len(self.data)
            order = np.random.default_rng((self.seed, epoch)).permutation(count) if self.shuffle else np.arange(count)
            self._shuffled = epoch, order
        return self._shuffled[1]

    def _advance(self, rows: int) -> None:
        self.position += rows
        remaining = len(self.data) - self.position
        if remaining < (self.batch_size if self.drop_last else 1):
            self.epoch, self.position = self.epoch + 1, 0
