"""KV cache and recurrent states of unfinished rows, with one slot per row, and the layers that read the slots.

    cache = KVCache(hf.config, max_model_len=1024)
    cache.reserve(num_slots=65, length=128)
    hf(..., slots=PrefillStep(cache, lengths, sources, targets, device))   # packed prompts, written to slots
    hf(..., slots=DecodeStep(cache, positions, length))                    # one token per row in slots 0..B-1
    cache.copy(sources=[7], targets=[2], length=20)

A model built with the "packed" attention calls `slots.attend` in each layer, and `slots.recur` in a layer with a
recurrent state. The first call determines the shapes, so this module contains no code for particular model families.
"""

import itertools
import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from camshaft.errors import RolloutError
from camshaft.models.attention import layer_window, packed_attention, packed_kwargs
from camshaft.models.blockwise import Scores, cap_scores
from camshaft.models.packing import Packing
from camshaft.models.recurrent import RecurrentLayer, RowBatch, States, map_rows

LENGTH_MULTIPLE = 64
"""Granularity of the number of positions per slot."""

ATTENTION_MULTIPLE = 16
"""Granularity of the number of positions that attention reads. Kernels prefer aligned masks."""

PAGE = 2**21
"""Size of a huge page in bytes."""

LARGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
"""Flag of madvise for huge pages, or None if the system has none."""

Layer = tuple[Tensor, Tensor]
"""Keys and values of one layer, each of shape (slots, heads, positions, dim)."""


class KVCache:
    """Growable cache with the keys and values, or the recurrent states, of each layer. `clear` frees the memory."""

    def __init__(self, config: PretrainedConfig, max_model_len: int):
        text_config = config.get_text_config()
        self.name = text_config.model_type
        self.num_layers: int = text_config.num_hidden_layers
        self.max_length = _round_up(max_model_len)
        windows = [layer_window(text_config, layer) for layer in range(self.num_layers)]
        self.windows = [None if window is None or window >= max_model_len else window for window in windows]
        self.layers: dict[int, Layer] = {}
        self.states: dict[tuple[int, str], Tensor] = {}
        """States by layer and name, each (slots, ...)."""
        self.position_bytes: dict[int, int] = {}
        """Bytes of one position of a slot, by layer. A layer's first use sets it, and `clear` keeps it."""
        self.state_bytes: dict[tuple[int, str], int] = {}
        """Bytes of a state of a slot, like `position_bytes`."""
        self.num_slots = self.length = 0
        self.reallocations = 0
        """Number of reallocations so far. A CUDA graph is valid until the next reallocation."""

    @property
    def num_bytes(self) -> int:
        """Size of all keys, values and states in bytes."""
        blocks = itertools.chain(*self.layers.values(), self.states.values())
        return sum(block.nbytes for block in blocks)

    def allocate(self, num_rows: int, length: int, max_bytes: int, row_bytes: int, keep: bool = False) -> int:
        """Allocate slots of `length` positions in `max_bytes`, and return the number of rows, at most `num_rows`.

        There is one additional slot, and each row needs `row_bytes` besides its slot. The cache then does not grow, so
        CUDA graphs stay valid. No slot may be in use, and `position_bytes` must be known.

        With `keep`, CUDA graphs also stay valid after small changes of `length` and `max_bytes`: both sizes are
        rounded, and slots stay that suffice for 7/8 of the rows that fit.
        """
        length = _round_up(length)

        def slot_bytes(positions: int) -> int:
            return positions * sum(self.position_bytes.values()) + sum(self.state_bytes.values())

        def fitting_rows(positions: int) -> int:
            size = slot_bytes(positions)
            return min(num_rows, (max_bytes - size) // (size + row_bytes))

        num_fitting = fitting_rows(length)
        if num_fitting < 1:
            size = 2 * slot_bytes(length) + row_bytes
            raise RolloutError(
                f"the KV cache of one row of {length} tokens requires {_gib(size)} of device "
                f"memory, but {_gib(max(max_bytes, 0))} are available; increase rollout.gpu_memory_utilization, "
                "decrease the maximum prompt and response lengths, or offload the actor"
            )
        if keep:
            num_kept = min(num_rows, self.num_slots - 1)
            size = self.num_slots * slot_bytes(self.length) + num_kept * row_bytes
            # Only missing memory is a reason for fewer rows.
            is_limited = num_fitting < num_rows
            if self.length >= length and size <= max_bytes and 8 * num_kept >= (7 if is_limited else 8) * num_fitting:
                return num_kept
            num_fitting = _round_coarsely(num_fitting) if is_limited else num_fitting
            longer = min(_round_up(length, max(_grain(length), LENGTH_MULTIPLE)), self.max_length)
            length = longer if fitting_rows(longer) >= num_fitting else length
        max_cache_bytes = max_bytes - num_fitting * row_bytes
        num_slots, longest = max(self.num_slots, num_fitting + 1), max(self.length, length)
        if num_slots * slot_bytes(longest) > max_cache_bytes:
            num_slots, longest = num_fitting + 1, length
        if (num_slots, longest) != (self.num_slots, self.length):
            self.clear()
            self.num_slots, self.length = num_slots, longest
        return num_fitting

    def reserve(self, num_slots: int, length: int, live: int | None = None) -> None:
        """Grow to at least `num_slots` slots of at least `length` positions each.

        Without `live`, growing copies all slots. With `live`, it copies only the first `live` slots and slot
        `num_slots - 1`. A CPU commits only pages that are written, so growing late in a call, when few rows are live,
        is cheap.
        """
        if num_slots <= self.num_slots and length <= self.length:
            return
        if length > self.length:
            # Growing by half limits the number of times that a position is copied while responses grow.
            self.length = min(_round_up(-(-length * 3 // 2)), self.max_length)
        kept_slots = [slice(None)] if live is None else [slice(live), slice(num_slots - 1, num_slots)]
        self.num_slots = max(self.num_slots, num_slots)
        self.reallocations += 1
        for index, (keys, values) in self.layers.items():
            self.layers[index] = self._grow(keys, kept_slots), self._grow(values, kept_slots)
        self.states = {key: self._grow_state(state, kept_slots) for key, state in self.states.items()}

    def _grow_state(self, old: Tensor, kept_slots: list[slice]) -> Tensor:
        new = old.new_zeros(self.num_slots, *old.shape[1:])
        for slots in kept_slots:
            new[: len(old)][slots] = old[slots]
        return new

    def _grow(self, old: Tensor, kept_slots: list[slice]) -> Tensor:
        new = _zeros(self.num_slots, self.length, old)
        for slots in kept_slots:
            new[: len(old)][slots, :, : old.shape[2]] = old[slots]
        return new

    def layer(self, module: nn.Module, key: Tensor, value: Tensor) -> Layer:
        """Return the keys and values of `module`'s layer. The first call allocates them to match `key` and `value`."""
        index: Any = module.layer_idx
        if index not in self.layers:
            self.position_bytes[index] = sum(x.shape[1] * x.shape[3] * x.element_size() for x in (key, value))
            self.layers[index] = _zeros(self.num_slots, self.length, key), _zeros(self.num_slots, self.length, value)
        return self.layers[index]

    def layer_states(self, layer: RecurrentLayer, like: States) -> States:
        """Return the states of a layer. The first call allocates them to match `like`, each (rows, ...)."""
        for name, state in like.items():
            if (key := (layer.layer_idx, name)) not in self.states:
                self.state_bytes[key] = state[0].nbytes
                self.states[key] = state.new_zeros(self.num_slots, *state.shape[1:])
        return {name: self.states[layer.layer_idx, name] for name in like}

    def advance(self, layer: RecurrentLayer, hidden_states: Tensor) -> Tensor:
        """Compute the next token (B, 1, H) of the rows in slots 0..B-1, and update their states."""
        rows, index = len(hidden_states), layer.layer_idx
        states = {name: state[:rows] for (owner, name), state in self.states.items() if owner == index}
        return layer.advance(hidden_states, None, states)[0]

    @contextmanager
    def unchanged_states(self, num_slots: int) -> Iterator[None]:
        """Restore the states of the first `num_slots` slots on exit."""
        saved = [(state, state[:num_slots].clone()) for state in self.states.values()]
        try:
            yield
        finally:
            for state, copy in saved:
                state[:num_slots].copy_(copy)

    def check_window(self, module: nn.Module, window: int | None) -> None:
        """Reject a layer that does not pass the sliding window of its config to its attention."""
        index: Any = module.layer_idx
        if self.windows[index] is not None and self.windows[index] != window:
            raise RolloutError(
                f"layer {index} of {self.name} has a sliding window of {self.windows[index]} tokens but passes "
                f"{window} to its attention; set max_model_len to at most {self.windows[index]}, or set rollout.name=hf"
            )

    def check_layers(self) -> None:
        """Reject a model if a layer does not use the cache, because the layer would ignore earlier tokens."""
        num_used = len(self.layers.keys() | {index for index, _ in self.states})
        if num_used != self.num_layers:
            raise RolloutError(
                f"{self.name} has {self.num_layers} layers, of which {num_used} use the KV cache; set rollout.name=hf"
            )

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the states and the first `length` positions of slots `sources` to slots `targets`.

        No slot may be in both.
        """
        for state in self.states.values():
            state[targets] = state[sources]
        blocks = list(itertools.chain(*self.layers.values()))
        if targets.device.type == "cpu":  # on a GPU, indexed copies launch fewer kernels
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                for block in blocks:
                    block[target].narrow(1, 0, length).copy_(block[source].narrow(1, 0, length))
            return
        for block in blocks:
            block[targets, :, :length] = block[sources, :, :length]

    def clear(self) -> None:
        """Free the memory."""
        self.layers.clear()
        self.states.clear()
        self.num_slots = self.length = 0
        self.reallocations += 1


def _round_up(length: int, multiple: int = LENGTH_MULTIPLE) -> int:
    return -(-length // multiple) * multiple


def _grain(number: int) -> int:
    """Return the power of two that is between an eighth and a sixteenth of a number, at least 1."""
    return max(1, 1 << (number.bit_length() - 4))


def _round_coarsely(number: int) -> int:
    """Round a number down by less than an eighth."""
    return number // _grain(number) * _grain(number)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


def _zeros(num_slots: int, length: int, like: Tensor) -> Tensor:
    """Allocate keys or values of a layer, with the heads and dim of `like` (..., heads, positions, dim).

    They are zeros, because masked positions must not contain NaN. Large tensors on a CPU use huge pages. Attention
    reads the entire cache in each step and would spend much of its time on TLB misses with small pages.
    """
    shape = num_slots, like.shape[1], length, like.shape[3]
    count = math.prod(shape)
    size = count * like.element_size()
    if like.device.type != "cpu" or size < PAGE or LARGE_PAGES is None:
        return like.new_zeros(shape)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(LARGE_PAGES)
    return torch.frombuffer(memory, dtype=like.dtype, count=count).view(shape)


class PrefillStep:
    """A model call on packed prompts. It writes keys, values and states of prompt sources[i] to slot targets[i]."""

    def __init__(
        self, cache: KVCache, lengths: list[int], sources: Sequence[int], targets: Sequence[int], device: torch.device
    ):
        self.cache = cache
        self.sources, self.targets = sources, targets
        self.kwargs = packed_kwargs(Packing(lengths), device)
        self.attended: set[int] = set()
        """Indices of the layers that have attended."""
        self.copies: list[tuple[slice, slice]] | None = None
        if device.type == "cpu":  # on a GPU, indexed writes launch fewer kernels
            stops = list(itertools.accumulate(lengths))
            self.copies = []
            for source, target in zip(sources, targets, strict=True):
                span = slice(stops[source] - lengths[source], stops[source])
                slots, previous_span = self.copies[-1] if self.copies else (slice(0, 0), None)
                if span == previous_span and slots.stop == target:
                    self.copies[-1] = slice(slots.start, target + 1), span
                else:
                    self.copies.append((slice(target, target + 1), span))
            return
        sizes = torch.tensor(lengths)
        starts = (sizes.cumsum(0) - sizes)[sources]
        counts = sizes[sources]
        positions = torch.arange(int(counts.sum())) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        self.positions = positions.to(device)
        self.tokens = (positions + torch.repeat_interleave(starts, counts)).to(device)
        self.slots = torch.repeat_interleave(torch.tensor(targets), counts).to(device)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores, sinks: Tensor | None
    ) -> Tensor:
        """Compute attention within each prompt; see `camshaft.models.attention.Slots`."""
        self.cache.check_window(module, scores.window)
        index: Any = module.layer_idx
        if index in self.attended:
            raise RolloutError(
                f"layer {index} of {self.cache.name} attends twice in one model call, but the KV cache stores one pair "
                "of keys and values per layer; set rollout.name=hf"
            )
        self.attended.add(index)
        keys, values = self.cache.layer(module, key, value)
        if self.copies is not None:
            for slots, span in self.copies:
                keys[slots, :, : span.stop - span.start] = key[0, :, span]
                values[slots, :, : span.stop - span.start] = value[0, :, span]
        else:
            keys[self.slots, :, self.positions] = key[0].transpose(0, 1)[self.tokens]
            values[self.slots, :, self.positions] = value[0].transpose(0, 1)[self.tokens]
        output, _ = packed_attention(
            module,
            query,
            key,
            value,
            scaling=scores.scale,
            sliding_window=scores.window,
            softcap=scores.softcap,
            s_aux=sinks,
            **self.kwargs,
        )
        return output

    def recur(self, layer: RecurrentLayer, hidden_states: Tensor) -> Tensor:
        """Compute a layer from an empty state for each prompt; see `camshaft.models.attention.Slots`."""
        copies = list(zip(self.sources, self.targets, strict=True))

        def advance(hidden: Tensor, batch: RowBatch) -> Tensor:
            output, states = layer.advance(hidden, batch.mask, None)
            place_of = {row: place for place, row in enumerate(batch.rows)}
            pairs = [(place_of[source], target) for source, target in copies if source in place_of]
            places, slots = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T.to(hidden.device)
            for name, state in self.cache.layer_states(layer, states).items():
                state[slots] = states[name][places]
            return output

        return map_rows(hidden_states, self.kwargs["packing"], advance)


class DecodeStep:
    """A model call on one token per row. The token of the row in slot i has position positions[i]."""

    def __init__(self, cache: KVCache, positions: Tensor, length: int):
        self.cache = cache
        self.positions = positions
        self.rows = torch.arange(len(positions), device=positions.device)
        self.length = min(-(-length // ATTENTION_MULTIPLE) * ATTENTION_MULTIPLE, cache.length)
        self.stride = cache.length
        self.masks: dict[int | None, Tensor] = {}
        self.indices: dict[int, Tensor] = {}

    def advance(self, length: int) -> bool:
        """Advance to the next token of the same rows. The caller has incremented `positions` in place.

        Return False if the caller must create a new step: if the mask is too short, a sliding window moves, or the
        cache has grown.
        """
        if length > self.length or self.stride != self.cache.length or self.masks.keys() - {None}:
            return False
        for indices in self.indices.values():
            indices += 1
        for mask in self.masks.values():
            mask.view(len(mask), -1).scatter_(1, self.positions[:, None], 0.0)
        return True

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores, sinks: Tensor | None
    ) -> Tensor:
        """Compute attention of each new token over its row's slot; see `camshaft.models.attention.Slots`."""
        keys, values = self.cache.layer(module, key, value)
        indices = self._indices(key.shape[1])
        keys.view(-1, keys.shape[3]).index_copy_(0, indices, key.reshape(-1, keys.shape[3]))
        values.view(-1, values.shape[3]).index_copy_(0, indices, value.reshape(-1, values.shape[3]))
        num_rows, num_heads, _, dim = query.shape
        # Query heads that share a key head form one longer query, so keys are not repeated.
        grouped_query = query.reshape(num_rows, key.shape[1], -1, dim)
        keys = keys.as_strided((num_rows, keys.shape[1], self.length, keys.shape[3]), keys.stride())
        values = values.as_strided((num_rows, values.shape[1], self.length, values.shape[3]), values.stride())
        mask = self._mask(scores.window, query.dtype)
        if scores.softcap is None and sinks is None:
            output = F.scaled_dot_product_attention(grouped_query, keys, values, attn_mask=mask, scale=scores.scale)
        else:
            output = masked_attention(grouped_query, keys, values, mask, scores, sinks)
        return output.reshape(num_rows, 1, num_heads, -1)

    def recur(self, layer: RecurrentLayer, hidden_states: Tensor) -> Tensor:
        return self.cache.advance(layer, hidden_states)

    def _indices(self, num_heads: int) -> Tensor:
        """Return the flat indices (B * heads,) of the new keys in a layer's tensor. All layers share them."""
        if num_heads not in self.indices:
            heads = self.rows[:, None] * num_heads + torch.arange(num_heads, device=self.rows.device)
            self.indices[num_heads] = (heads * self.cache.length + self.positions[:, None]).flatten()
        return self.indices[num_heads]

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the mask (B, 1, 1, positions), 0 for visible and -inf for hidden positions. All layers share it."""
        if window not in self.masks:
            distance = self.positions[:, None] - torch.arange(self.length, device=self.positions.device)
            is_hidden = distance < 0
            if window is not None:
                is_hidden |= distance >= window
            mask = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
            mask.masked_fill_(is_hidden, -torch.inf)
            self.masks[window] = mask[:, None, None]
        return self.masks[window]


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores, sinks: Tensor | None
) -> Tensor:
    """Compute attention with soft-caps and sinks: (B, Hkv, G, D) and (B, Hkv, L, D) -> (B, Hkv, G, Dv).

    G query heads share a key head. `mask` is added to the scores, and the softmax is computed in float32 or wider.
    """
    z = (query * scores.scale @ key.transpose(2, 3)).to(torch.promote_types(query.dtype, torch.float32))
    z = cap_scores(z, scores.softcap).add_(mask)
    if sinks is None:
        return z.softmax(dim=-1).to(value.dtype) @ value
    column = sinks.to(z.dtype).view(1, key.shape[1], -1, 1).expand(len(z), -1, -1, 1)
    weights = torch.cat([z, column], dim=-1).softmax(dim=-1)[..., :-1]
    return weights.to(value.dtype) @ value
