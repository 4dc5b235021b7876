"""Checksums of tensors, which sender and receiver of a weight sync compare.

    digest(engine_weight) == digest(rollout_weight)

A checksum depends on the dtype, the shape and the position of every bit, so it detects transposed matrices, swapped
rows and stale tensors. It uses exact integer arithmetic, so it does not depend on the device or the strides. A CPU core
computes it at 1 to 2 GB/s and needs little memory. On a GPU with Triton, a kernel reads many tensors at a time. It is
not cryptographically secure.
"""

import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from camshaft.device import supports_triton

BLOCK = 2**14
"""Number of 32-bit words per partial sum."""

CHUNK = {"cpu": 2**16}
"""Number of words that are processed at a time, by device type. A CPU chunk fits into the cache."""
DEFAULT_CHUNK = 2**22
"""Number of words on other devices, for tensors that the Triton kernel does not read. It is large enough to amortize
the kernel launches."""

QUEUE_BYTES = 2**28
"""Queued tensors are processed in one launch on a GPU once they reach this number of bytes. They stay in memory until
then."""


def digest(tensor: Tensor) -> int:
    """Return a 64-bit checksum of the dtype, shape and values of `tensor`."""
    digests = Digests()
    digests.add("", tensor)
    return digests.numbers()[""]


class Digests:
    """Checksums of many tensors, for which the host waits once.

    digests = Digests()
    digests.add(name, tensor)       # the tensor must not change before `numbers`
    digests.numbers()               # checksums by name
    """

    def __init__(self, live: bool = False) -> None:
        """With `live`, the caller keeps all tensors alive until it calls `numbers`, so they are queued without a size
        limit."""
        self._queue_bytes = math.inf if live else QUEUE_BYTES
        self._headers: dict[str, bytes] = {}
        self._queues: dict[tuple[torch.device, bool], _Queue] = {}
        """Tensors whose sums are computed together, by device and by whether they are cast."""
        self._sums: dict[torch.device, list[_Sums]] = {}

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> None:
        """Add a tensor. With `dtype`, the checksum is that of `tensor.to(dtype)`."""
        tensor, dtype = tensor.detach(), dtype or tensor.dtype
        self._headers[name] = f"{dtype} {tuple(tensor.shape)}".encode()
        if _kernel_reads(tensor, dtype):
            queue = self._queues.setdefault((tensor.device, dtype != tensor.dtype), _Queue())
            queue.tensors[name] = tensor
            queue.num_bytes += tensor.nbytes
            if queue.num_bytes >= self._queue_bytes:
                self._flush()
        else:
            sums = _block_sums(tensor.to(dtype))
            self._sums.setdefault(tensor.device, []).append(_Sums([name], [len(sums)], sums))

    def numbers(self) -> dict[str, int]:
        self._flush()
        numbers: dict[str, int] = {}
        for groups in self._sums.values():
            on_host = torch.cat([group.sums for group in groups]).cpu().numpy()  # the only device synchronization
            start = 0
            for name, blocks in itertools.chain.from_iterable(zip(g.names, g.blocks, strict=True) for g in groups):
                content = self._headers[name] + on_host[start : start + blocks].tobytes()
                numbers[name] = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
                start += blocks
        return {name: numbers[name] for name in self._headers}

    def _flush(self) -> None:
        """Compute the sums of the queued tensors."""
        for (device, cast), queue in self._queues.items():
            from camshaft.digest.kernel import block_sums

            sums, blocks = block_sums(list(queue.tensors.values()), block_factors(device), cast)
            self._sums.setdefault(device, []).append(_Sums(list(queue.tensors), blocks, sums))
        self._queues.clear()


class _Sums(NamedTuple):
    """Sums of the blocks of some tensors, one tensor after the other."""

    names: list[str]
    blocks: list[int]
    """Number of blocks of each tensor."""
    sums: Tensor


@dataclass
class _Queue:
    """Tensors whose sums the next launch computes."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    num_bytes: int = 0


def _kernel_reads(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return True if the Triton kernel supports the tensor and its cast: it reads whole words of 32 bits."""
    if not supports_triton(tensor) or not tensor.is_contiguous() or tensor.data_ptr() % 4:
        return False
    casts = (tensor.dtype, dtype) == (torch.float32, torch.bfloat16)
    return tensor.nbytes % (8 if casts else 4) == 0 and (casts or tensor.dtype == dtype)


def _block_sums(tensor: Tensor) -> Tensor:
    """Return the sum of each block of `tensor`, int64 of shape (blocks,), on its device."""
    words = CHUNK.get(tensor.device.type, DEFAULT_CHUNK)
    factors = block_factors(tensor.device)
    wide = torch.empty(0, dtype=torch.int64, device=tensor.device)
    sums = [wide]
    per_piece = words * 4 // tensor.element_size()
    for start in range(0, tensor.numel(), per_piece):
        piece = _elements(tensor, start, min(start + per_piece, tensor.numel()))
        blocks = _words(piece).view(-1, BLOCK)
        if wide.shape != blocks.shape:
            wide = torch.empty_like(blocks, dtype=torch.int64)
        sums.append(wide.copy_(blocks).mul_(factors).sum(dim=1))
    return sums[1] if len(sums) == 2 else torch.cat(sums)


def record_digests(weights: Iterable[tuple[str, Tensor]], digests: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights unchanged. When the iteration ends, add their checksums to `digests`."""
    pending = Digests()
    try:
        for name, tensor in weights:
            pending.add(name, tensor)
            yield name, tensor
    finally:
        digests.update(pending.numbers())


@functools.lru_cache(maxsize=16)
def block_factors(device: torch.device) -> Tensor:
    """Return a constant odd factor for each position of a block, shape (BLOCK,).

    Words have 32 bits and sums have 64. If a single word changes, the sum always changes, because the factors are odd.
    If several words change, the sum remains the same with a probability of at most about 2**-32.
    """
    constants = hashlib.shake_128(b"the digest of a tensor").digest(8 * BLOCK)
    return (torch.frombuffer(bytearray(constants), dtype=torch.int64) | 1).to(device)


def _words(piece: Tensor) -> Tensor:
    """View a contiguous piece as int32 words, zero-padded to a multiple of the block size."""
    # A tensor with a single element counts as contiguous even if its stride is not 1.
    if piece.storage_offset() * piece.element_size() % 4 or piece.stride(0) != 1:
        piece = torch.empty(len(piece), dtype=piece.dtype, device=piece.device).copy_(piece)
    raw = piece.view(torch.uint8)
    padding = -len(raw) % (4 * BLOCK)
    if padding:
        raw = torch.cat([raw, raw.new_zeros(padding)])
    return raw.view(torch.int32)


def _elements(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Return the elements from `start` to `stop` as a contiguous tensor, without copying the whole tensor."""
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    if tensor.dim() == 1:
        return tensor[start:stop].contiguous()
    row = tensor[0].numel()
    first_row, last_row = start // row, -(-stop // row)
    if row <= stop - start:
        return tensor[first_row:last_row].reshape(-1)[start - first_row * row : stop - first_row * row]
    pieces = [(i, max(start - i * row, 0), min(stop - i * row, row)) for i in range(first_row, last_row)]
    return torch.cat([_elements(tensor[i], begin, end) for i, begin, end in pieces])
