"""Triton kernels for decode attention over the KV cache. They read the length of each row on the device.

    step = TritonDecodeStep(cache, positions)
    hf(..., slots=step)                  # one token per row in slots 0..B-1; the token in slot i has positions[i]

No kernel argument depends on the values of `positions`, so a CUDA graph (`graphs.py`) can replay the kernels for other
positions. The kernels read each slot up to its row's position.

`_store` writes the key and value of a token, and can first apply a rotary embedding to query and key. `_attend` runs
one program per row, key head and split of the row's positions. Query heads that share a key head form one tile with an
online softmax. `_merge` combines the splits of a row. Import this module lazily, because it imports Triton.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from camshaft.models.blockwise import Scores
from camshaft.models.recurrent import RecurrentLayer
from camshaft.rollout.builtin.kv_cache import KVCache

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Supported dtypes of keys and values. Sums are computed in float32."""

MAX_DIM = 256
"""Maximum head size. The tiles of larger heads do not fit on a multiprocessor."""

TILE_BYTES = 2**14
"""Size of a tile of keys in bytes."""

MIN_TILE = 16
"""Minimum size of each dimension of `tl.dot`."""

PROGRAMS_PER_PROCESSOR = 4
"""Target number of programs per multiprocessor if there are few rows and heads."""

MAX_SPLITS = 32
"""Maximum number of splits per row."""

LOG2E = 1.4426950408889634
"""Base-2 logarithm of e. Kernels compute exp(x) as exp2(x * LOG2E)."""


def supports_cache(cache: KVCache) -> bool:
    """Return True if the kernels support the dtype and head size of the cache."""
    return all(block.dtype in DTYPES and block.shape[3] <= MAX_DIM for pair in cache.layers.values() for block in pair)


class TritonDecodeStep:
    """A model call on one token per row. `steps.DecodeStep` computes the same result with torch operators."""

    def __init__(self, cache: KVCache, positions: Tensor):
        self.cache = cache
        self.positions = positions
        self.processors = count_multiprocessors(positions.device)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scores: Scores,
        sinks: Tensor | None,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Compute attention of each new token over its row's slot; see `camshaft.models.attention.Slots`.

        With `rotation`, cosines and sines of shape (B or 1, 1, 1, D), a rotary embedding is applied to query and key.
        """
        keys, values = self.cache.layer(module, key, value)
        query, key, value = (_rows_of_heads(tensor) for tensor in (query, key, value))
        (num_rows, num_heads, dim), key_heads, value_dim = query.shape, key.shape[1], value.shape[2]
        dims = {"DIM": dim, "VALUE_DIM": value_dim, "DIMS": _tile_size(max(dim, value_dim))}
        num_positions = keys.shape[2]
        cos, sin = rotation or (query, query)
        rotated = query if rotation is None else query.new_empty(query.shape)
        launch(
            _store, (num_rows, key_heads if rotation is None else key_heads + num_heads), query, key, value, cos, sin,
            rotated, keys, values, self.positions, num_positions, query.stride(0), key.stride(0), value.stride(0),
            _row_stride(cos, num_rows), _row_stride(sin, num_rows), KEY_HEADS=key_heads, ROTATE=rotation is not None,
            **dims,
        )  # fmt: skip
        query = rotated.contiguous()
        shape = block_config(keys.dtype, dims["DIMS"])
        splits = self._splits(num_rows * key_heads, shape["BLOCK"], scores.window)
        out = query.new_empty(num_rows, 1, num_heads, value_dim)
        parts, log_sums = out, out
        if splits > 1:
            parts = torch.empty(num_rows, num_heads, splits, value_dim, dtype=torch.float32, device=out.device)
            log_sums = torch.empty(num_rows, num_heads, splits, dtype=torch.float32, device=out.device)
        launch(
            _attend, (num_rows, key_heads, splits), query, keys, values, self.positions, parts, log_sums,
            query if sinks is None else sinks, num_positions, scores.scale * LOG2E, (scores.softcap or 0.0) * LOG2E,
            WINDOW=scores.window or 0, CAPPED=scores.softcap is not None, SINKS=sinks is not None,
            GROUP=num_heads // key_heads, PADDED_GROUP=_tile_size(num_heads // key_heads), NUM_SPLITS=splits,
            LOG2E=LOG2E, **dims, **shape,
        )  # fmt: skip
        if splits > 1:
            launch(
                _merge, (num_rows, num_heads), parts, log_sums, out, VALUE_DIM=value_dim,
                VALUE_DIMS=_tile_size(value_dim), NUM_SPLITS=splits, PADDED_SPLITS=1 << (splits - 1).bit_length(),
            )  # fmt: skip
        return out

    def recur(self, layer: RecurrentLayer, hidden_states: Tensor) -> Tensor:
        return self.cache.advance(layer, hidden_states)

    def _splits(self, programs: int, block: int, window: int | None) -> int:
        """Return the number of splits per row. It is equal for all rows, because a CUDA graph fixes the launch grid.

        It is a power of two, because the kernels are compiled for each number that occurs.
        """
        num_positions = self.cache.length if window is None else min(window, self.cache.length)
        splits = -(-PROGRAMS_PER_PROCESSOR * self.processors // programs)
        splits = max(1, min(splits, MAX_SPLITS, -(-num_positions // block)))
        return 1 << (splits.bit_length() - 1)


def block_config(dtype: torch.dtype, dims: int) -> dict[str, int]:
    """Return the number of positions per block, of warps and of stages. float32 needs more warps to fit."""
    block = max(MIN_TILE, TILE_BYTES // (dims * dtype.itemsize))
    return {"BLOCK": block, "num_warps": 8 if dtype == torch.float32 else 4, "num_stages": 2}


def count_multiprocessors(device: torch.device) -> int:
    backend: Any = torch.get_device_module(device)
    return backend.get_device_properties(device).multi_processor_count


def _rows_of_heads(tensor: Tensor) -> Tensor:
    """Return (B, H, 1, D) as (B, H, D), in which only the rows may have gaps between them."""
    tensor = tensor[:, :, 0]
    return tensor if tensor.stride()[1:] == (tensor.shape[2], 1) else tensor.contiguous()


def _row_stride(tensor: Tensor, num_rows: int) -> int:
    """Return the stride of the rows, 0 if all rows share one."""
    return tensor.stride(0) if len(tensor) == num_rows else 0


def _tile_size(size: int) -> int:
    """Return the size of a tile that holds `size` elements: a power of two and at least `MIN_TILE`."""
    return max(MIN_TILE, 1 << (size - 1).bit_length())


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    kernel[grid](*args, **options)


@triton.jit
def _store(
    query, key, value, cos, sin, rotated, keys, values, positions, num_positions, query_stride, key_stride,
    value_stride, cos_stride, sin_stride, KEY_HEADS: tl.constexpr, ROTATE: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Write the key and value of one row and key head to the row's position in its slot.

    With `ROTATE`, apply the rotary embedding to the key, and in further programs to each query head.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offsets = tl.arange(0, DIMS)
    if head < KEY_HEADS:
        slot_position = (row * KEY_HEADS + head) * num_positions + tl.load(positions + row)
        elements = _rotated(key + row * key_stride + head * DIM, cos + row * cos_stride, sin + row * sin_stride,
                            offsets, ROTATE, DIM)  # fmt: skip
        tl.store(keys + slot_position * DIM + offsets, elements, mask=offsets < DIM)
        elements = tl.load(value + row * value_stride + head * VALUE_DIM + offsets, mask=offsets < VALUE_DIM)
        tl.store(values + slot_position * VALUE_DIM + offsets, elements, mask=offsets < VALUE_DIM)
    else:
        head -= KEY_HEADS
        target = (row * (tl.num_programs(1) - KEY_HEADS) + head) * DIM
        elements = _rotated(query + row * query_stride + head * DIM, cos + row * cos_stride, sin + row * sin_stride,
                            offsets, ROTATE, DIM)  # fmt: skip
        tl.store(rotated + target + offsets, elements, mask=offsets < DIM)


@triton.jit
def _rotated(x, cos, sin, offsets, ROTATE: tl.constexpr, DIM: tl.constexpr):
    """Load one head and rotate it, rounding as x * cos + cat(-x[half:], x[:half]) * sin does."""
    mask = offsets < DIM
    elements = tl.load(x + offsets, mask=mask, other=0.0)
    if ROTATE:
        dtype = elements.dtype
        half = DIM // 2
        is_first = offsets < half
        swapped = tl.load(x + tl.where(is_first, offsets + half, offsets - half), mask=mask, other=0.0).to(tl.float32)
        swapped = tl.where(is_first, -swapped, swapped)
        wave = tl.load(cos + offsets, mask=mask, other=0.0).to(tl.float32)
        cos_term = (elements.to(tl.float32) * wave).to(dtype).to(tl.float32)
        wave = tl.load(sin + offsets, mask=mask, other=0.0).to(tl.float32)
        elements = (cos_term + (swapped * wave).to(dtype).to(tl.float32)).to(dtype)
    return elements


@triton.jit
def _attend(
    query, keys, values, positions, parts, log_sums, sinks, num_positions, scale, cap, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, BLOCK: tl.constexpr,
    NUM_SPLITS: tl.constexpr, LOG2E: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Attend to one split of one row's positions, for the query heads of one key head.

    `scale` and the soft-cap `cap` include LOG2E. The first split includes the attention sinks. With several splits,
    `parts` receives the output of each split and `log_sums` the base-2 logarithm of its softmax sum, which
    `_merge` combines. With one split, `parts` receives the output of the row.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    stop = tl.load(positions + row).to(tl.int32) + 1
    first_position = tl.maximum(stop - WINDOW, 0) if WINDOW > 0 else 0
    # Splits depend only on the length of this row, so its result is bitwise independent of the other rows.
    split_size = tl.cdiv(tl.cdiv(stop - first_position, NUM_SPLITS), BLOCK) * BLOCK
    start = first_position + split * split_size
    end = tl.minimum(start + split_size, stop)

    group_index, offsets = tl.arange(0, PADDED_GROUP), tl.arange(0, DIMS)
    head = row * tl.num_programs(1) + tl.program_id(1)  # key head, numbered over all rows
    heads = head * GROUP + group_index  # query heads, numbered over all rows
    head_mask = (group_index < GROUP)[:, None]
    q = tl.load(query + heads[:, None] * DIM + offsets[None, :], mask=head_mask & (offsets < DIM)[None, :], other=0.0)
    keys += head * num_positions * DIM
    values += head * num_positions * VALUE_DIM
    row_max, row_sum = _first_sums(sinks, split, SINKS, GROUP, PADDED_GROUP, LOG2E)
    acc = tl.zeros([PADDED_GROUP, DIMS], tl.float32)
    for begin in range(start, end, BLOCK):
        indices = begin + tl.arange(0, BLOCK)
        valid = indices < end
        k = tl.load(
            keys + indices[None, :] * DIM + offsets[:, None], mask=valid[None, :] & (offsets < DIM)[:, None], other=0.0
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if CAPPED:
            scores = cap * (1.0 - 2.0 / (tl.exp2(scores / cap * (2.0 * LOG2E)) + 1.0))  # cap * tanh(scores / cap)
        scores = tl.where(valid[None, :], scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        rescale = tl.exp2(row_max - new_max)
        weights = tl.exp2(scores - new_max[:, None])
        v_mask = valid[:, None] & (offsets < VALUE_DIM)[None, :]
        v = tl.load(values + indices[:, None] * VALUE_DIM + offsets[None, :], mask=v_mask, other=0.0)
        acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        row_max = new_max

    target = heads * NUM_SPLITS + split
    out_mask = head_mask & (offsets < VALUE_DIM)[None, :]
    if NUM_SPLITS == 1:
        result = (acc / row_sum[:, None]).to(parts.dtype.element_ty)
        tl.store(parts + target[:, None] * VALUE_DIM + offsets[None, :], result, mask=out_mask)
    else:
        non_empty = end > start
        log_sum = tl.where(non_empty, row_max + tl.log2(row_sum), -float("inf"))
        tl.store(log_sums + target, log_sum, mask=group_index < GROUP)
        tl.store(
            parts + target[:, None] * VALUE_DIM + offsets[None, :], acc / row_sum[:, None], mask=out_mask & non_empty
        )


@triton.jit
def _first_sums(
    sinks, split, SINKS: tl.constexpr, GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, LOG2E: tl.constexpr
):
    """Return maximum and sum of an online softmax without keys. A sink is its first element, and has no value."""
    row_max = tl.full([PADDED_GROUP], -float("inf"), tl.float32)
    row_sum = tl.zeros([PADDED_GROUP], tl.float32)
    if SINKS:
        index = tl.arange(0, PADDED_GROUP)
        sink = tl.load(sinks + tl.program_id(1) * GROUP + index, mask=index < GROUP, other=0.0).to(tl.float32)
        row_max = tl.where(split == 0, sink * LOG2E, row_max)
        row_sum = tl.where(split == 0, 1.0, row_sum)
    return row_max, row_sum


@triton.jit
def _merge(
    parts, log_sums, out, VALUE_DIM: tl.constexpr, VALUE_DIMS: tl.constexpr, NUM_SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one row and query head. The first split is never empty."""
    head = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split, offsets = tl.arange(0, PADDED_SPLITS), tl.arange(0, VALUE_DIMS)
    log_sum = tl.load(log_sums + head * NUM_SPLITS + split, mask=split < NUM_SPLITS, other=-float("inf"))
    valid = (log_sum > -float("inf"))[:, None] & (offsets < VALUE_DIM)[None, :]
    part = tl.load(parts + (head * NUM_SPLITS + split)[:, None] * VALUE_DIM + offsets[None, :], mask=valid, other=0.0)
    weight = tl.exp2(log_sum - tl.max(log_sum, 0))
    result = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + head * VALUE_DIM + offsets, result.to(out.dtype.element_ty), mask=offsets < VALUE_DIM)
