"""Deals batches out over epochs, shuffled by seed, and continues exactly where it was stopped.

    loader = StatefulLoader(rows.batch, batch_size=256, seed=1, total_epochs=15)
    for batch in loader:
        ...
        state = loader.state_dict()      # kept in the checkpoint: two numbers and what they are places in
    loader.load_state_dict(state)        # the next batch is the one after the last that was given out

    batch = loader.next_batch()          # one more in mid-step; of the last one, the rows that were not needed
    loader.give_back(3)                  # come again, as the first of the next batch

The order of an epoch depends on the seed and the number of the epoch alone, so nothing but the place has
to be saved. Used by the trainers.
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
    "num_rows": "rows were added or taken away",
    "shuffle": "the rows would come in another order",
    "seed": "the rows would come in another order",
    "tokens": "the rows have other tokens, or stand in another order",
}
"""What it says of the data where a fact of the saved place is another now."""


class StatefulLoader:
    """Batches of `data` for `total_epochs` passes; iterating continues from the current place.

    With `drop_last` (what PPO needs) the rows of an epoch that do not fill a batch are left out; with
    `shuffle` they are others in each epoch. `uid` becomes `<epoch>/<uid>`, unique over the whole run.
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
        """`rows_per_step` is what steps need that take any number of batches; otherwise a batch is a step."""
        if batch_size < 1:
            raise BatchError(f"a batch needs at least one row, got batch_size={batch_size}")
        if not len(data):
            raise BatchError("there are no rows to make batches of")
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
        """The epoch that the next batch belongs to, counted from 0."""
        self.position = 0
        """How many rows of it have been given out."""
        self._last = (0, 0)
        """Where the last batch ended."""
        self._shuffled: tuple[int, np.ndarray] = (-1, np.arange(0))
        """An epoch and its order."""

    @property
    def steps_per_epoch(self) -> int:
        full, rest = divmod(len(self.data), self.rows_per_step)
        return full if self.drop_last or not rest else full + 1

    def __len__(self) -> int:
        """Steps in all epochs together, those already done included; the most, where steps take many batches."""
        return self.steps_per_epoch * self.total_epochs

    @property
    def exhausted(self) -> bool:
        """The last batch has been given out."""
        return self.epoch >= self.total_epochs

    def __iter__(self) -> Iterator[DataProto]:
        while not self.exhausted:
            yield self.next_batch()

    def next_batch(self) -> DataProto:
        """The rows that are next, of one more epoch where all are through."""
        epoch = self.epoch
        rows = self._order(epoch)[self.position : self.position + self.batch_size]
        self._last = epoch, self.position + len(rows)
        self._advance(len(rows))
        batch = self.data.reorder(torch.from_numpy(rows))
        return batch.with_columns(uid=[f"{epoch}/{uid}" for uid in batch["uid"]]) if "uid" in batch else batch

    def give_back(self, rows: int) -> None:
        """The last `rows` of the last batch come again; at the end of an epoch, only with enough others to fill one."""
        self.epoch, self.position = self._last
        self._advance(-rows)

    def state_dict(self) -> dict[str, Any]:
        """The place, and what it is a place in."""
        return {"epoch": self.epoch, "position": self.position} | self._identity()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; an error if the data or its order are not those it was saved with."""
        for name, here in self._identity().items():
            # Checkpoints of before this was written down do not tell the checksum of the tokens.
            if name in state and state[name] != here:
                raise BatchError(
                    f"the saved place in the data belongs to {name}={state[name]}, here it is {here}: {_MEANS[name]}. "
                    "Resume with the same data, lengths, tokenizer and seed, or start afresh: type "
                    "trainer.resume_mode=disable, or another trainer.experiment_name"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._advance(0)  # with another batch size the rest of the epoch may be too short for a batch

    def _identity(self) -> dict[str, Any]:
        return {"num_rows": len(self.data), "shuffle": self.shuffle, "seed": self.seed, "tokens": self._tokens}

    @cached_property
    def _tokens(self) -> str:
        """Of all tokens, so that other rows are noticed that are as many."""
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
        left = len(self.data) - self.position
        if left < (self.batch_size if self.drop_last else 1):
            self.epoch, self.position = self.epoch + 1, 0
