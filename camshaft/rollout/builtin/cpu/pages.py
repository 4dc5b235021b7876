"""Memory of large tensors in pages, which a CPU commits when they are first written.

keys = pages.zeros((slots, heads, positions, dim), like, huge=False)
pages.release(keys[slot, head, length:])    # reads as zeros again, and needs no memory
"""

import ctypes
import functools
import math
import mmap
from collections.abc import Callable, Sequence

from torch import Tensor, frombuffer

HUGE_PAGE_BYTES = 2**21

HUGE_PAGE_FLAG = getattr(mmap, "MADV_HUGEPAGE", None)
"""Flag of madvise for huge pages, or None if the system has none."""


def zeros(shape: Sequence[int], like: Tensor, huge: bool) -> Tensor:
    """Allocate zeros with the type and device of `like`, on a CPU with huge pages if `huge` is true."""
    count = math.prod(shape)
    size = count * like.element_size()
    if like.device.type != "cpu" or size < HUGE_PAGE_BYTES or HUGE_PAGE_FLAG is None:
        return like.new_zeros(shape)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(HUGE_PAGE_FLAG if huge else mmap.MADV_NOHUGEPAGE)
    return frombuffer(memory, dtype=like.dtype, count=count).view(shape)


def release(part: Tensor) -> None:
    """Return the small pages inside of a contiguous part to the system. They read as zeros; the edges keep theirs."""
    start = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (part.data_ptr() + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > start and part.device.type == "cpu" and HUGE_PAGE_FLAG is not None:
        _madvise()(start, stop - start, mmap.MADV_DONTNEED)  # after an error, the pages stay


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return function
