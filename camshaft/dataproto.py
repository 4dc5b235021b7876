"""The batch that travels between data, roles and trainer.

    batch = DataProto.from_dict({"prompts": ragged, "reward": torch.zeros(4), "uid": ["a", "a", "b", "b"]})
    batch.union(other)                    # more columns for the same rows
    batch.repeat(4)                       # each row four times, one after the other
    for part in batch.split(2): ...       # at most two rows each

A column is one of three kinds: `Ragged` (one value per token), a tensor (one entry per row), or a numpy
object array (any Python object per row). Nothing is changed in place: operations return a new batch and
share storage where they can. Which columns exist, and who writes them, is the table in `columns.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from camshaft.columns import COLUMNS
from camshaft.device import to_device
from camshaft.errors import BatchError
from camshaft.ragged import Buffer, Ragged, Rows, from_buffer, row_index, to_buffer

Column = Ragged | Tensor | np.ndarray

__all__ = ["DataProto", "Ragged"]


class DataProto:
    """Rows with named columns, plus `meta_info` that speaks of the batch as a whole."""

    def __init__(self, columns: Mapping[str, Column] | None = None, meta_info: Mapping[str, Any] | None = None):
        self.columns: dict[str, Column] = dict(columns or {})
        self.meta_info: dict[str, Any] = dict(meta_info or {})
        counts = {name: _rows(column) for name, column in self.columns.items()}
        if len(set(counts.values())) > 1:
            raise BatchError(f"the columns have different numbers of rows: {counts}")
        self._length = next(iter(counts.values()), 0)

    @staticmethod
    def from_dict(columns: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> DataProto:
        """Tensors and `Ragged` as they are; any other sequence becomes a column of Python objects."""
        return DataProto({name: _as_column(name, value) for name, value in columns.items()}, meta_info)

    # -- reading ----------------------------------------------------------------------------------

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
        """The column `name`, which must be one value per token."""
        column = self[name]
        if not isinstance(column, Ragged):
            raise BatchError(f"column '{name}' should hold one value per token, but is {type(column).__name__}")
        return column

    def require(self, *names: str) -> DataProto:
        """This batch, or an error that names the missing columns and who should have written them."""
        missing = [name for name in names if name not in self.columns]
        if missing:
            writers = {n: f"written by {COLUMNS[n].written_by}" for n in missing if n in COLUMNS}
            told = [f"'{n}' ({writers.get(n, 'not in the table of columns')})" for n in missing]
            raise BatchError(f"the batch lacks {', '.join(told)}; it has: {', '.join(self.columns) or 'no columns'}")
        return self

    def row(self, index: int) -> dict[str, Any]:
        """One row as a dict: token tensors, per-row tensors, objects."""
        one = self.reorder([range(len(self))[index]])
        return {n: c.values if isinstance(c, Ragged) else c[0] for n, c in one.columns.items()}

    # -- columns ----------------------------------------------------------------------------------

    def select(self, *names: str) -> DataProto:
        """Only these columns."""
        self.require(*names)
        return DataProto({name: self.columns[name] for name in names}, self.meta_info)

    def drop(self, *names: str) -> DataProto:
        """All columns but these; names that are not there are fine."""
        return DataProto({n: c for n, c in self.columns.items() if n not in names}, self.meta_info)

    def pop(self, *names: str) -> tuple[DataProto, DataProto]:
        """(a batch of these columns, a batch of the rest)."""
        return self.select(*names), self.drop(*names)

    def rename(self, names: Mapping[str, str]) -> DataProto:
        """The same columns under other names: `rename({"old": "new"})`."""
        self.require(*names)
        renamed = [names.get(n, n) for n in self.columns]
        if len(set(renamed)) < len(renamed):
            raise BatchError(f"rename {dict(names)} would give two columns one name")
        return DataProto(dict(zip(renamed, self.columns.values(), strict=True)), self.meta_info)

    def with_columns(self, **columns: Any) -> DataProto:
        """This batch with columns added or replaced."""
        return DataProto(self.columns | {n: _as_column(n, c) for n, c in columns.items()}, self.meta_info)

    def with_meta(self, **meta: Any) -> DataProto:
        """This batch with entries of `meta_info` added or replaced."""
        return DataProto(self.columns, self.meta_info | meta)

    def union(self, other: DataProto) -> DataProto:
        """All columns of both; a column in both must be equal, else the error names it."""
        if self.columns and other.columns and len(self) != len(other):
            raise BatchError(f"union: {len(self)} rows on one side, {len(other)} on the other")
        for name in self.columns.keys() & other.columns.keys():
            if not _equal(self.columns[name], other.columns[name]):
                raise BatchError(f"union: column '{name}' is in both batches with different values")
        for key in self.meta_info.keys() & other.meta_info.keys():
            if not _equal(self.meta_info[key], other.meta_info[key]):
                raise BatchError(f"union: meta_info '{key}' is in both batches with different values")
        return DataProto(self.columns | other.columns, self.meta_info | other.meta_info)

    # -- rows -------------------------------------------------------------------------------------

    def reorder(self, index: Rows) -> DataProto:
        """Rows by number (repeats allowed) or by slice: `reorder(torch.tensor([2, 0]))`."""
        rows = row_index(index, len(self))
        return DataProto({n: _take(c, rows) for n, c in self.columns.items()}, self.meta_info)

    def split(self, size: int) -> list[DataProto]:
        """Consecutive parts of `size` rows; the last may be shorter."""
        if size < 1:
            raise BatchError(f"split: size={size} must be at least 1")
        return [self.reorder(slice(i, min(i + size, len(self)))) for i in range(0, len(self), size)]

    def chunk(self, chunks: int) -> list[DataProto]:
        """`chunks` parts of equal size; the number of rows must divide."""
        if chunks < 1 or len(self) % chunks:
            raise BatchError(
                f"chunk: {len(self)} rows do not divide into {chunks} equal parts; "
                f"pad_to_divisor({chunks}) adds {-len(self) % max(chunks, 1)} rows"
            )
        return self.split(len(self) // chunks) if len(self) else [self] * chunks

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        """All rows of all parts; they must have the same columns. `meta_info` is that of the first."""
        if not parts:
            raise BatchError("concat: no parts")
        names = set(parts[0].columns)
        for part in parts[1:]:
            if set(part.columns) != names:
                raise BatchError(f"concat: the parts differ in columns {sorted(names ^ set(part.columns))}")
        joined = {n: _concat(n, [p.columns[n] for p in parts]) for n in parts[0].columns}
        return DataProto(joined, parts[0].meta_info)

    def repeat(self, times: int, interleave: bool = True) -> DataProto:
        """Each row `times` times: a a b b (interleave) or a b a b."""
        index = torch.arange(len(self))
        return self.reorder(index.repeat_interleave(times) if interleave else index.repeat(times))

    def pad_to_divisor(self, divisor: int) -> tuple[DataProto, int]:
        """(the batch with its first rows repeated until it divides, how many were added)."""
        if divisor < 1:
            raise BatchError(f"pad_to_divisor: divisor={divisor} must be at least 1")
        added = -len(self) % divisor
        if not added:
            return self, 0
        if not len(self):
            raise BatchError("pad_to_divisor: the batch has no rows to repeat")
        return self.reorder(torch.cat([torch.arange(len(self)), torch.arange(added) % len(self)])), added

    def unpad(self, added: int) -> DataProto:
        """Take back what `pad_to_divisor` added."""
        if not 0 <= added <= len(self):
            raise BatchError(f"unpad: cannot take {added} rows from {len(self)}")
        return self.reorder(slice(0, len(self) - added)) if added else self

    def make_iterator(self, mini_batch_size: int, epochs: int = 1, seed: int | None = None) -> Iterator[DataProto]:
        """Mini-batches over `epochs` passes; each pass is shuffled by `seed`, or in order for None."""
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise BatchError(f"make_iterator: {len(self)} rows do not divide into mini-batches of {mini_batch_size}")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            order = None if generator is None else torch.randperm(len(self), generator=generator)
            yield from (self if order is None else self.reorder(order)).split(mini_batch_size)

    # -- moving -----------------------------------------------------------------------------------

    def to(self, device: torch.device | str) -> DataProto:
        """Tensor columns on `device`; object columns stay."""
        moved = {name: _on(column, device) for name, column in self.columns.items()}
        return DataProto(moved, self.meta_info)

    def save_to_disk(self, folder: str | Path) -> None:
        """`tensors.safetensors` and `objects.json`; objects must be JSON; tuples and arrays become lists."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors, objects = {}, {}
        for name, column in self.columns.items():
            if isinstance(column, Ragged):
                tensors[f"{name}/values"] = column.values.contiguous()
                tensors[f"{name}/lengths"] = column.lengths.contiguous()
            elif isinstance(column, Tensor):
                tensors[f"{name}/tensor"] = column.contiguous()
            else:
                objects[name] = _as_json(name, column.tolist())
        head = {"columns": list(self.columns), "meta_info": _as_json("meta_info", self.meta_info), "objects": objects}
        save_file({n: t.detach().cpu().clone() for n, t in tensors.items()}, folder / "tensors.safetensors")
        (folder / "objects.json").write_text(json.dumps(head), encoding="utf-8")

    @staticmethod
    def load_from_disk(folder: str | Path) -> DataProto:
        """What `save_to_disk` wrote."""
        head = json.loads((Path(folder) / "objects.json").read_text(encoding="utf-8"))
        tensors = load_file(Path(folder) / "tensors.safetensors")
        columns: dict[str, Column] = {}
        for name in head["columns"]:
            if name in head["objects"]:
                columns[name] = _objects(head["objects"][name])
            elif f"{name}/tensor" in tensors:
                columns[name] = tensors[f"{name}/tensor"]
            else:
                columns[name] = Ragged(tensors[f"{name}/values"], tensors[f"{name}/lengths"])
        return DataProto(columns, head["meta_info"])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as flat numpy buffers (see `ragged.to_buffer`): tensors come back on the CPU, without gradient."""
        buffers = {name: to_buffer(column) for name, column in self.columns.items() if isinstance(column, Tensor)}
        others = {name: column for name, column in self.columns.items() if name not in buffers}
        return _rebuild, (others, buffers, list(self.columns), self.meta_info)


# -- one column -----------------------------------------------------------------------------------


def _rows(column: Column) -> int:
    return len(column)


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
            raise BatchError(f"column '{name}' is a scalar; a tensor column has one entry per row")
        return value
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, (Sequence, np.ndarray)):
        raise BatchError(f"column '{name}' is {type(value).__name__}; give a tensor, a Ragged or a list of objects")
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
        raise BatchError(f"concat: column '{name}' is of different kinds: {sorted(kinds)}")
    first = parts[0]
    if isinstance(first, Ragged):
        return Ragged.concat(parts)  # pyright: ignore[reportArgumentType]
    return torch.cat(list(parts)) if isinstance(first, Tensor) else np.concatenate(list(parts))  # pyright: ignore


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Ragged):
        return torch.equal(a.lengths, b.lengths) and _equal(a.values, b.values)
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.to(a.device))
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and _equal(a.tolist(), b.tolist())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return bool(a == b)


def _as_json(name: str, value: Any) -> Any:
    """`value` in JSON's own types, or an error: what is read back must be what was written."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_as_json(name, item) for item in value]
    if isinstance(value, dict):
        wrong = next((key for key in value if not isinstance(key, str)), None)
        if wrong is not None:
            raise BatchError(f"'{name}' cannot be written as JSON: the key {wrong!r} is not a string")
        return {key: _as_json(name, item) for key, item in value.items()}
    raise BatchError(f"'{name}' cannot be written as JSON: it holds a {type(value).__name__}")


def _rebuild(others: dict[str, Column], buffers: dict[str, Buffer], order: list[str], meta_info: Any) -> DataProto:
    columns = others | {name: from_buffer(buffer) for name, buffer in buffers.items()}
    return DataProto({name: columns[name] for name in order}, meta_info)
