"""Triton kernel for the checksums of tensors (`checksums.py`), which reads each word once.

    sums = block_sums(words, factors)       # int32 (N,) and int64 (BLOCK,) -> int64 (blocks,)

Torch operators would convert and multiply each word in memory, which moves nine times as many bytes and takes at least
three launches per tensor. Import this module lazily, because it imports Triton.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

STEP = 2048
"""Number of words that a program adds at once; it divides the size of a block."""


def block_sums(words: Tensor, factors: Tensor) -> Tensor:
    """Return the sum of word times factor for each block of `words`. The last block may be incomplete."""
    block = len(factors)
    sums = torch.empty(-(-len(words) // block), dtype=torch.int64, device=words.device)
    if len(words):
        _launch(_block_sums_kernel, (len(sums),), words, factors, sums, len(words), BLOCK=block, STEP=STEP, num_warps=8)
    return sums


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    kernel[grid](*args, **options)


@triton.jit
def _block_sums_kernel(words, factors, sums, count, BLOCK: tl.constexpr, STEP: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    total = tl.zeros((STEP,), dtype=tl.int64)
    for start in range(0, BLOCK, STEP):
        within = start + tl.arange(0, STEP)
        offsets = block * BLOCK + within
        word = tl.load(words + offsets, mask=offsets < count, other=0)
        total += word.to(tl.int64) * tl.load(factors + within)
    tl.store(sums + block, tl.sum(total, axis=0))
