"""Attention over slots in kernels that find on the device how long each row is.

    step = KernelStep(pool, positions)
    hf(..., slots=step)                  # one token of each row, slots 0..B-1; the row in slot i is at positions[i]

Nothing that a kernel is given depends on the positions, so a recorded step (`recorded.py`) may put it on the device
again when they have changed. A row's places are read up to its own end, whatever the others' are.

`_store` writes a token's key and value. `_attend` has a program for each row, key head and split of the row's places:
the query heads that share a key head are one tile, and its softmax is taken as places come. `_merge` puts splits
together. All tensors are contiguous, so their shapes tell where things are. Triton is imported with this module, so
import it where it is needed only.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from camshaft.rollout.builtin.kv_cache import KVCache

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of keys and values; sums are in float32."""

MAX_DIM = 256
"""Heads of at most so many numbers: a tile of more does not fit."""

TILE_BYTES = 2**14
"""The size of a tile of keys."""

SMALLEST = 16
"""A product of tiles wants at least so many of each dimension."""

PER_PROCESSOR = 4
"""Programs that each processor of the device should have, where rows and heads are few."""

MAX_SPLITS = 32
"""Into how many splits a row goes at most."""

LOG2E = 1.4426950408889634
"""The device computes powers of two."""


def can(pool: KVCache) -> bool:
    """Whether the kernels take the pool's keys and values."""
    return all(block.dtype in DTYPES and block.shape[3] <= MAX_DIM for pair in pool.layers.values() for block in pair)


class KernelStep:
    """One model call on one token of each row; `TokenStep` of `slots.py` computes the same with torch's operators."""

    def __init__(self, pool: KVCache, positions: Tensor):
        self.pool = pool
        self.positions = positions
        self.processors = processors_of(positions.device)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Attention of each new token over the places of its slot; see `camshaft.models.attention.Slots`."""
        keys, values = self.pool.layer(module, key, value)
        query, key, value = (tensor[:, :, 0].contiguous() for tensor in (query, key, value))
        (num_rows, num_heads, dim), key_heads, value_dim = query.shape, key.shape[1], value.shape[2]
        dims = {"DIM": dim, "VALUE_DIM": value_dim, "DIMS": _padded(max(dim, value_dim))}
        places = keys.shape[2]
        _launch(_store, (num_rows, key_heads), key, value, keys, values, self.positions, places, **dims)
        shape = shape_of(keys.dtype, dims["DIMS"])
        splits = self._splits(num_rows * key_heads, shape["BLOCK"], sliding_window)
        out = query.new_empty(num_rows, 1, num_heads, value_dim)
        parts, sizes = out, out
        if splits > 1:
            parts = torch.empty(num_rows, num_heads, splits, value_dim, dtype=torch.float32, device=out.device)
            sizes = torch.empty(num_rows, num_heads, splits, dtype=torch.float32, device=out.device)
        _launch(
            _attend, (num_rows, key_heads, splits), query, keys, values, self.positions, parts, sizes, places,
            scaling * LOG2E, WINDOW=sliding_window or 0, GROUP=num_heads // key_heads,
            GROUPS=_padded(num_heads // key_heads), SPLITS=splits, **dims, **shape,
        )  # fmt: skip
        if splits > 1:
            _launch(
                _merge, (num_rows, num_heads), parts, sizes, out, VALUE_DIM=value_dim, VALUE_DIMS=_padded(value_dim),
                SPLITS=splits, PADDED=1 << (splits - 1).bit_length(),
            )  # fmt: skip
        return out

    def _splits(self, programs: int, block: int, window: int | None) -> int:
        """How many programs share a row's places; of all rows alike, since a recording keeps the number."""
        places = self.pool.length if window is None else min(window, self.pool.length)
        wanted = -(-PER_PROCESSOR * self.processors // programs)
        return max(1, min(wanted, MAX_SPLITS, -(-places // block)))


def shape_of(dtype: torch.dtype, dims: int) -> dict[str, int]:
    """How many places are looked at together, and by how many threads; float32 wants more of them to fit."""
    block = max(SMALLEST, TILE_BYTES // (dims * dtype.itemsize))
    return {"BLOCK": block, "num_warps": 8 if dtype == torch.float32 else 4, "num_stages": 2}


def processors_of(device: torch.device) -> int:
    """How many programs run at a time, at the least."""
    backend: Any = torch.get_device_module(device)
    return backend.get_device_properties(device).multi_processor_count


def _padded(size: int) -> int:
    """The size of a tile in which so many numbers fit."""
    return max(SMALLEST, 1 << (size - 1).bit_length())


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    kernel[grid](*args, **options)


@triton.jit
def _store(
    key, value, keys, values, positions, num_places, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIMS: tl.constexpr
):
    """The key and the value of one row and key head, to the row's position in its slot."""
    row = tl.program_id(0).to(tl.int64)
    here = row * tl.num_programs(1) + tl.program_id(1)
    place = here * num_places + tl.load(positions + row)
    at = tl.arange(0, DIMS)
    some = tl.load(key + here * DIM + at, mask=at < DIM)
    tl.store(keys + place * DIM + at, some, mask=at < DIM)
    some = tl.load(value + here * VALUE_DIM + at, mask=at < VALUE_DIM)
    tl.store(values + place * VALUE_DIM + at, some, mask=at < VALUE_DIM)


@triton.jit
def _attend(
    query, keys, values, positions, parts, sizes, num_places, scale, WINDOW: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DIMS: tl.constexpr,
):  # fmt: skip
    """One split of one row's places, for the query heads of one key head; `scale` is for powers of two.

    With several splits, `parts` are their results and `sizes` the logarithms of their softmax's sums, for `_merge`;
    with one, `parts` is the result itself.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    stop = tl.load(positions + row).to(tl.int32) + 1
    first = tl.maximum(stop - WINDOW, 0) if WINDOW > 0 else 0
    # Each split takes so many of the row's own places: how long other rows are changes no bit of the result.
    share = tl.cdiv(tl.cdiv(stop - first, SPLITS), BLOCK) * BLOCK
    start = first + split * share
    end = tl.minimum(start + share, stop)

    member, at = tl.arange(0, GROUPS), tl.arange(0, DIMS)
    here = row * tl.num_programs(1) + tl.program_id(1)  # the key head, of those of all rows
    heads = here * GROUP + member  # of all rows
    real = (member < GROUP)[:, None]
    q = tl.load(query + heads[:, None] * DIM + at[None, :], mask=real & (at < DIM)[None, :], other=0.0)
    keys += here * num_places * DIM
    values += here * num_places * VALUE_DIM
    top = tl.full([GROUPS], -float("inf"), tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    mixed = tl.zeros([GROUPS, DIMS], tl.float32)
    for begin in range(start, end, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        seen = places < end
        k = tl.load(keys + places[None, :] * DIM + at[:, None], mask=seen[None, :] & (at < DIM)[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        fade = tl.exp2(top - higher)
        weights = tl.exp2(scores - higher[:, None])
        v = tl.load(
            values + places[:, None] * VALUE_DIM + at[None, :],
            mask=seen[:, None] & (at < VALUE_DIM)[None, :],
            other=0.0,
        )
        mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * fade + tl.sum(weights, 1)
        top = higher

    to = heads * SPLITS + split
    kept = real & (at < VALUE_DIM)[None, :]
    if SPLITS == 1:
        result = (mixed / total[:, None]).to(parts.dtype.element_ty)
        tl.store(parts + to[:, None] * VALUE_DIM + at[None, :], result, mask=kept)
    else:
        some = end > start
        size = tl.where(some, top + tl.log2(total), -float("inf"))
        tl.store(sizes + to, size, mask=member < GROUP)
        tl.store(parts + to[:, None] * VALUE_DIM + at[None, :], mixed / total[:, None], mask=kept & some)


@triton.jit
def _merge(
    parts, sizes, out, VALUE_DIM: tl.constexpr, VALUE_DIMS: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr
):
    """The splits of one row and query head; the first always has a place, others may have none."""
    here = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split, at = tl.arange(0, PADDED), tl.arange(0, VALUE_DIMS)
    size = tl.load(sizes + here * SPLITS + split, mask=split < SPLITS, other=-float("inf"))
    some = (size > -float("inf"))[:, None] & (at < VALUE_DIM)[None, :]
    part = tl.load(parts + (here * SPLITS + split)[:, None] * VALUE_DIM + at[None, :], mask=some, other=0.0)
    weight = tl.exp2(size - tl.max(size, 0))
    result = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + here * VALUE_DIM + at, result.to(out.dtype.element_ty), mask=at < VALUE_DIM)
