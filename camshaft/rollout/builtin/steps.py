"""Model calls on the KV cache: prompts, new tokens behind cached ones, and one token per row.

    hf(..., slots=PrefillStep(cache, lengths, sources, targets, device))    # packed prompts, written to slots
    hf(..., slots=ExtendStep(cache, lengths, starts, first_slot, device))   # packed tokens behind those of slots
    hf(..., slots=DecodeStep(cache, positions, [(B, length)]))              # one token per row in slots 0..B-1

`ExtendStep` is in `extend.py`. A model built with the "packed" attention calls `slots.attend` in each layer, and
`slots.recur` in a layer with a recurrent state.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from camshaft.models.attention import packed_attention, packed_kwargs
from camshaft.models.blockwise import Scores, cap_scores
from camshaft.models.packing import Packing
from camshaft.models.recurrent import RecurrentLayer, RowBatch, map_rows
from camshaft.rollout.builtin.kv_cache import KVCache

ATTENTION_MULTIPLE = 16
"""Granularity of the number of positions that attention reads. Kernels prefer aligned masks."""

LengthClass = tuple[int, int]
"""Rows in adjacent slots that have similar numbers of positions: their number, and the highest number of positions."""


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
        self.cache.check_call(module, scores.window, self.attended)
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

    def __init__(self, cache: KVCache, positions: Tensor, classes: Sequence[LengthClass]):
        self.cache = cache
        self.positions = positions
        self.rows = torch.arange(len(positions), device=positions.device)
        self.spans = _spans(classes, cache.length)
        self.stride = cache.length
        self.masks: dict[int | None, list[Tensor]] = {}
        self.indices: dict[int, Tensor] = {}

    def advance(self, lengths: Sequence[int]) -> bool:
        """Advance to the next token of the same rows. The caller has incremented `positions` in place.

        Return False if the caller must create a new step: if the mask of a class is too short, given the new lengths
        of all classes, a sliding window moves, or the cache has grown.
        """
        is_long = any(length > limit for length, (_, limit) in zip(lengths, self.spans, strict=True))
        if is_long or self.stride != self.cache.length or self.masks.keys() - {None}:
            return False
        for indices in self.indices.values():
            indices += 1
        for masks in self.masks.values():
            for mask, (rows, _) in zip(masks, self.spans, strict=True):
                mask.view(len(mask), -1).scatter_(1, self.positions[rows, None], 0.0)
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
        outputs = [
            masked_attention(grouped_query[rows], keys[rows, :, :length], values[rows, :, :length], mask, scores, sinks)
            for (rows, length), mask in zip(self.spans, self._masks(scores.window, query.dtype), strict=True)
        ]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output.reshape(num_rows, 1, num_heads, -1)

    def recur(self, layer: RecurrentLayer, hidden_states: Tensor) -> Tensor:
        return self.cache.advance(layer, hidden_states)

    def _indices(self, num_heads: int) -> Tensor:
        """Return the flat indices (B * heads,) of the new keys in a layer's tensor. All layers share them."""
        if num_heads not in self.indices:
            heads = self.rows[:, None] * num_heads + torch.arange(num_heads, device=self.rows.device)
            self.indices[num_heads] = (heads * self.cache.length + self.positions[:, None]).flatten()
        return self.indices[num_heads]

    def _masks(self, window: int | None, dtype: torch.dtype) -> list[Tensor]:
        """Return the masks (rows, 1, 1, positions), 0 for visible and -inf for hidden positions. Layers share them."""
        if window not in self.masks:
            self.masks[window] = [
                causal_mask(self.positions[rows], length, window, dtype)[:, None, None] for rows, length in self.spans
            ]
        return self.masks[window]


def _spans(classes: Sequence[LengthClass], limit: int) -> list[tuple[slice, int]]:
    """Return the slots of each class, and the number of positions that its attention reads, at most `limit`."""
    stops = list(itertools.accumulate(rows for rows, _ in classes))
    return [
        (slice(stop - rows, stop), min(-(-length // ATTENTION_MULTIPLE) * ATTENTION_MULTIPLE, limit))
        for stop, (rows, length) in zip(stops, classes, strict=True)
    ]


def causal_mask(positions: Tensor, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the mask (..., length) of tokens at `positions`, 0 for visible and -inf for hidden positions."""
    distance = positions[..., None] - torch.arange(length, device=positions.device)
    is_hidden = distance < 0
    if window is not None:
        is_hidden |= distance >= window
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
    return mask.masked_fill_(is_hidden, -torch.inf)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores, sinks: Tensor | None
) -> Tensor:
    """Compute attention: (B, Hkv, G, D) and (B, Hkv, L, D) -> (B, Hkv, G, Dv).

    G query heads share a key head. `mask` is added to the scores. With soft-caps or sinks, the softmax is computed in
    float32 or wider.
    """
    if scores.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scores.scale)
    z = (query * scores.scale @ key.transpose(2, 3)).to(torch.promote_types(query.dtype, torch.float32))
    z = cap_scores(z, scores.softcap).add_(mask)
    if sinks is None:
        return z.softmax(dim=-1).to(value.dtype) @ value
    column = sinks.to(z.dtype).view(1, key.shape[1], -1, 1).expand(len(z), -1, -1, 1)
    weights = torch.cat([z, column], dim=-1).softmax(dim=-1)[..., :-1]
    return weights.to(value.dtype) @ value
