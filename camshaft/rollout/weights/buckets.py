"""Weights in buckets of bounded size, for the way between two processes.

    for pieces, used in pack_buckets(weights, buffer):    # fills the buffer again and again
        ...                                         # bring buffer[:used] and the pieces to the other side
    assembler = Assembler("cpu")
    for name, tensor in assembler.take(pieces, data): ...
    assembler.finish()

Small tensors share a bucket, and one that is larger than a bucket goes in several. What comes out has memory of its
own, so the buffer may be filled again. Copies on an accelerator have happened when a bucket is given out, and again
when all of it was taken: the other process knows nothing of this one's queue. `transport.py` is the way itself.
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
    """Some bytes of a tensor, and where they are in the bucket. All fields are plain: `vars(piece)` is JSON."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """The first of these bytes in the tensor."""
    at: int
    """And in the bucket."""
    size: int


def pack_buckets(weights: Iterable[tuple[str, Tensor]], buffer: Tensor) -> Iterator[tuple[list[Piece], int]]:
    """The pieces in `buffer` (bytes) and how much of it they fill; it is filled anew when the next is asked for."""
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
    """Makes tensors of pieces again; these come in the order in which they were packed."""

    def __init__(self, device: torch.device | str):
        self._device = torch.device(device)
        self._open: tuple[Piece, Tensor] | None = None
        """The tensor that is not whole yet, and the last piece that came of it."""

    def take(self, pieces: Sequence[Piece], data: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are whole with these pieces."""
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
        """Nothing more comes; a tensor that is not whole is an error."""
        if self._open is not None:
            piece, tensor = self._open
            raise RolloutError(
                f"'{piece.name}' came in part only: {piece.start + piece.size} of {len(_bytes_of(tensor))} bytes"
            )

    def _tensor_of(self, piece: Piece) -> Tensor:
        if self._open is None and piece.start == 0:
            return torch.empty(piece.shape, dtype=getattr(torch, piece.dtype), device=self._device)
        if self._open is not None:
            before, tensor = self._open
            if (piece.name, piece.start) == (before.name, before.start + before.size):
                return tensor
            raise RolloutError(
                f"bytes {piece.start}... of '{piece.name}' came, "
                f"but bytes {before.start + before.size}... of '{before.name}' were to come"
            )
        raise RolloutError(f"bytes {piece.start}... of '{piece.name}' came without those before them")


def _bytes_of(tensor: Tensor) -> Tensor:
    """(bytes,) uint8, sharing the memory of a contiguous tensor."""
    if math.prod(tensor.shape) == 0:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.view(-1).view(torch.uint8)
