"""Pack weights into buckets of bounded size, and restore the tensors in another process.

    for pieces, used in pack_buckets(weights, buffer):      # refills the buffer for each bucket
        ...                                                 # transfer buffer[:used] and the pieces
    assembler = Assembler("cpu")
    for name, tensor in assembler.take(pieces, data): ...
    assembler.finish()

Small tensors share a bucket; a tensor larger than a bucket is split into several. Restored tensors own their memory, so
the buffer can be refilled. Both sides synchronize the device before they hand a bucket on, since the other process does
not share the CUDA stream. `transport.py` moves the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from camshaft.device import wait_for
from camshaft.errors import RolloutError


@dataclass(frozen=True)
class Piece:
    """A range of bytes of one tensor and its position in the bucket; `vars(piece)` is valid JSON."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte in the tensor."""
    at: int
    """Offset of the first byte in the bucket."""
    size: int


def pack_buckets(weights: Iterable[tuple[str, Tensor]], buffer: Tensor) -> Iterator[tuple[list[Piece], int]]:
    """Fill `buffer` (uint8) with one bucket after another; yield its pieces and the number of bytes used.

    The next iteration overwrites the buffer.
    """
    pieces: list[Piece] = []
    used = 0
    for name, tensor in weights:
        raw = _bytes_of(tensor.detach().contiguous())
        start = 0
        while start < len(raw) or not len(raw):
            size = min(len(raw) - start, len(buffer) - used)
            buffer[used : used + size].copy_(raw[start : start + size])
            pieces.append(Piece(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start, used, size))
            used, start = used + size, start + size
            if used == len(buffer):
                wait_for(buffer.device)
                yield pieces, used
                pieces, used = [], 0
            if not len(raw):
                break
    if pieces:
        wait_for(buffer.device)
        yield pieces, used


class Assembler:
    """Restore tensors from pieces, which must arrive in the order in which they were packed."""

    def __init__(self, device: torch.device | str):
        self._device = torch.device(device)
        self._open: tuple[Piece, Tensor] | None = None
        """The incomplete tensor and the last piece received for it."""

    def take(self, pieces: Sequence[Piece], data: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Copy the pieces out of `data` and yield each tensor that they complete."""
        for piece in pieces:
            tensor = self._tensor_of(piece)
            raw = _bytes_of(tensor)
            raw[piece.start : piece.start + piece.size].copy_(data[piece.at : piece.at + piece.size])
            if piece.start + piece.size == len(raw):
                self._open = None
                yield piece.name, tensor
            else:
                self._open = (piece, tensor)
        wait_for(self._device)

    def finish(self) -> None:
        """Raise an error if a tensor is still incomplete after the last bucket."""
        if self._open is not None:
            piece, tensor = self._open
            raise RolloutError(
                f"'{piece.name}' is incomplete: received {piece.start + piece.size} of {len(_bytes_of(tensor))} bytes; "
                "send the weights again"
            )

    def _tensor_of(self, piece: Piece) -> Tensor:
        if self._open is None and piece.start == 0:
            return torch.empty(piece.shape, dtype=getattr(torch, piece.dtype), device=self._device)
        if self._open is not None:
            before, tensor = self._open
            if (piece.name, piece.start) == (before.name, before.start + before.size):
                return tensor
            raise RolloutError(
                f"received '{piece.name}' at byte {piece.start}, expected '{before.name}' at byte "
                f"{before.start + before.size}; send the weights again"
            )
        raise RolloutError(
            f"received '{piece.name}' at byte {piece.start}, expected byte 0 of a tensor; send the weights again"
        )


def _bytes_of(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as uint8 of shape (num_bytes,)."""
    if math.prod(tensor.shape) == 0:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.view(-1).view(torch.uint8)
