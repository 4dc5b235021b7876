"""A model call on new tokens behind the cached tokens of rows."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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
            _Block.of(rows, first, last, packing.starts, counts, positions).to(device)
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
        outputs = []
        for block in self.blocks:
            slots = slice(self.first_slot + block.rows.start, self.first_slot + block.rows.stop)
            cached = keys[slots, :, : block.num_positions], values[slots, :, : block.num_positions]
            outputs.append(block.attend(query, *cached, scores, sinks))
        return torch.cat(outputs)[None]

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
    """New tokens of adjacent rows whose attention is computed at once, padded to the same number Q of tokens."""

    rows: slice
    num_positions: int
    """Number of positions that the tokens attend to."""
    tokens: Tensor
    """(R, Q) offset of each token in the packed tokens. Padding repeats the last token of its row."""
    positions: Tensor
    """(R, Q) position of each token in its row."""
    is_token: Tensor
    """(R, Q) False for padding."""
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)
    """Masks (R, 1, G * Q, L) by window and group size G, which layers share."""

    @staticmethod
    def of(rows: slice, first: int, last: int, starts: Tensor, counts: Tensor, positions: Tensor) -> "_Block":
        """Return the block of the new tokens `first` to `last` - 1 of some rows, as far as they have them."""
        offsets = torch.arange(first, last)
        tokens = starts[rows, None] + offsets.minimum(counts[rows, None] - 1)
        return _Block(rows, int(positions[tokens].max()) + 1, tokens, positions[tokens], offsets < counts[rows, None])

    def to(self, device: torch.device) -> "_Block":
        tokens, positions, is_token = (t.to(device) for t in (self.tokens, self.positions, self.is_token))
        return _Block(self.rows, self.num_positions, tokens, positions, is_token)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scores: Scores, sinks: Tensor | None) -> Tensor:
        """Compute attention: query (1, H, N, D) of all tokens, keys and values (R, Hkv, L, D) -> (tokens, H, Dv)."""
        (num_rows, num_queries), num_heads, key_heads = self.tokens.shape, query.shape[1], keys.shape[1]
        group = num_heads // key_heads
        # Query heads that share a key head form one longer query, so keys are not repeated.
        queries = query[0, :, self.tokens].transpose(0, 1).reshape(num_rows, key_heads, group * num_queries, -1)
        sinks = None if sinks is None else sinks.repeat_interleave(num_queries)
        output = masked_attention(queries, keys, values, self._mask(scores.window, group, query.dtype), scores, sinks)
        return output.view(num_rows, num_heads, num_queries, -1).transpose(1, 2)[self.is_token]

    def _mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        if (window, group) not in self.masks:
            mask = causal_mask(self.positions, self.num_positions, window, dtype)
            self.masks[window, group] = mask.repeat(1, group, 1)[:, None]
        return self.masks[window, group]


def _blocks(lengths: Sequence[int], starts: Sequence[int]) -> Iterator[tuple[slice, int, int]]:
    """Divide rows into blocks: the rows, and the first and the end of their new tokens. Tokens keep their order."""
    row = 0
    while row < len(lengths):
        stop, queries, positions = row, 0, 0
        for length, start in itertools.islice(zip(lengths, starts, strict=True), row, None):
            queries, positions = max(queries, length), max(positions, start + length)
            size = (stop + 1 - row) * queries * positions
            if stop > row and (queries > MAX_QUERIES or size > MAX_MASK):
                break
            stop += 1
        longest = max(lengths[row:stop])
        for first in range(0, longest, MAX_QUERIES):  # only a single row has more tokens
            yield slice(row, stop), first, min(first + MAX_QUERIES, longest)
        row = stop
