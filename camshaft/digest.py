"""One number for all the bits of a tensor: both ends of a hand-over compute it and compare.

    digest(engine_weight) == digest(what_the_rollout_holds)

It depends on the dtype, the shape, and every bit and where it stands, so a transposed square matrix, two rows that
changed places and a tensor of the last step all have another digest. It is exact integer arithmetic: the same on
every device, and whatever the strides are. It costs one to two copies of the tensor in time, and little memory. It
finds mistakes; it does not stop somebody who looks for two tensors with one digest.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

BLOCK = 2**14
"""Words of 32 bits that are summed into one number."""

CHUNK = {"cpu": 2**16}
"""Words computed at once: what stays in the cache of a CPU, and on other devices what pays for a kernel's start."""
CHUNK_ELSEWHERE = 2**22


def digest(tensor: Tensor) -> int:
    """64 bits that stand for dtype, shape and values of `tensor`; the same for equal tensors on any device."""
    tensor = tensor.detach()
    words = CHUNK.get(tensor.device.type, CHUNK_ELSEWHERE)
    factors = _factors(tensor.device)
    wide = torch.empty(0, dtype=torch.int64, device=tensor.device)
    sums: list[Tensor] = []
    per_piece = words * 4 // tensor.element_size()
    for start in range(0, tensor.numel(), per_piece):
        piece = _elements(tensor, start, min(start + per_piece, tensor.numel()))
        blocks = _words(piece).view(-1, BLOCK)
        if wide.shape != blocks.shape:
            wide = torch.empty_like(blocks, dtype=torch.int64)
        sums.append(wide.copy_(blocks).mul_(factors).sum(dim=1))
    told = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=8)
    if sums:
        told.update(torch.cat(sums).cpu().numpy().tobytes())  # the one read from the device
    return int.from_bytes(told.digest(), "little")


def noted(weights: Iterable[tuple[str, Tensor]], came: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """The weights as they are, their digests put into `came` on the way."""
    for name, tensor in weights:
        came[name] = digest(tensor)
        yield name, tensor


@functools.lru_cache(maxsize=16)
def _factors(device: torch.device) -> Tensor:
    """(BLOCK,) a fixed odd number for each place of a block.

    A word has 32 bits and a sum 64: one changed word changes the sum for certain, since its factor is odd, and
    several do but for a chance of about 2**-32.
    """
    drawn = hashlib.shake_128(b"the digest of a tensor").digest(8 * BLOCK)
    return (torch.frombuffer(bytearray(drawn), dtype=torch.int64) | 1).to(device)


def _words(piece: Tensor) -> Tensor:
    """The bits of a contiguous piece as int32, a whole number of blocks; zeros behind the end."""
    if piece.storage_offset() * piece.element_size() % 4 or piece.stride(0) != 1:  # one element may have any stride
        piece = torch.empty(len(piece), dtype=piece.dtype, device=piece.device).copy_(piece)
    raw = piece.view(torch.uint8)
    missing = -len(raw) % (4 * BLOCK)
    if missing:
        raw = torch.cat([raw, raw.new_zeros(missing)])
    return raw.view(torch.int32)


def _elements(tensor: Tensor, start: int, stop: int) -> Tensor:
    """(stop - start,) of the tensor's elements, contiguous; hardly more is copied than that."""
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    if tensor.dim() == 1:
        return tensor[start:stop].contiguous()
    row = tensor[0].numel()
    first, last = start // row, -(-stop // row)
    if row <= stop - start:
        return tensor[first:last].reshape(-1)[start - first * row : stop - first * row]
    pieces = [(i, max(start - i * row, 0), min(stop - i * row, row)) for i in range(first, last)]
    return torch.cat([_elements(tensor[i], begin, end) for i, begin, end in pieces])
