"""Ragged tensors: rows of different lengths in one flat tensor, without padding.

    r = Ragged.from_rows([torch.tensor([1, 2]), torch.tensor([3])])
    r.values      # tensor([1, 2, 3])
    r.lengths     # tensor([2, 1])
    r.padded()    # tensor([[1, 2], [3, 0]])

`lengths` is always on the CPU, independent of the device of `values`, so slicing and splitting never synchronize with
an accelerator. Operations return new objects; slices of consecutive rows share storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from camshaft.device import to_device
from camshaft.errors import BatchError

Rows = slice | Sequence[int] | Tensor
"""Row selection: numbers (repeats allowed, negative ones count from the end) or a slice."""


@dataclass(frozen=True, eq=False)
class Ragged:
    """A flat tensor of all tokens (N, ...) and the lengths of the rows (B,)."""

    values: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        lengths = torch.as_tensor(self.lengths, dtype=torch.int64, device="cpu")
        object.__setattr__(self, "lengths", lengths)
        if lengths.ndim != 1 or self.values.ndim < 1:
            raise BatchError(f"Ragged needs flat values and 1-D lengths, got {self.values.shape} and {lengths.shape}")
        total = int(lengths.sum())
        if total != self.values.shape[0]:
            raise BatchError(f"Ragged: the lengths sum to {total}, but values has {self.values.shape[0]} entries")
        if len(lengths) and int(lengths.min()) < 0:
            raise BatchError(f"Ragged: a length is negative: {lengths.tolist()}")

    # -- construction -----------------------------------------------------------------------------

    @staticmethod
    def from_rows(rows: Sequence[Tensor | Sequence[int] | Sequence[float]], dtype: torch.dtype | None = None) -> Ragged:
        """Build from one item per row; `dtype` defaults to that of the first non-empty row (int64 if all are empty)."""
        if dtype is None:
            dtype = next((torch.as_tensor(row).dtype for row in rows if len(row)), torch.int64)
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        flat = torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype)
        return Ragged(flat, torch.tensor([len(t) for t in tensors], dtype=torch.int64))

    @staticmethod
    def from_padded(tensor: Tensor, mask: Tensor) -> Ragged:
        """Build from the entries of `tensor` (B, W, ...) where `mask` (B, W) is set."""
        keep = mask.bool()
        if keep.shape != tensor.shape[:2]:
            raise BatchError(f"from_padded: mask {tuple(mask.shape)} does not fit tensor {tuple(tensor.shape)}")
        return Ragged(tensor[keep], keep.sum(dim=1).cpu())

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        """Concatenate the rows of all parts."""
        if not parts:
            raise BatchError("concat: no parts")
        if len(parts) == 1:
            return parts[0]
        return Ragged(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))

    @staticmethod
    def join(left: Ragged, right: Ragged) -> Ragged:
        """Concatenate `left` and `right` row by row, for example prompts and responses; dtypes are promoted."""
        if len(left) != len(right):
            raise BatchError(f"join: {len(left)} rows on the left, {len(right)} on the right")
        lengths = left.lengths + right.lengths
        starts = lengths.cumsum(0) - lengths
        shape = (len(left.values) + len(right.values), *left.values.shape[1:])
        values = left.values.new_empty(shape, dtype=torch.promote_types(left.values.dtype, right.values.dtype))
        values[to_device(_spans(starts, left.lengths), values.device)] = left.values.to(values.dtype)
        values[to_device(_spans(starts + left.lengths, right.lengths), values.device)] = right.values.to(values.dtype)
        return Ragged(values, lengths)

    def like(self, values: Tensor) -> Ragged:
        """Return other values with the same row lengths."""
        return Ragged(values, self.lengths)

    # -- access -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, {len(self.values)} tokens, {self.values.dtype}, {self.values.device})"

    @cached_property
    def offsets(self) -> Tensor:
        """(B + 1,) start of each row, and the end of the last row."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])

    def rows(self) -> list[Tensor]:
        """Return one tensor per row, sharing storage."""
        return list(self.values.split(self.lengths.tolist()))

    def row_ids(self) -> Tensor:
        """Return the row number of each token (N,), on the device of the values."""
        return to_device(torch.repeat_interleave(torch.arange(len(self)), self.lengths), self.values.device)

    def positions(self) -> Tensor:
        """Return the position of each token in its row (N,), counted from 0, on the device of the values."""
        return to_device(_spans(torch.zeros_like(self.lengths), self.lengths), self.values.device)

    # -- selection --------------------------------------------------------------------------------

    def select(self, index: Rows) -> Ragged:
        """Select rows by number (repeats allowed) or by slice; a slice of step 1 copies nothing."""
        rows = row_index(index, len(self))
        lengths = self.lengths[rows]
        if isinstance(rows, slice):
            return Ragged(self.values[int(self.offsets[rows.start]) : int(self.offsets[rows.stop])], lengths)
        return self._at(self.offsets[rows], lengths)

    def split(self, sizes: Sequence[int]) -> list[Ragged]:
        """Split into consecutive groups of rows; `sizes` must sum to the number of rows."""
        if sum(sizes) != len(self) or min(sizes, default=0) < 0:
            raise BatchError(f"split: the sizes {list(sizes)} do not sum to {len(self)} rows")
        ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
        return [self.select(slice(a, b)) for a, b in pairwise(ends)]

    def suffix(self, lengths: Tensor) -> Ragged:
        """Return the last `lengths[i]` tokens of each row, for example the response part of a sequence."""
        lengths = self._within("suffix", lengths)
        return self._at(self.offsets[1:] - lengths, lengths)

    def prefix(self, lengths: Tensor) -> Ragged:
        """Return the first `lengths[i]` tokens of each row."""
        lengths = self._within("prefix", lengths)
        return self._at(self.offsets[:-1], lengths)

    def _at(self, starts: Tensor, lengths: Tensor) -> Ragged:
        """Gather `lengths[i]` tokens from each start offset."""
        return Ragged(self.values[to_device(_spans(starts, lengths), self.values.device)], lengths)

    def _within(self, caller: str, lengths: Tensor) -> Tensor:
        lengths = lengths.to("cpu", torch.int64)
        if len(lengths) != len(self):
            raise BatchError(f"{caller}: {len(lengths)} lengths for {len(self)} rows")
        invalid = ((lengths > self.lengths) | (lengths < 0)).nonzero().flatten().tolist()
        if invalid:
            requested, available = int(lengths[invalid[0]]), int(self.lengths[invalid[0]])
            raise BatchError(f"{caller}: requested {requested} of the {available} tokens of row {invalid[0]}")
        return lengths

    def to(self, device: torch.device | str) -> Ragged:
        return Ragged(to_device(self.values, device), self.lengths)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Ragged:
        """Apply `fn` to the flat values; it must keep the number of tokens."""
        return Ragged(fn(self.values), self.lengths)

    def padded(self, side: Literal["left", "right"] = "right", value: float = 0, width: int | None = None) -> Tensor:
        """Return a padded copy (B, W, ...); W defaults to the longest row."""
        longest = int(self.lengths.max()) if len(self) else 0
        width = longest if width is None else width
        if width < longest:
            raise BatchError(f"padded: width={width} is below the longest row, {longest}")
        grid = self.values.new_full((len(self), width, *self.values.shape[1:]), value)
        grid[self.mask(side, width)] = self.values
        return grid

    def mask(self, side: Literal["left", "right"] = "right", width: int | None = None) -> Tensor:
        """Return a bool mask (B, W) of the tokens in `padded`."""
        width = (int(self.lengths.max()) if len(self) else 0) if width is None else width
        columns = torch.arange(width)
        columns = columns if side == "right" else columns.flip(0)
        return to_device(columns[None] < self.lengths[:, None], self.values.device)

    # -- reduction --------------------------------------------------------------------------------

    def sum(self) -> Tensor:
        """Sum each row (B, ...): int64 for integers and bool, otherwise at least float32; 0 for an empty row."""
        values, lengths = self.values, to_device(self.lengths, self.values.device)
        if not len(self):
            return values.clone()
        if not values.is_floating_point():
            values = values.long()
            return values.new_zeros((len(self), *values.shape[1:])).index_add(0, self.row_ids(), values)
        values = values.float() if values.itemsize < 4 else values
        return torch.segment_reduce(values, "sum", unsafe=True, lengths=lengths, initial=0)

    def mean(self) -> Tensor:
        """Average each row (B, ...): float32 unless the values are float64; 0 for an empty row."""
        counts = to_device(self.lengths.clamp(min=1), self.values.device)
        return self.sum() / counts.reshape(-1, *[1] * (self.values.ndim - 1))

    # -- serialization ----------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as flat numpy buffers; see `to_buffer`."""
        return _rebuild, (to_buffer(self.values), to_buffer(self.lengths))


def row_index(index: Rows, count: int) -> slice | Tensor:
    """Normalize `index` into `count` rows to a slice of step 1 or to non-negative int64 numbers (K,) on the CPU."""
    if isinstance(index, slice):
        start, stop, step = index.indices(count)
        if step == 1:
            return slice(start, max(start, stop))
        index = range(start, stop, step)
    rows = torch.as_tensor(index, device="cpu")
    if rows.ndim != 1 or (rows.numel() and (rows.dtype == torch.bool or rows.is_floating_point())):
        raise BatchError(f"rows are selected by integers, not by {index}; for a mask use mask.nonzero().flatten()")
    rows = rows.long()
    invalid = rows[(rows >= count) | (rows < -count)]
    if len(invalid):
        raise BatchError(f"row {int(invalid[0])} is out of range: the batch has {count} rows")
    return torch.where(rows < 0, rows + count, rows)


Buffer = tuple[np.ndarray, str, tuple[int, ...]]


def to_buffer(tensor: Tensor) -> Buffer:
    """Convert a tensor to bytes, dtype and shape for pickle; the bytes are sent out of band in protocol 5.

    The restored tensor is on the CPU and has no gradient.
    """
    contiguous = tensor.detach().cpu().contiguous()
    # A single element is contiguous for any stride, but a view as bytes requires stride 1.
    flat = contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)
    return flat.numpy(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def from_buffer(buffer: Buffer) -> Tensor:
    """Restore a tensor from `to_buffer`."""
    flat, dtype, shape = buffer
    if not flat.size:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    writable = flat if flat.flags.writeable else flat.copy()
    return torch.from_numpy(writable).view(getattr(torch, dtype)).reshape(shape)


def _rebuild(values: Buffer, lengths: Buffer) -> Ragged:
    return Ragged(from_buffer(values), from_buffer(lengths))


def _spans(starts: Tensor, lengths: Tensor) -> Tensor:
    """Concatenate the integer ranges start, ..., start + length - 1."""
    firsts = torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths)
    return firsts + torch.arange(len(firsts))


def on_last_token(scores: Tensor, mask: Ragged) -> Ragged:
    """Put each row's score (B,) on its last masked-in token; rows without such a token get no score."""
    counted = mask.values.nonzero().squeeze(-1).cpu()
    rows = mask.row_ids()[counted].cpu()
    ends = torch.ones(len(counted), dtype=torch.bool)
    ends[:-1] = rows[1:] != rows[:-1]  # True at the last counted token of a row
    values = torch.zeros(len(mask.values), dtype=torch.float32)
    values[counted[ends]] = scores[rows[ends]]
    return mask.like(values.to(mask.values.device))
