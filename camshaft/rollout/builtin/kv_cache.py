"""Keys and values of unfinished rows: a slot for each row, and attention over the slots.

    pool = KVCache(hf.config, max_model_len=1024)
    pool.reserve(num_slots=65, length=128)
    hf(..., slots=PromptStep(pool, lengths, sources, targets, device))   # packed prompts -> slots
    hf(..., slots=TokenStep(pool, positions, length))                    # one token of each row, slots 0..B-1
    pool.copy(sources=[7], targets=[2], length=20)

A model built with the "packed" attention calls `attend` of the object given as `slots=` in each of its layers.
What shape keys and values have is learnt from the first call, so nothing here depends on the model's family.
"""

import itertools
import math
import mmap
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from camshaft.errors import RolloutError
from camshaft.models.attention import packed_attention, packed_kwargs
from camshaft.models.packing import Packing

GRAIN = 64
"""Slots have a multiple of this many places."""

SPAN = 16
"""Attention looks at a multiple of this many places: masks that are aligned suit the kernels."""

PAGE = 2**21
"""The size of a large page."""

LARGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
"""What asks the system for large pages, where it has them."""

Layer = tuple[Tensor, Tensor]
"""Keys and values, each (slots, heads, places, dim)."""


class KVCache:
    """The memory, one block for keys and one for values in each layer; grows, and is freed by `clear`."""

    def __init__(self, config: PretrainedConfig, max_model_len: int):
        text = config.get_text_config()
        values = text.to_dict()
        self.name = text.model_type
        self.num_layers: int = text.num_hidden_layers
        self.max_length = -(-max_model_len // GRAIN) * GRAIN
        window = values.get("sliding_window")
        types = values.get("layer_types") or ["sliding_attention"] * self.num_layers
        shorter = window is not None and window < max_model_len
        self.windows = [window if shorter and kind == "sliding_attention" else None for kind in types]
        self.layers: dict[int, Layer] = {}
        self.num_slots = self.length = 0
        self.changes = 0
        """How often slots have become other memory."""

    def reserve(self, num_slots: int, length: int, live: int | None = None) -> None:
        """Have at least so many slots of at least so many places.

        What the first `live` slots hold stays, and what slot `num_slots - 1` does; without `live`, what all of them do.
        On a CPU, memory that nobody has written to is none yet: late in a call few rows are live, and growing costs
        little.
        """
        if num_slots <= self.num_slots and length <= self.length:
            return
        if length > self.length:
            # Half as much again: each place is copied a few times at most while responses grow.
            self.length = min(-(-length * 3 // 2 // GRAIN) * GRAIN, self.max_length)
        held = [slice(None)] if live is None else [slice(live), slice(num_slots - 1, num_slots)]
        self.num_slots = max(self.num_slots, num_slots)
        self.changes += 1
        for index, (keys, values) in self.layers.items():
            self.layers[index] = self._larger(keys, held), self._larger(values, held)

    def _larger(self, old: Tensor, held: list[slice]) -> Tensor:
        new = _zeros((self.num_slots, old.shape[1], self.length, old.shape[3]), old)
        for slots in held:
            new[: len(old)][slots, :, : old.shape[2]] = old[slots]
        return new

    def layer(self, module: nn.Module, key: Tensor, value: Tensor) -> Layer:
        """The block of the layer that `module` belongs to, made for keys and values like these."""
        index: Any = module.layer_idx
        if index not in self.layers:
            self.layers[index] = (
                _zeros((self.num_slots, key.shape[1], self.length, key.shape[3]), key),
                _zeros((self.num_slots, value.shape[1], self.length, value.shape[3]), value),
            )
        return self.layers[index]

    def check_window(self, module: nn.Module, window: int | None) -> None:
        """Refuse a layer that the config gives a window which the layer does not pass on."""
        index: Any = module.layer_idx
        if self.windows[index] is not None and self.windows[index] != window:
            raise RolloutError(
                f"layer {index} of {self.name} has a sliding window of {self.windows[index]} tokens, but tells its "
                f"attention {window}; set max_model_len to at most the window, or generate with rollout.name=hf"
            )

    def check_layers(self) -> None:
        """Refuse a model in which not every layer came here: the others would forget the tokens before."""
        if len(self.layers) != self.num_layers:
            raise RolloutError(
                f"{self.name} has {self.num_layers} layers, of which {len(self.layers)} use plain attention; "
                "generate with rollout.name=hf"
            )

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """The first `length` places of slots `sources` also to slots `targets`; no slot is in both."""
        blocks = list(itertools.chain(*self.layers.values()))
        if targets.device.type == "cpu":  # elsewhere, two kernels for all slots are faster than one for each
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                for block in blocks:
                    block[target].narrow(1, 0, length).copy_(block[source].narrow(1, 0, length))
            return
        for block in blocks:
            block[targets, :, :length] = block[sources, :, :length]

    def clear(self) -> None:
        """Free the memory."""
        self.layers.clear()
        self.num_slots = self.length = 0
        self.changes += 1


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros, since a masked place must not hold what is not a number; on the CPU in large pages if there are any.

    Attention runs through all of it once a step, and with small pages a good part of its time goes into finding them.
    """
    count = math.prod(shape)
    size = count * like.element_size()
    if like.device.type != "cpu" or size < PAGE or LARGE_PAGES is None:
        return like.new_zeros(shape)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(LARGE_PAGES)
    return torch.frombuffer(memory, dtype=like.dtype, count=count).view(shape)


class PromptStep:
    """One model call on packed prompts; the keys and values of prompt sources[i] go to slot targets[i]."""

    def __init__(
        self, pool: KVCache, lengths: list[int], sources: Sequence[int], targets: Sequence[int], device: torch.device
    ):
        self.pool = pool
        self.kwargs = packed_kwargs(Packing(lengths), device)
        self.copies: list[tuple[slice, slice]] | None = None
        if device.type == "cpu":  # elsewhere, two kernels for all rows are faster than two for each run of slots
            stops = list(itertools.accumulate(lengths))
            self.copies = []
            for source, target in zip(sources, targets, strict=True):
                span = slice(stops[source] - lengths[source], stops[source])
                run, last = self.copies[-1] if self.copies else (slice(0, 0), None)
                if span == last and run.stop == target:
                    self.copies[-1] = slice(run.start, target + 1), span
                else:
                    self.copies.append((slice(target, target + 1), span))
            return
        sizes = torch.tensor(lengths)
        starts = (sizes.cumsum(0) - sizes)[sources]
        copied = sizes[sources]
        positions = torch.arange(int(copied.sum())) - torch.repeat_interleave(copied.cumsum(0) - copied, copied)
        self.positions = positions.to(device)
        self.tokens = (positions + torch.repeat_interleave(starts, copied)).to(device)
        self.slots = torch.repeat_interleave(torch.tensor(targets), copied).to(device)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Attention inside each prompt; see `camshaft.models.attention.Slots`."""
        self.pool.check_window(module, sliding_window)
        keys, values = self.pool.layer(module, key, value)
        if self.copies is not None:
            for run, span in self.copies:
                keys[run, :, : span.stop - span.start] = key[0, :, span]
                values[run, :, : span.stop - span.start] = value[0, :, span]
        else:
            keys[self.slots, :, self.positions] = key[0].transpose(0, 1)[self.tokens]
            values[self.slots, :, self.positions] = value[0].transpose(0, 1)[self.tokens]
        mixed, _ = packed_attention(
            module, query, key, value, scaling=scaling, sliding_window=sliding_window, **self.kwargs
        )
        return mixed


class TokenStep:
    """One model call on one token of each row; the row in slot i has its token at positions[i]."""

    def __init__(self, pool: KVCache, positions: Tensor, length: int):
        self.pool = pool
        self.positions = positions
        self.rows = torch.arange(len(positions), device=positions.device)
        self.length = min(-(-length // SPAN) * SPAN, pool.length)
        self.stride = pool.length
        self.masks: dict[int | None, Tensor] = {}
        self.places: dict[int, Tensor] = {}

    def went_on(self, length: int) -> bool:
        """Make this the step of the next tokens of the same rows, whose `positions` have grown by one since, in place.

        False if it cannot be: a mask has too few places, or a window's must let go of one, or the slots are others.
        """
        if length > self.length or self.stride != self.pool.length or self.masks.keys() - {None}:
            return False
        for places in self.places.values():
            places += 1
        for mask in self.masks.values():
            mask.view(len(mask), -1).scatter_(1, self.positions[:, None], 0.0)
        return True

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Attention of each new token over the places of its slot; see `camshaft.models.attention.Slots`."""
        keys, values = self.pool.layer(module, key, value)
        places = self._places(key.shape[1])
        keys.view(-1, keys.shape[3]).index_copy_(0, places, key.reshape(-1, keys.shape[3]))
        values.view(-1, values.shape[3]).index_copy_(0, places, value.reshape(-1, values.shape[3]))
        num_rows, num_heads, _, dim = query.shape
        # The query heads that share a key head stand in for a longer query: no key is repeated.
        grouped = query.reshape(num_rows, key.shape[1], -1, dim)
        mixed = F.scaled_dot_product_attention(
            grouped,
            keys.as_strided((num_rows, keys.shape[1], self.length, keys.shape[3]), keys.stride()),
            values.as_strided((num_rows, values.shape[1], self.length, values.shape[3]), values.stride()),
            attn_mask=self._mask(sliding_window, query.dtype),
            scale=scaling,
        )
        return mixed.reshape(num_rows, 1, num_heads, -1)

    def _places(self, num_heads: int) -> Tensor:
        """(B * heads,) where the new keys go in a block seen as one list of places; made once for all layers."""
        if num_heads not in self.places:
            heads = self.rows[:, None] * num_heads + torch.arange(num_heads, device=self.rows.device)
            self.places[num_heads] = (heads * self.pool.length + self.positions[:, None]).flatten()
        return self.places[num_heads]

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """(B, 1, 1, places) zero for what a token sees, -inf for the rest; made once for all layers."""
        if window not in self.masks:
            distance = self.positions[:, None] - torch.arange(self.length, device=self.positions.device)
            hidden = distance < 0
            if window is not None:
                hidden |= distance >= window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            self.masks[window] = mask[:, None, None]
        return self.masks[window]
