"""Pack weights into buckets of bounded size and restore the tensors in another process.

    for bucket in pack_buckets(weights, buffers):               # refills the buffers in turn
        ...                                                     # transfer the pieces and the bytes of the bucket
    assembler = Assembler("cpu")
    for name, tensor in assembler.unpack(bucket.pieces, data): ...
    assembler.finish()

Small tensors share a bucket. A tensor larger than a bucket is split across several buckets. Restored tensors own their
memory, so a buffer can be refilled. Both sides synchronize the device before they release a bucket, because the other
process does not share the CUDA stream. `transport.py` moves the bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from camshaft.device import synchronize
from camshaft.errors import RolloutError


@dataclass(frozen=True)
class Piece:
    """A byte range of one tensor and its position in the bucket. `vars(piece)` can be serialized as JSON."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte in the tensor."""
    at: int
    """Offset of the first byte in the bucket."""
    size: int


@dataclass(frozen=True)
class Bucket:
    """The first `num_bytes` bytes of one of the buffers."""

    pieces: list[Piece]
    buffer: int
    """Number of the buffer."""
    num_bytes: int


def pack_buckets(weights: Iterable[tuple[str, Tensor]], buffers: Sequence[Tensor]) -> Iterator[Bucket]:
    """Fill one of the uint8 tensors `buffers` with a bucket at a time and yield the bucket.

    The next iteration fills the next buffer. With two buffers, a receiver can therefore read a bucket while the next
    one is gathered, but must have read it before the iteration after that.
    """
    number, pieces, num_bytes = 0, list[Piece](), 0
    for name, tensor in weights:
        raw, total = _bytes_of(tensor.detach().contiguous()), tensor.nbytes
        dtype, shape, start = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), 0
        while True:  # also once for an empty tensor
            buffer = buffers[number]
            size = min(total - start, buffer.nbytes - num_bytes)
            buffer[num_bytes : num_bytes + size].copy_(raw[start : start + size])
            pieces.append(Piece(name, dtype, shape, start, num_bytes, size))
            num_bytes, start = num_bytes + size, start + size
            if num_bytes == buffer.nbytes:
                synchronize(buffer.device)
                yield Bucket(pieces, number, num_bytes)
                number, pieces, num_bytes = (number + 1) % len(buffers), [], 0
            if start == total:
                break
    if pieces:
        synchronize(buffers[number].device)
        yield Bucket(pieces, number, num_bytes)


class Assembler:
    """Restore tensors from pieces. The pieces must arrive in the order in which they were packed."""

    def __init__(self, device: torch.device | str):
        self._device = torch.device(device)
        self._incomplete: tuple[Piece, Tensor] | None = None
        """Last piece received for the incomplete tensor, and the tensor itself."""

    def unpack(self, pieces: Sequence[Piece], data: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Copy `pieces` out of the bucket `data` and yield each tensor that is now complete."""
        for piece in pieces:
            tensor = self._tensor_of(piece)
            raw = _bytes_of(tensor)
            raw[piece.start : piece.start + piece.size].copy_(data[piece.at : piece.at + piece.size])
            if piece.start + piece.size == tensor.nbytes:
                self._incomplete = None
                yield piece.name, tensor
            else:
                self._incomplete = (piece, tensor)
        synchronize(self._device)

    def finish(self) -> None:
        """Raise an error if a tensor is still incomplete after the last bucket."""
        if self._incomplete is not None:
            piece, tensor = self._incomplete
            raise RolloutError(
                f"weight '{piece.name}' is incomplete: received {piece.start + piece.size} of "
                f"{tensor.nbytes} bytes; send the weights again"
            )

    def _tensor_of(self, piece: Piece) -> Tensor:
        if self._incomplete is None and piece.start == 0:
            return torch.empty(piece.shape, dtype=getattr(torch, piece.dtype), device=self._device)
        expected = "a new weight at byte 0"
        if self._incomplete is not None:
            previous, tensor = self._incomplete
            if (piece.name, piece.start) == (previous.name, previous.start + previous.size):
                return tensor
            expected = f"'{previous.name}' at byte {previous.start + previous.size}"
        raise RolloutError(
            f"received weight '{piece.name}' at byte {piece.start}, expected {expected}; send the weights again"
        )


def _bytes_of(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as uint8 of shape (num_bytes,)."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # a single element can have any stride
