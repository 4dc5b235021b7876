"""DataProto: the batch type that data, roles and trainer exchange.

    batch = DataProto.from_dict({"prompts": ragged, "reward": torch.zeros(4), "uid": ["a", "a", "b", "b"]})
    batch.union(other)                    # add the columns of another batch with the same rows
    batch.repeat(4)                       # repeat each row four times, consecutively
    for part in batch.split(2): ...       # split into batches of at most two rows

A column is a `Ragged` (one value per token), a tensor (one entry per row) or a numpy object array (one Python object
per row). Operations do not modify a batch. They return a new one, which shares storage where possible. `columns.py`
lists all columns and their writers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from camshaft.columns import COLUMNS
from camshaft.device import to_device
from camshaft.errors import BatchError
from camshaft.ragged import Buffer, Ragged, Rows, from_buffer, row_index, to_buffer

Column = Ragged | Tensor | np.ndarray
OF_A_CALL = frozenset({"metrics", "ranks"})
"""Entries of `meta_info` that describe the worker call that returned a batch."""

__all__ = ["DataProto", "Ragged"]


class DataProto:
    """A batch: named columns with the same number of rows, and `meta_info`, which applies to the whole batch."""

    def __init__(self, columns: Mapping[str, Column] | None = None, meta_info: Mapping[str, Any] | None = None):
        self.columns: dict[str, Column] = dict(columns or {})
        self.meta_info: dict[str, Any] = dict(meta_info or {})
        counts = {name: len(column) for name, column in self.columns.items()}
        if len(set(counts.values())) > 1:
            raise BatchError(f"the columns have different numbers of rows: {counts}")
        self._length = next(iter(counts.values()), 0)

    @staticmethod
    def from_dict(columns: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> DataProto:
        """Build a batch. Tensors and `Ragged` are used directly; other sequences become columns of Python objects."""
        return DataProto({name: _as_column(name, value) for name, value in columns.items()}, meta_info)

    @staticmethod
    def from_responses(prompts: Ragged, responses: Ragged, **columns: Ragged) -> DataProto:
        """Build a batch that an engine reads: sequences of a prompt and its response as `input_ids`.

        Each of `columns` has one value per response token, such as `advantages`, and is 0 at the tokens of the prompt.
        `loss_mask` is one of them; by default, it is True at all response tokens.
        """
        columns = {"loss_mask": responses.map(lambda ids: torch.ones_like(ids, dtype=torch.bool))} | columns
        sequences = {"input_ids": Ragged.join(prompts, responses)}
        for name, column in columns.items():
            if not torch.equal(column.lengths, responses.lengths):
                raise BatchError(f"from_responses: column '{name}' must have one value per response token")
            zeros = column.values.new_zeros(len(prompts.values), *column.values.shape[1:])
            sequences[name] = Ragged.join(prompts.like(zeros), column)
        return DataProto(sequences)

    # -- access -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._length

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Any:
        if name not in self.columns:
            self.require(name)
        return self.columns[name]

    def __repr__(self) -> str:
        return f"DataProto({len(self)} rows: {', '.join(self.columns)})"

    def ragged(self, name: str) -> Ragged:
        """Return the column `name`; raise BatchError if it is missing or not a `Ragged`."""
        column = self[name]
        if not isinstance(column, Ragged):
            raise BatchError(f"column '{name}' must have one value per token, got {type(column).__name__}")
        return column

    def require(self, *names: str) -> DataProto:
        """Return this batch; raise BatchError if columns are missing. The message lists the writers of each."""
        missing = [name for name in names if name not in self.columns]
        if missing:
            writers = {n: f"written by {COLUMNS[n].written_by}" for n in missing if n in COLUMNS}
            names_and_writers = ", ".join(f"'{n}' ({writers.get(n, 'not in the table of columns')})" for n in missing)
            present = ", ".join(self.columns) or "no columns"
            raise BatchError(f"the batch lacks {names_and_writers}; it contains {present}")
        return self

    # -- columns ----------------------------------------------------------------------------------

    def select(self, *names: str) -> DataProto:
        """Return a batch that contains only these columns."""
        self.require(*names)
        return DataProto({name: self.columns[name] for name in names}, self.meta_info)

    def drop(self, *names: str) -> DataProto:
        """Return a batch without these columns. Names that are not columns are ignored."""
        return DataProto({n: c for n, c in self.columns.items() if n not in names}, self.meta_info)

    def rename(self, names: Mapping[str, str]) -> DataProto:
        """Rename columns: `rename({"old": "new"})`."""
        self.require(*names)
        renamed = [names.get(n, n) for n in self.columns]
        if len(set(renamed)) < len(renamed):
            raise BatchError(f"rename: {dict(names)} gives two columns the same name; use unique names")
        return DataProto(dict(zip(renamed, self.columns.values(), strict=True)), self.meta_info)

    def with_columns(self, **columns: Any) -> DataProto:
        """Return this batch with columns added or replaced."""
        return DataProto(self.columns | {n: _as_column(n, c) for n, c in columns.items()}, self.meta_info)

    def with_meta(self, **meta: Any) -> DataProto:
        """Return this batch with entries of `meta_info` added or replaced."""
        return DataProto(self.columns, self.meta_info | meta)

    def union(self, other: DataProto) -> DataProto:
        """Return a batch with the columns of both batches. Columns that are in both must be equal.

        Entries of `meta_info` must be equal, too, except those `OF_A_CALL`, which are taken from `other`. A batch can
        therefore collect the answers of several worker calls.
        """
        if self.columns and other.columns and len(self) != len(other):
            raise BatchError(f"union: the batches have {len(self)} and {len(other)} rows, but must have the same rows")
        for name in self.columns.keys() & other.columns.keys():
            if not _equal(self.columns[name], other.columns[name]):
                raise BatchError(f"union: column '{name}' is in both batches with different values; drop or rename one")
        for k in (self.meta_info.keys() & other.meta_info.keys()) - OF_A_CALL:
            if not _equal(self.meta_info[k], other.meta_info[k]):
                raise BatchError(f"union: meta_info '{k}' is in both batches with different values; drop or rename one")
        return DataProto(self.columns | other.columns, self.meta_info | other.meta_info)

    # -- rows -------------------------------------------------------------------------------------

    def reorder(self, index: Rows) -> DataProto:
        """Select rows by number, with repetitions, or by slice: `reorder(torch.tensor([2, 0]))`."""
        rows = row_index(index, len(self))
        return DataProto({n: _take(c, rows) for n, c in self.columns.items()}, self.meta_info)

    def split(self, size: int) -> list[DataProto]:
        """Split into batches of `size` consecutive rows. The last batch can have fewer rows."""
        if size < 1:
            raise BatchError(f"split: size={size} must be at least 1")
        return [self.reorder(slice(i, min(i + size, len(self)))) for i in range(0, len(self), size)]

    def chunk(self, chunks: int) -> list[DataProto]:
        """Split into `chunks` batches of equal size. The number of rows must be divisible by `chunks`."""
        if chunks < 1:
            raise BatchError(f"chunk: chunks={chunks} must be at least 1")
        if len(self) % chunks:
            raise BatchError(
                f"chunk: {len(self)} rows are not divisible by {chunks}; "
                f"pad_to_divisor({chunks}) adds {-len(self) % chunks} rows"
            )
        return self.split(len(self) // chunks) if len(self) else [self] * chunks

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        """Concatenate the rows of batches with the same columns. `meta_info` is copied from the first batch."""
        if not parts:
            raise BatchError("concat: the list of batches is empty")
        names = set(parts[0].columns)
        for part in parts[1:]:
            if set(part.columns) != names:
                raise BatchError(f"concat: not all batches have the columns {sorted(names ^ set(part.columns))}")
        joined = {n: _concat(n, [p.columns[n] for p in parts]) for n in parts[0].columns}
        return DataProto(joined, parts[0].meta_info)

    def repeat(self, times: int) -> DataProto:
        """Repeat each row `times` times, in the order a a b b."""
        return self.reorder(torch.arange(len(self)).repeat_interleave(times))

    def pad_to_divisor(self, divisor: int) -> tuple[DataProto, int]:
        """Repeat the first rows until `divisor` divides the number of rows; return the batch and the number added."""
        if divisor < 1:
            raise BatchError(f"pad_to_divisor: divisor={divisor} must be at least 1")
        added = -len(self) % divisor
        if not added:
            return self, 0
        if not len(self):
            raise BatchError("pad_to_divisor: the batch has no rows to repeat")
        return self.reorder(torch.cat([torch.arange(len(self)), torch.arange(added) % len(self)])), added

    def unpad(self, added: int) -> DataProto:
        """Remove the rows added by `pad_to_divisor`."""
        if not 0 <= added <= len(self):
            raise BatchError(f"unpad: added={added} must be between 0 and the {len(self)} rows of the batch")
        return self.reorder(slice(0, len(self) - added)) if added else self

    def make_iterator(self, mini_batch_size: int, epochs: int = 1, seed: int | None = None) -> Iterator[DataProto]:
        """Yield the mini-batches of `epochs` epochs. Each epoch is shuffled with `seed`, or in order if it is None."""
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise BatchError(f"make_iterator: {len(self)} rows are not divisible by mini_batch_size={mini_batch_size}")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            order = None if generator is None else torch.randperm(len(self), generator=generator)
            yield from (self if order is None else self.reorder(order)).split(mini_batch_size)

    # -- devices and pickling ---------------------------------------------------------------------

    def to(self, device: torch.device | str) -> DataProto:
        """Move tensor columns to `device`. Object columns are unchanged."""
        moved = {name: _on(column, device) for name, column in self.columns.items()}
        return DataProto(moved, self.meta_info)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle tensors as numpy buffers (`ragged.to_buffer`). Restored tensors are on the CPU, without gradient."""
        columns = {
            name: to_buffer(column) if isinstance(column, Tensor) else column for name, column in self.columns.items()
        }
        return _rebuild, (columns, self.meta_info)


# -- one column -----------------------------------------------------------------------------------


def _objects(values: Sequence[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        column[i] = value
    return column


def _as_column(name: str, value: Any) -> Column:
    if isinstance(value, Ragged):
        return value
    if isinstance(value, Tensor):
        if value.ndim == 0:
            raise BatchError(f"column '{name}' is a scalar, but a tensor column must have one entry per row")
        return value
    kind: type[object] = value.__class__
    if issubclass(kind, str | bytes | Mapping) or not issubclass(kind, Sequence | np.ndarray):
        raise BatchError(f"column '{name}' must be a tensor, a Ragged or a list of objects, got {kind.__name__}")
    return _objects(list(value))


def _take(column: Column, rows: slice | Tensor) -> Column:
    if isinstance(column, Ragged):
        return column.select(rows)
    if isinstance(rows, slice):
        return column[rows]
    return column[rows.to(column.device)] if isinstance(column, Tensor) else column[rows.numpy()]


def _on(column: Column, device: torch.device | str) -> Column:
    if isinstance(column, np.ndarray):
        return column
    return column.to(device) if isinstance(column, Ragged) else to_device(column, device)


def _concat(name: str, parts: Sequence[Column]) -> Column:
    kinds = {type(part).__name__ for part in parts}
    if len(kinds) > 1:
        raise BatchError(f"concat: column '{name}' has different kinds: {sorted(kinds)}")
    first = parts[0]
    if isinstance(first, Ragged):
        return Ragged.concat(parts)  # pyright: ignore[reportArgumentType]
    return torch.cat(list(parts)) if isinstance(first, Tensor) else np.concatenate(list(parts))  # pyright: ignore


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    kind: type[object] = a.__class__
    if kind is not b.__class__:
        return False
    if issubclass(kind, Ragged):
        return torch.equal(a.lengths, b.lengths) and _equal(a.values, b.values)
    if issubclass(kind, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.to(a.device))
    if issubclass(kind, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and _equal(a.tolist(), b.tolist())
    if issubclass(kind, list | tuple):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if issubclass(kind, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return bool(a == b)


def _rebuild(columns: dict[str, Ragged | np.ndarray | Buffer], meta_info: dict[str, Any]) -> DataProto:
    restored = {
        name: from_buffer(column) if isinstance(column, tuple) else column  # no column is a tuple
        for name, column in columns.items()
    }
    return DataProto(restored, meta_info)
