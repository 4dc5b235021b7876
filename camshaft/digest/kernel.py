"""Triton kernel for the checksums of tensors (`checksums.py`), which reads many tensors in one launch.

    sums, blocks = block_sums(tensors, factors)         # int64 (blocks of all tensors,), and the blocks of each tensor
    block_sums(weights, factors, cast=True)             # of float32 weights, as if they had been cast to bfloat16

Torch operators would write the converted words and the products to memory, which moves nine times as many bytes and
takes at least three launches per tensor. For a small tensor, a launch takes longer on the host than the sums take on
the GPU. Import this module lazily, because it imports Triton.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from camshaft.device import to_device

STEP = 1024
"""Number of words that a program adds at once; it divides the size of a block."""


def block_sums(tensors: Sequence[Tensor], factors: Tensor, cast: bool = False) -> tuple[Tensor, list[int]]:
    """Return the sum of word times factor for each block of each tensor. The last block of a tensor may be incomplete.

    The tensors are contiguous and consist of whole words of 32 bits. With `cast`, they are float32, and a word holds
    two of their elements in bfloat16.
    """
    block, word_bytes = len(factors), 8 if cast else 4
    words = np.array([tensor.nbytes // word_bytes for tensor in tensors], dtype=np.int64)
    pointers = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
    blocks = -(-words // block)
    # For each tensor: its address, number of words, number of blocks before it, and number of blocks.
    rows = np.stack([pointers, words, blocks.cumsum() - blocks, blocks], axis=1)
    table = to_device(torch.from_numpy(rows), factors.device)
    num_blocks = int(blocks.sum())
    sums = torch.empty(num_blocks, dtype=torch.int64, device=factors.device)
    if num_blocks:
        owners = torch.repeat_interleave(table[:, 3], output_size=num_blocks)  # with the size, the host does not wait
        options = {"BLOCK": block, "STEP": STEP, "CAST": cast, "num_warps": 4}
        _launch(_block_sums_kernel, (num_blocks,), table, owners, factors, sums, **options)
    return sums, blocks.tolist()


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    kernel[grid](*args, **options)


@triton.jit
def _block_sums_kernel(table, owners, factors, sums, BLOCK: tl.constexpr, STEP: tl.constexpr, CAST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tensor = table + 4 * tl.load(owners + row)
    position = (row - tl.load(tensor + 2)) * BLOCK
    start = tl.load(tensor) + position * (8 if CAST else 4)
    count = tl.minimum(tl.load(tensor + 1) - position, BLOCK)
    total = tl.zeros((STEP,), dtype=tl.int64)
    for step in range(0, BLOCK, STEP):
        within = step + tl.arange(0, STEP)
        if CAST:
            pairs = within[:, None] * 2 + tl.arange(0, 2)[None, :]
            bits = tl.load(start.to(tl.pointer_type(tl.uint32)) + pairs, mask=within[:, None] < count, other=0)
            low, high = tl.split(_bfloat16_bits(bits))
            word = (low | (high << 16)).to(tl.int32, bitcast=True)
        else:
            word = tl.load(start.to(tl.pointer_type(tl.int32)) + within, mask=within < count, other=0)
        total += word.to(tl.int64) * tl.load(factors + within)
    tl.store(sums + row, tl.sum(total, axis=0))


@triton.jit
def _bfloat16_bits(bits):
    """Round float32 to bfloat16, both as bits in uint32, as a GPU does. The cast of Triton's interpreter truncates."""
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, rounded)
