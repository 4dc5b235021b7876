"""Ragged tensors: rows of different lengths in one flat tensor, without padding.

    r = Ragged.from_rows([torch.tensor([1, 2]), torch.tensor([3])])
    r.values      # tensor([1, 2, 3])
    r.lengths     # tensor([2, 1])
    r.padded()    # tensor([[1, 2], [3, 0]])

`lengths` is always on the CPU, whatever the device of `values`, so that slicing and splitting never synchronize with an
accelerator. Operations return new objects. Slices of consecutive rows share storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from camshaft.device import to_device
from camshaft.errors import BatchError

Rows = slice | Sequence[int] | Tensor
"""Selection of rows: a slice, or row numbers. Numbers can repeat, and negative numbers count from the end."""


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths, stored in a flat tensor."""

    values: Tensor
    """(N, ...): one entry per token, row after row."""
    lengths: Tensor
    """(B,) int64, on the CPU: number of tokens of each row."""

    def __post_init__(self) -> None:
        lengths = torch.as_tensor(self.lengths, dtype=torch.int64, device="cpu")
        object.__setattr__(self, "lengths", lengths)
        if lengths.ndim != 1 or self.values.ndim < 1:
            raise BatchError(
                "Ragged: values must have at least one dimension and lengths exactly one, got shapes "
                f"{tuple(self.values.shape)} and {tuple(lengths.shape)}"
            )
        total = int(lengths.sum())
        if total != self.values.shape[0]:
            raise BatchError(f"Ragged: the lengths sum to {total}, but values has {self.values.shape[0]} entries")
        if len(lengths) and int(lengths.min()) < 0:
            raise BatchError(f"Ragged: lengths must not be negative, got {lengths.tolist()}")

    # -- construction -----------------------------------------------------------------------------

    @staticmethod
    def from_rows(rows: Sequence[Tensor | Sequence[int] | Sequence[float]], dtype: torch.dtype | None = None) -> Ragged:
        """Build from a sequence of rows.

        `dtype` defaults to the dtype of the first row that is not empty, or to int64 if all rows are empty.
        """
        if dtype is None:
            dtype = next((torch.as_tensor(row).dtype for row in rows if len(row)), torch.int64)
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        flat = torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype)
        return Ragged(flat, torch.tensor([len(t) for t in tensors], dtype=torch.int64))

    @staticmethod
    def from_padded(tensor: Tensor, mask: Tensor) -> Ragged:
        """Build from the entries of a padded tensor (B, W, ...) at which `mask` (B, W) is set."""
        keep = mask.bool()
        if keep.shape != tensor.shape[:2]:
            raise BatchError(
                f"from_padded: mask has shape {tuple(mask.shape)}, but must have shape {tuple(tensor.shape[:2])}, the "
                "first two dimensions of the tensor"
            )
        return Ragged(tensor[keep], keep.sum(dim=1).cpu())

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        """Concatenate the rows of several objects."""
        if not parts:
            raise BatchError("concat: the list of parts is empty")
        if len(parts) == 1:
            return parts[0]
        return Ragged(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))

    @staticmethod
    def join(left: Ragged, right: Ragged) -> Ragged:
        """Append each row of `right` to the same row of `left`, for example responses to prompts. Promotes dtypes."""
        if len(left) != len(right):
            raise BatchError(f"join: left has {len(left)} rows and right has {len(right)}, but both must have the same")
        lengths = left.lengths + right.lengths
        starts = lengths.cumsum(0) - lengths
        shape = (len(left.values) + len(right.values), *left.values.shape[1:])
        values = left.values.new_empty(shape, dtype=torch.promote_types(left.values.dtype, right.values.dtype))
        values[to_device(_spans(starts, left.lengths), values.device)] = left.values.to(values.dtype)
        values[to_device(_spans(starts + left.lengths, right.lengths), values.device)] = right.values.to(values.dtype)
        return Ragged(values, lengths)

    def like(self, values: Tensor) -> Ragged:
        """Return a `Ragged` with other values and the same row lengths."""
        return Ragged(values, self.lengths)

    # -- access -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, {len(self.values)} tokens, {self.values.dtype}, {self.values.device})"

    @cached_property
    def offsets(self) -> Tensor:
        """Start of each row in `values`, and the end of the last row, shape (B + 1,)."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])

    @property
    def device_lengths(self) -> Tensor:
        """`lengths` on the device of `values`. The copy does not wait for the device."""
        return to_device(self.lengths, self.values.device)

    def rows(self) -> list[Tensor]:
        """Return one tensor per row. The tensors share storage with `values`."""
        return list(self.values.split(self.lengths.tolist()))

    def row_ids(self) -> Tensor:
        """Return the row number of each token, shape (N,), on the device of `values`."""
        return to_device(torch.repeat_interleave(torch.arange(len(self)), self.lengths), self.values.device)

    def positions(self) -> Tensor:
        """Return the position of each token in its row, counted from 0, shape (N,), on the device of `values`."""
        return to_device(_spans(torch.zeros_like(self.lengths), self.lengths), self.values.device)

    # -- selection --------------------------------------------------------------------------------

    def select(self, index: Rows) -> Ragged:
        """Select rows by number, with repetitions, or by slice. A slice with step 1 does not copy."""
        rows = row_index(index, len(self))
        lengths = self.lengths[rows]
        if isinstance(rows, slice):
            return Ragged(self.values[int(self.offsets[rows.start]) : int(self.offsets[rows.stop])], lengths)
        return self._gather(self.offsets[rows], lengths)

    def suffix(self, lengths: Tensor) -> Ragged:
        """Return the last `lengths[i]` tokens of each row, for example the response part of a sequence."""
        lengths = self._check_lengths("suffix", lengths)
        return self._gather(self.offsets[1:] - lengths, lengths)

    def prefix(self, lengths: Tensor) -> Ragged:
        """Return the first `lengths[i]` tokens of each row."""
        lengths = self._check_lengths("prefix", lengths)
        return self._gather(self.offsets[:-1], lengths)

    def _gather(self, starts: Tensor, lengths: Tensor) -> Ragged:
        """Return rows that consist of the `lengths[i]` tokens from offset `starts[i]` on."""
        return Ragged(self.values[to_device(_spans(starts, lengths), self.values.device)], lengths)

    def _check_lengths(self, caller: str, lengths: Tensor) -> Tensor:
        """Return `lengths` on the CPU; raise BatchError if a row has fewer tokens."""
        lengths = lengths.to("cpu", torch.int64)
        if len(lengths) != len(self):
            raise BatchError(f"{caller}: got {len(lengths)} lengths for {len(self)} rows; pass one length per row")
        invalid = ((lengths > self.lengths) | (lengths < 0)).nonzero().flatten().tolist()
        if invalid:
            requested, available = int(lengths[invalid[0]]), int(self.lengths[invalid[0]])
            raise BatchError(f"{caller}: row {invalid[0]} has {available} tokens, but {requested} were requested")
        return lengths

    def to(self, device: torch.device | str) -> Ragged:
        return Ragged(to_device(self.values, device), self.lengths)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Ragged:
        """Apply `fn` to the flat values. The result must have the same number of tokens."""
        return Ragged(fn(self.values), self.lengths)

    def padded(self, side: Literal["left", "right"] = "right", value: float = 0) -> Tensor:
        """Return a padded copy, shape (B, W, ...). W is the length of the longest row."""
        mask = self.mask(side)
        grid = self.values.new_full((*mask.shape, *self.values.shape[1:]), value)
        grid[mask] = self.values
        return grid

    def mask(self, side: Literal["left", "right"] = "right") -> Tensor:
        """Return a bool mask, shape (B, W), that is True at the tokens of `padded`."""
        columns = torch.arange(int(self.lengths.max()) if len(self) else 0)
        columns = columns if side == "right" else columns.flip(0)
        return to_device(columns[None] < self.lengths[:, None], self.values.device)

    # -- reduction --------------------------------------------------------------------------------

    def sum(self) -> Tensor:
        """Return the sum of each row, shape (B, ...). The sum of an empty row is 0.

        The result is int64 for integer and bool values, float64 for float64 values, and float32 for other floats.
        """
        values = self.values
        is_float = values.is_floating_point()
        values = values.long() if not is_float else values.float() if values.itemsize < 4 else values
        if not len(self):
            return values.clone()
        if not is_float:
            return values.new_zeros((len(self), *values.shape[1:])).index_add(0, self.row_ids(), values)
        return torch.segment_reduce(values, "sum", unsafe=True, lengths=self.device_lengths, initial=0)

    # -- serialization ----------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the tensors as numpy buffers; see `to_buffer`."""
        return _rebuild, (to_buffer(self.values), to_buffer(self.lengths))


def row_index(index: Rows, count: int) -> slice | Tensor:
    """Normalize a selection of `count` rows to a slice with step 1, or to non-negative row numbers.

    Row numbers are returned as an int64 tensor, shape (K,), on the CPU.
    """
    if isinstance(index, slice):
        start, stop, step = index.indices(count)
        if step == 1:
            return slice(start, max(start, stop))
        index = range(start, stop, step)
    rows = torch.as_tensor(index, device="cpu")
    if rows.ndim != 1 or (rows.numel() and (rows.dtype == torch.bool or rows.is_floating_point())):
        raise BatchError(
            f"rows must be selected by integers or a slice, got {index}; convert a mask with mask.nonzero().flatten()"
        )
    rows = rows.long()
    invalid = rows[(rows >= count) | (rows < -count)]
    if len(invalid):
        raise BatchError(f"row {int(invalid[0])} is out of range: the batch has {count} rows")
    return torch.where(rows < 0, rows + count, rows)


Buffer = tuple[np.ndarray, str, tuple[int, ...]]


def to_buffer(tensor: Tensor) -> Buffer:
    """Convert a tensor to bytes, dtype and shape for pickling. Protocol 5 transfers the bytes out of band.

    The restored tensor is on the CPU and does not require gradients.
    """
    contiguous = tensor.detach().cpu().contiguous()
    # A tensor with a single element is contiguous for any stride, but viewing it as bytes requires stride 1.
    flat = contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)
    return flat.numpy(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def from_buffer(buffer: Buffer) -> Tensor:
    """Restore a tensor from the result of `to_buffer`."""
    flat, dtype, shape = buffer
    if not flat.size:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    writable = flat if flat.flags.writeable else flat.copy()
    return torch.from_numpy(writable).view(getattr(torch, dtype)).reshape(shape)


def _rebuild(values: Buffer, lengths: Buffer) -> Ragged:
    return Ragged(from_buffer(values), from_buffer(lengths))


def _spans(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the concatenation of the ranges `starts[i], ..., starts[i] + lengths[i] - 1`."""
    firsts = torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths)
    return firsts + torch.arange(len(firsts))


def on_last_token(scores: Tensor, mask: Ragged) -> Ragged:
    """Return a value per token: the score of the row (B,) at its last masked-in token, and 0 elsewhere.

    A row without masked-in tokens contains only zeros.
    """
    masked_in = mask.values.nonzero().squeeze(-1).cpu()
    rows = mask.row_ids()[masked_in].cpu()
    is_last = torch.ones(len(masked_in), dtype=torch.bool)
    is_last[:-1] = rows[1:] != rows[:-1]
    values = torch.zeros(len(mask.values), dtype=torch.float32)
    values[masked_in[is_last]] = scores[rows[is_last]]
    return mask.like(values.to(mask.values.device))
