"""Decode attention over the KV cache in Triton kernels that read each row's length on the device.

    step = TritonDecodeStep(cache, positions)
    hf(..., slots=step)                  # one token per row, slots 0..B-1; slot i has its token at positions[i]

No kernel argument depends on the values of `positions`, so a CUDA graph (`graphs.py`) may replay the kernels for other
positions. Each row's slot is read up to that row's position.

`_store` writes a token's key and value. `_attend` runs one program per row, key head and split of the row's positions:
query heads that share a key head form one tile, with an online softmax. `_merge` combines splits. All tensors are
contiguous. This module imports Triton, so import it only where it is used.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from camshaft.rollout.builtin.kv_cache import KVCache

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Supported dtypes of keys and values; sums are in float32."""

MAX_DIM = 256
"""Maximum head size; a larger tile does not fit."""

TILE_BYTES = 2**14
"""Size of a tile of keys."""

SMALLEST = 16
"""Minimum size of each dimension of `tl.dot`."""

PER_PROCESSOR = 4
"""Target number of programs per multiprocessor when rows and heads are few."""

MAX_SPLITS = 32
"""Maximum number of splits per row."""

LOG2E = 1.4426950408889634
"""Kernels compute exp(x) as exp2(x * LOG2E)."""


def supports(cache: KVCache) -> bool:
    """Return whether the kernels support the dtype and head size of the cache."""
    return all(block.dtype in DTYPES and block.shape[3] <= MAX_DIM for pair in cache.layers.values() for block in pair)


class TritonDecodeStep:
    """A model call on one token per row; `kv_cache.DecodeStep` computes the same with torch operators."""

    def __init__(self, cache: KVCache, positions: Tensor):
        self.cache = cache
        self.positions = positions
        self.processors = processors_of(positions.device)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Compute attention of each new token over its slot; see `camshaft.models.attention.Slots`."""
        keys, values = self.cache.layer(module, key, value)
        query, key, value = (tensor[:, :, 0].contiguous() for tensor in (query, key, value))
        (num_rows, num_heads, dim), key_heads, value_dim = query.shape, key.shape[1], value.shape[2]
        dims = {"DIM": dim, "VALUE_DIM": value_dim, "DIMS": _padded(max(dim, value_dim))}
        num_positions = keys.shape[2]
        _launch(_store, (num_rows, key_heads), key, value, keys, values, self.positions, num_positions, **dims)
        shape = shape_of(keys.dtype, dims["DIMS"])
        splits = self._splits(num_rows * key_heads, shape["BLOCK"], sliding_window)
        out = query.new_empty(num_rows, 1, num_heads, value_dim)
        parts, sizes = out, out
        if splits > 1:
            parts = torch.empty(num_rows, num_heads, splits, value_dim, dtype=torch.float32, device=out.device)
            sizes = torch.empty(num_rows, num_heads, splits, dtype=torch.float32, device=out.device)
        _launch(
            _attend, (num_rows, key_heads, splits), query, keys, values, self.positions, parts, sizes, num_positions,
            scaling * LOG2E, WINDOW=sliding_window or 0, GROUP=num_heads // key_heads,
            PADDED_GROUP=_padded(num_heads // key_heads), NUM_SPLITS=splits, **dims, **shape,
        )  # fmt: skip
        if splits > 1:
            _launch(
                _merge, (num_rows, num_heads), parts, sizes, out, VALUE_DIM=value_dim, VALUE_DIMS=_padded(value_dim),
                NUM_SPLITS=splits, PADDED_SPLITS=1 << (splits - 1).bit_length(),
            )  # fmt: skip
        return out

    def _splits(self, programs: int, block: int, window: int | None) -> int:
        """Return the number of programs per row; equal for all rows, because a CUDA graph fixes it."""
        num_positions = self.cache.length if window is None else min(window, self.cache.length)
        splits = -(-PER_PROCESSOR * self.processors // programs)
        return max(1, min(splits, MAX_SPLITS, -(-num_positions // block)))


def shape_of(dtype: torch.dtype, dims: int) -> dict[str, int]:
    """Return the block of positions and the number of warps; float32 needs more warps to fit."""
    block = max(SMALLEST, TILE_BYTES // (dims * dtype.itemsize))
    return {"BLOCK": block, "num_warps": 8 if dtype == torch.float32 else 4, "num_stages": 2}


def processors_of(device: torch.device) -> int:
    """Return the number of multiprocessors."""
    backend: Any = torch.get_device_module(device)
    return backend.get_device_properties(device).multi_processor_count


def _padded(size: int) -> int:
    """Return the tile size for `size` elements."""
    return max(SMALLEST, 1 << (size - 1).bit_length())


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    kernel[grid](*args, **options)


@triton.jit
def _store(
    key, value, keys, values, positions, num_positions, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIMS: tl.constexpr
):
    """Write the key and value of one row and key head to the row's position in its slot."""
    row = tl.program_id(0).to(tl.int64)
    head = row * tl.num_programs(1) + tl.program_id(1)
    slot_position = head * num_positions + tl.load(positions + row)
    offsets = tl.arange(0, DIMS)
    elements = tl.load(key + head * DIM + offsets, mask=offsets < DIM)
    tl.store(keys + slot_position * DIM + offsets, elements, mask=offsets < DIM)
    elements = tl.load(value + head * VALUE_DIM + offsets, mask=offsets < VALUE_DIM)
    tl.store(values + slot_position * VALUE_DIM + offsets, elements, mask=offsets < VALUE_DIM)


@triton.jit
def _attend(
    query, keys, values, positions, parts, sizes, num_positions, scale, WINDOW: tl.constexpr, GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr, BLOCK: tl.constexpr, NUM_SPLITS: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Attend to one split of one row's positions, for the query heads of one key head; `scale` includes LOG2E.

    With several splits, `parts` are their results and `sizes` the logarithms of their softmax's sums, for `_merge`;
    with one, `parts` is the result itself.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    stop = tl.load(positions + row).to(tl.int32) + 1
    first = tl.maximum(stop - WINDOW, 0) if WINDOW > 0 else 0
    # Splits depend on this row's length only, so other rows do not change its bits.
    share = tl.cdiv(tl.cdiv(stop - first, NUM_SPLITS), BLOCK) * BLOCK
    start = first + split * share
    end = tl.minimum(start + share, stop)

    member, offsets = tl.arange(0, PADDED_GROUP), tl.arange(0, DIMS)
    head = row * tl.num_programs(1) + tl.program_id(1)  # key head, numbered over all rows
    heads = head * GROUP + member  # query heads, numbered over all rows
    real = (member < GROUP)[:, None]
    q = tl.load(query + heads[:, None] * DIM + offsets[None, :], mask=real & (offsets < DIM)[None, :], other=0.0)
    keys += head * num_positions * DIM
    values += head * num_positions * VALUE_DIM
    top = tl.full([PADDED_GROUP], -float("inf"), tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    mixed = tl.zeros([PADDED_GROUP, DIMS], tl.float32)
    for begin in range(start, end, BLOCK):
        indices = begin + tl.arange(0, BLOCK)
        seen = indices < end
        k = tl.load(
            keys + indices[None, :] * DIM + offsets[:, None], mask=seen[None, :] & (offsets < DIM)[:, None], other=0.0
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        fade = tl.exp2(top - higher)
        weights = tl.exp2(scores - higher[:, None])
        v = tl.load(
            values + indices[:, None] * VALUE_DIM + offsets[None, :],
            mask=seen[:, None] & (offsets < VALUE_DIM)[None, :],
            other=0.0,
        )
        mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * fade + tl.sum(weights, 1)
        top = higher

    to = heads * NUM_SPLITS + split
    kept = real & (offsets < VALUE_DIM)[None, :]
    if NUM_SPLITS == 1:
        result = (mixed / total[:, None]).to(parts.dtype.element_ty)
        tl.store(parts + to[:, None] * VALUE_DIM + offsets[None, :], result, mask=kept)
    else:
        non_empty = end > start
        size = tl.where(non_empty, top + tl.log2(total), -float("inf"))
        tl.store(sizes + to, size, mask=member < GROUP)
        tl.store(parts + to[:, None] * VALUE_DIM + offsets[None, :], mixed / total[:, None], mask=kept & non_empty)


@triton.jit
def _merge(
    parts,
    sizes,
    out,
    VALUE_DIM: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
):
    """Combine the splits of one row and query head; the first split is never empty."""
    head = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split, offsets = tl.arange(0, PADDED_SPLITS), tl.arange(0, VALUE_DIMS)
    size = tl.load(sizes + head * NUM_SPLITS + split, mask=split < NUM_SPLITS, other=-float("inf"))
    valid = (size > -float("inf"))[:, None] & (offsets < VALUE_DIM)[None, :]
    part = tl.load(parts + (head * NUM_SPLITS + split)[:, None] * VALUE_DIM + offsets[None, :], mask=valid, other=0.0)
    weight = tl.exp2(size - tl.max(size, 0))
    result = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + head * VALUE_DIM + offsets, result.to(out.dtype.element_ty), mask=offsets < VALUE_DIM)
