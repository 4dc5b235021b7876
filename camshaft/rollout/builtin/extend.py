"""A model call on new tokens behind the cached tokens of rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from camshaft.models.attention import packed_kwargs
from camshaft.models.blockwise import Scores
from camshaft.models.packing import Packing
from camshaft.models.recurrent import RecurrentLayer
from camshaft.rollout.builtin.kv_cache import KVCache
from camshaft.rollout.builtin.steps import causal_mask, masked_attention

MAX_QUERIES = 256
"""Maximum number of new tokens of a row whose attention is computed at once."""

MAX_MASK = 2**22
"""Maximum number of pairs of new token and position whose attention is computed at once, except for a single row."""

MAX_PADDING = 2**12
"""Maximum number of these pairs that are padding, unless they are less than a quarter of the pairs. More of them take
longer than one more call of the attention."""


class ExtendStep:
    """A model call on packed new tokens, which follow the tokens of slots.

    The lengths[i] tokens of row i have the positions from starts[i] on, in slot first_slot + i. The slots hold the
    keys, values and states of all earlier positions.
    """

    def __init__(
        self, cache: KVCache, lengths: Sequence[int], starts: Sequence[int], first_slot: int, device: torch.device
    ):
        self.cache, self.lengths, self.first_slot = cache, lengths, first_slot
        packing = Packing(lengths)
        counts = torch.tensor(lengths)
        positions = packing.position_ids() + torch.tensor(starts).repeat_interleave(counts)
        self.positions = positions.to(device)
        self.slots = (torch.arange(len(lengths)) + first_slot).repeat_interleave(counts).to(device)
        self.kwargs = packed_kwargs(packing, device) | {"position_ids": self.positions[None]}
        self.attended: set[int] = set()
        """Indices of the layers that have attended."""
        self.blocks = [
            _Block.of(torch.tensor(rows), first, last, packing.starts, counts, positions).to(device)
            for rows, first, last in _blocks(lengths, starts)
        ]

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores, sinks: Tensor | None
    ) -> Tensor:
        """Compute attention of new tokens over their row's slot; see `camshaft.models.attention.Slots`."""
        self.cache.check_call(module, scores.window, self.attended)
        keys, values = self.cache.layer(module, key, value)
        keys[self.slots, :, self.positions] = key[0].transpose(0, 1)
        values[self.slots, :, self.positions] = value[0].transpose(0, 1)
        output = query.new_empty(query.shape[2], query.shape[1], values.shape[3])
        for block in self.blocks:
            rows = block.select(keys, self.first_slot), block.select(values, self.first_slot)
            output.index_copy_(0, block.new_tokens, block.attend(query, *rows, scores, sinks))
        return output[None]

    def recur(self, layer: RecurrentLayer, hidden_states: Tensor) -> Tensor:
        """Advance the states of the slots token by token; see `camshaft.models.attention.Slots`."""
        order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__, reverse=True)
        slots = torch.tensor(order, device=hidden_states.device) + self.first_slot
        index = layer.layer_idx
        states = {name: state[slots] for (owner, name), state in self.cache.states.items() if owner == index}
        starts = Packing(self.lengths).starts[order].to(hidden_states.device)
        output = torch.empty_like(hidden_states)
        for step in range(self.lengths[order[0]]):
            count = sum(length > step for length in self.lengths)  # rows that have a token left come first
            tokens, active = starts[:count] + step, {name: state[:count] for name, state in states.items()}
            output[0, tokens] = layer.advance(hidden_states[0, tokens, None], None, active)[0][:, 0]
        for name, state in states.items():
            self.cache.states[index, name][slots] = state
        return output


@dataclass(frozen=True)
class _Block:
    """New tokens of rows whose attention is computed at once, padded to the same number Q of tokens."""

    rows: Tensor
    """(R,)"""
    num_positions: int
    """Number of positions that the tokens attend to."""
    tokens: Tensor
    """(R, Q) offset of each token in the packed tokens. Padding repeats the last token of its row."""
    positions: Tensor
    """(R, Q) position of each token in its row."""
    places: Tensor
    """Places in (R * Q) that are no padding."""
    new_tokens: Tensor
    """Offsets of the tokens in these places."""
    span: slice | None
    """The rows, if they are adjacent and in order."""
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)
    """Masks (R, 1, G * Q, L) by window and group size G, which layers share."""

    @staticmethod
    def of(rows: Tensor, first: int, last: int, starts: Tensor, counts: Tensor, positions: Tensor) -> "_Block":
        """Return the block of the new tokens `first` to `last` - 1 of some rows, as far as they have them."""
        offsets = torch.arange(first, last)
        tokens = starts[rows, None] + offsets.minimum(counts[rows, None] - 1)
        places = (offsets < counts[rows, None]).flatten().nonzero()[:, 0]
        span = slice(int(rows[0]), int(rows[0]) + len(rows)) if bool((rows.diff() == 1).all()) else None
        longest = int(positions[tokens].max()) + 1
        return _Block(rows, longest, tokens, positions[tokens], places, tokens.flatten()[places], span)

    def to(self, device: torch.device) -> "_Block":
        names = ("rows", "tokens", "positions", "places", "new_tokens")
        return replace(self, **{name: vars(self)[name].to(device) for name in names}, masks={})

    def select(self, cached: Tensor, first_slot: int) -> Tensor:
        """Return the cached keys or values of the block, (R, Hkv, L, D)."""
        rows = cached[first_slot:, :, : self.num_positions]
        return rows.index_select(0, self.rows) if self.span is None else rows[self.span]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scores: Scores, sinks: Tensor | None) -> Tensor:
        """Compute attention: query (1, H, N, D) of all tokens, keys and values (R, Hkv, L, D) -> (tokens, H, Dv)."""
        (num_rows, num_queries), num_heads, key_heads = self.tokens.shape, query.shape[1], keys.shape[1]
        group = num_heads // key_heads
        queries = query[0].transpose(0, 1).index_select(0, self.tokens.flatten())
        queries = queries.view(num_rows, num_queries, num_heads, -1).transpose(1, 2)
        # Query heads that share a key head form one longer query, so keys are not repeated.
        queries = queries.reshape(num_rows, key_heads, group * num_queries, -1)
        sinks = None if sinks is None else sinks.repeat_interleave(num_queries)
        output = masked_attention(queries, keys, values, self._mask(scores.window, group, query.dtype), scores, sinks)
        output = output.view(num_rows, num_heads, num_queries, -1).transpose(1, 2)
        return output.reshape(num_rows * num_queries, num_heads, -1).index_select(0, self.places)

    def _mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        if (window, group) not in self.masks:
            mask = causal_mask(self.positions, self.num_positions, window, dtype)
            self.masks[window, group] = mask.repeat(1, group, 1)[:, None]
        return self.masks[window, group]


def _blocks(lengths: Sequence[int], starts: Sequence[int]) -> Iterator[tuple[list[int], int, int]]:
    """Divide rows into blocks: the rows, and the first and the end of their new tokens.

    Rows with similar numbers of new tokens and positions are in the same block. Its rows are in order.
    """
    rows: list[int] = []
    queries = positions = pairs = 0
    for row in sorted(range(len(lengths)), key=lambda row: (lengths[row], starts[row] + lengths[row])):
        end = starts[row] + lengths[row]
        queries, positions, pairs = max(queries, lengths[row]), max(positions, end), pairs + lengths[row] * end
        size = (len(rows) + 1) * queries * positions
        is_padded = size - pairs > max(MAX_PADDING, size // 4)
        if rows and (queries > MAX_QUERIES or size > MAX_MASK or is_padded):
            yield from _parts(rows, lengths)
            rows, queries, positions, pairs = [], lengths[row], end, lengths[row] * end
        rows.append(row)
    yield from _parts(rows, lengths)


def _parts(rows: list[int], lengths: Sequence[int]) -> Iterator[tuple[list[int], int, int]]:
    """Divide the new tokens of rows into blocks. Only a single row has more than one."""
    longest = max(lengths[row] for row in rows)
    for first in range(0, longest, MAX_QUERIES):
        yield sorted(rows), first, min(first + MAX_QUERIES, longest)
