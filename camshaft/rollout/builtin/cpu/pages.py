"""Memory of large tensors in pages, which a CPU commits when they are first written.

keys = pages.zeros((slots, heads, positions, dim), like, large=False)
pages.release(keys[slot, head, length:])    # zeros again, without memory
"""

import ctypes
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

LARGE_PAGE = 2**21
"""Size of a huge page in bytes."""

LARGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
"""Flag of madvise for huge pages, or None if the system has none."""


def zeros(shape: Sequence[int], like: Tensor, large: bool) -> Tensor:
    """Allocate zeros with the type and device of `like`, on a CPU with huge pages if `large` is true."""
    count = math.prod(shape)
    size = count * like.element_size()
    if like.device.type != "cpu" or size < LARGE_PAGE or LARGE_PAGES is None:
        return like.new_zeros(shape)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(LARGE_PAGES if large else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype, count=count).view(shape)


def release(part: Tensor) -> None:
    """Return the small pages that a contiguous part of a tensor of `zeros` occupies alone. It may be zeros then."""
    start = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (part.data_ptr() + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > start and part.device.type == "cpu" and LARGE_PAGES is not None:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)
