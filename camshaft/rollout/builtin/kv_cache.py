"""KV cache and recurrent states of unfinished rows, with one slot per row.

    cache = KVCache(hf.config, max_model_len=1024)
    cache.reserve(num_slots=65, length=128)
    hf(..., slots=DecodeStep(cache, positions, classes))    # the model calls of `steps.py` read and write the slots
    cache.copy(sources=[7], targets=[2], lengths=[20])
    row = cache.read(2, 20)                                 # a copy of a row, which needs no slot
    cache.write(0, row)

The first model call determines the shapes, so this module contains no code for particular model families.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from camshaft.errors import RolloutError
from camshaft.models.attention import layer_window
from camshaft.models.recurrent import RecurrentLayer, States
from camshaft.rollout.builtin.cpu import pages

LENGTH_MULTIPLE = 64
"""Granularity of the number of positions per slot."""

MAX_HUGE_PAGE_BYTES = 2**26
"""Maximum size of the keys and values of a cache with huge pages, in bytes. In larger ones, each row has pages of its
own, so that unused positions need no memory. Huge pages save time only in small ones."""

Layer = tuple[Tensor, Tensor]
"""Keys and values of one layer, each of shape (slots, heads, positions, dim)."""


@dataclass(frozen=True)
class CachedRow:
    """Copy of the keys, values and states of one row."""

    layers: dict[int, Layer]
    """Keys and values of each layer, (heads, positions, dim)."""
    states: dict[tuple[int, str], Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for block in itertools.chain(*self.layers.values(), self.states.values()))


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
        self._used: dict[int, int] = {}
        """Number of positions of a slot that had memory at the last `trim`."""
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

    def fits(self, num_slots: int, length: int) -> bool:
        return num_slots <= self.num_slots and length <= self.length

    def reserve(self, num_slots: int, length: int, live: Sequence[int] | None = None, last: int = 0) -> None:
        """Grow to at least `num_slots` slots of at least `length` positions each.

        Without `live`, growing copies all slots. With the lengths of the live rows, it copies only their positions in
        the first slots, and `last` positions of slot `num_slots - 1`. A CPU commits only pages that are written, so
        growing late in a call, when few rows are live, is cheap.
        """
        if self.fits(num_slots, length):
            return
        if length > self.length:
            # Growing by half limits the number of times that a position is copied while responses grow.
            self.length = min(_round_up(-(-length * 3 // 2)), self.max_length)
        kept: list[tuple[slice, int | None]] = [(slice(None), None)]
        if live is not None:
            kept = [(slice(slot, slot + 1), length) for slot, length in enumerate(live)]
            kept.append((slice(num_slots - 1, num_slots), last))
        self.num_slots = max(self.num_slots, num_slots)
        self.reallocations += 1
        self._used.clear()
        for index, (keys, values) in self.layers.items():
            self.layers[index] = self._grow(keys, kept), self._grow(values, kept)
        for key, old in self.states.items():
            self.states[key] = new = old.new_zeros(self.num_slots, *old.shape[1:])
            for slots, _ in kept:
                new[: len(old)][slots] = old[slots]

    def _grow(self, old: Tensor, kept: list[tuple[slice, int | None]]) -> Tensor:
        new = self._zeros(old)
        for slots, length in kept:
            new[: len(old)][slots, :, : old.shape[2]][:, :, :length] = old[slots, :, :length]
        return new

    def layer(self, module: nn.Module, key: Tensor, value: Tensor) -> Layer:
        """Return the keys and values of `module`'s layer. The first call allocates them to match `key` and `value`."""
        index: Any = module.layer_idx
        return self._layer(index, key, value)

    def _layer(self, index: int, key: Tensor, value: Tensor) -> Layer:
        if index not in self.layers:
            self.position_bytes[index] = sum(x.shape[1] * x.shape[3] * x.element_size() for x in (key, value))
            self.layers[index] = self._zeros(key), self._zeros(value)
        return self.layers[index]

    def _zeros(self, like: Tensor) -> Tensor:
        """Allocate keys or values of a layer, with the heads and dim of `like` (..., heads, positions, dim).

        They are zeros, because masked positions must not contain NaN. On a CPU, small caches use huge pages. Attention
        would otherwise spend some of its time on TLB misses.
        """
        shape = self.num_slots, like.shape[1], self.length, like.shape[3]
        return pages.zeros(shape, like, self._has_huge_pages(like))

    def _has_huge_pages(self, like: Tensor) -> bool:
        size = self.num_slots * self.length * like.shape[1] * like.shape[3] * like.element_size()
        return 2 * self.num_layers * size <= MAX_HUGE_PAGE_BYTES

    def trim(self, lengths: Sequence[int]) -> None:
        """Return the memory behind the positions of the first slots to the system, unless the cache has huge pages.

        `lengths` are the numbers of positions that these slots still need.
        """
        blocks = [block for block in itertools.chain(*self.layers.values()) if not self._has_huge_pages(block)]
        if not blocks:
            return
        for slot, length in enumerate(lengths):
            if self._used.get(slot, 0) - length >= LENGTH_MULTIPLE:
                for block in blocks:
                    for head in block[slot]:
                        pages.release(head[length:])
                self._used[slot] = length
            self._used[slot] = max(self._used.get(slot, 0), length)

    def layer_states(self, layer: RecurrentLayer, like: States) -> States:
        """Return the states of a layer. The first call allocates them to match `like`, each (rows, ...)."""
        return {name: self._state((layer.layer_idx, name), state) for name, state in like.items()}

    def _state(self, key: tuple[int, str], like: Tensor) -> Tensor:
        if key not in self.states:
            self.state_bytes[key] = like[0].nbytes
            self.states[key] = like.new_zeros(self.num_slots, *like.shape[1:])
        return self.states[key]

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

    def check_call(self, module: nn.Module, window: int | None, attended: set[int]) -> None:
        """Reject a layer that ignores the sliding window of its config, or attends twice in one model call.

        `attended` contains the layers that have attended in this call. The layer is added to it.
        """
        self.check_window(module, window)
        index: Any = module.layer_idx
        if index in attended:
            raise RolloutError(
                f"layer {index} of {self.name} attends twice in one model call, but the KV cache stores one pair "
                "of keys and values per layer; set rollout.name=hf"
            )
        attended.add(index)

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

    def copy(self, sources: Tensor, targets: Tensor, lengths: Tensor) -> None:
        """Copy the states and the first lengths[i] positions of slot sources[i] to slot targets[i].

        No slot may be in both.
        """
        for state in self.states.values():
            state[targets] = state[sources]
        blocks = list(itertools.chain(*self.layers.values()))
        if targets.device.type == "cpu":  # on a GPU, indexed copies launch fewer kernels
            for source, target, length in zip(sources.tolist(), targets.tolist(), lengths.tolist(), strict=True):
                for block in blocks:
                    block[target].narrow(1, 0, length).copy_(block[source].narrow(1, 0, length))
            return
        longest = int(lengths.max())
        for block in blocks:
            block[targets, :, :longest] = block[sources, :, :longest]

    def permute(self, sources: list[int], targets: list[int], lengths: list[int]) -> None:
        """Move rows of some lengths from slots `sources` to slots `targets`, which are the same in another order."""
        for state in self.states.values():
            state[targets] = state[sources]
        for block in itertools.chain(*self.layers.values()):
            rows = [block[source, :, :length].clone() for source, length in zip(sources, lengths, strict=True)]
            for target, row in zip(targets, rows, strict=True):
                block[target, :, : row.shape[1]] = row

    def read(self, slot: int, length: int) -> CachedRow:
        """Return a copy of the states and the first `length` positions of a slot."""
        layers = {
            index: (keys[slot, :, :length].clone(), values[slot, :, :length].clone())
            for index, (keys, values) in self.layers.items()
        }
        return CachedRow(layers, {key: state[slot].clone() for key, state in self.states.items()})

    def write(self, slot: int, row: CachedRow, length: int) -> None:
        """Write the states and the first `length` positions of a copied row to a slot."""
        for index, blocks in row.layers.items():
            for block, copied in zip(self._layer(index, *(b[None] for b in blocks)), blocks, strict=True):
                block[slot, :, :length] = copied[:, :length]
        for key, state in row.states.items():
            self._state(key, state[None])[slot] = state

    def clear(self) -> None:
        """Free the memory."""
        self.layers.clear()
        self.states.clear()
        self._used.clear()
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
