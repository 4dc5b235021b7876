"""Describes sequences that are packed one after the other into one tensor of tokens.

    packing = Packing([5, 3])                          # two rows, 8 tokens
    packing = Packing([5, 3, 2], prefix_of=[None, 0, 0])    # a prompt of 5 tokens, computed once for two responses
    out = model(tokens, packing, at, outputs=("log_probs",))

Engines build one `Packing` per micro-batch. `PackedModel`, packed attention and its CPU kernel read it.
"""

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from camshaft.errors import EngineError


def pad_tokens(tokens: Tensor, count: int) -> Tensor:
    """Append `count` tokens, a segment of their own to which no other token attends.

    They repeat the first token, because the embedding of a padding token may be zero, at which some layers have no
    finite gradient.
    """
    return torch.cat([tokens, tokens[:1].expand(count)]) if count else tokens


class PrefixSpan(NamedTuple):
    """Tokens of a prefix, and of all segments that continue it, which attend to the prefix."""

    children: slice
    prefix: slice


class Packing:
    """Lengths of packed segments and, with prefix sharing, the prefix that a segment continues.

    A segment is a row of the batch, a prefix that several rows share, or the remaining tokens of such a row. If
    `prefix_of[i] = p`, segment i continues segment p: its tokens attend to all of p, and its positions start at the
    length of p. Segment i must come after p, and segments with the same prefix must be adjacent.

    This is a regular class because `torch.compile` reads the fields of tuples and frozen dataclasses, and would
    recompile a layer for every new number of segments.
    """

    def __init__(self, lengths: Sequence[int], prefix_of: Sequence[int | None] | None = None):
        if not lengths or min(lengths) < 1:
            raise EngineError(
                f"every packed row must hold at least one token, got lengths {list(lengths)}; drop empty rows"
            )
        self.lengths = tuple(lengths)
        self.prefix_of = None if prefix_of is None else tuple(prefix_of)

    @cached_property
    def size(self) -> int:
        """Number of tokens."""
        return sum(self.lengths)

    @cached_property
    def ends(self) -> Tensor:
        """End offset of each segment, int64 on the CPU."""
        return torch.tensor(self.lengths).cumsum(0)

    @cached_property
    def starts(self) -> Tensor:
        """Start offset of each segment, int64 on the CPU."""
        return self.ends - torch.tensor(self.lengths)

    @cached_property
    def row_starts(self) -> Tensor:
        """Start offsets of the segments without a prefix, that is, of the tokens without a predecessor."""
        if self.prefix_of is None:
            return self.starts
        return self.starts[torch.tensor([prefix is None for prefix in self.prefix_of])]

    @cached_property
    def longest_context(self) -> int:
        """Maximum number of tokens that one token attends to."""
        if self.prefix_of is None:
            return max(self.lengths)
        prefixes = (0 if prefix is None else self.lengths[prefix] for prefix in self.prefix_of)
        return max(length + prefix for length, prefix in zip(self.lengths, prefixes, strict=True))

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Runs of adjacent segments of equal length, which one kernel call processes as a batch: (count, length)."""
        return [(len(list(run)), length) for length, run in itertools.groupby(self.lengths)]

    @cached_property
    def prefix_spans(self) -> list[PrefixSpan]:
        """Prefixes that segments continue, in packed order."""
        if self.prefix_of is None:
            return []
        ends = list(itertools.accumulate(self.lengths, initial=0))
        spans = []
        for prefix, group in itertools.groupby(range(len(self.lengths)), self.prefix_of.__getitem__):
            if prefix is not None:
                children = list(group)
                span = slice(ends[children[0]], ends[children[-1] + 1])
                spans.append(PrefixSpan(span, slice(ends[prefix], ends[prefix + 1])))
        return spans

    def position_ids(self) -> Tensor:
        """Return the position (N,) of each token in its row, counted from 0."""
        offsets = self.starts
        if self.prefix_of is not None:
            offsets = offsets - torch.tensor([0 if p is None else self.lengths[p] for p in self.prefix_of])
        return torch.arange(self.size) - torch.repeat_interleave(offsets, torch.tensor(self.lengths))

    def row_counts(self) -> Tensor:
        """Return the number (N,) of rows that contain each token: more than 1 for the tokens of a shared prefix."""
        counts = torch.ones(len(self.lengths))
        if self.prefix_of is not None:
            children = torch.tensor([prefix for prefix in self.prefix_of if prefix is not None], dtype=torch.int64)
            counts = torch.bincount(children, minlength=len(self.lengths)).clamp(min=1).float()
        return torch.repeat_interleave(counts, torch.tensor(self.lengths))

    def previous(self, at: Tensor) -> Tensor:
        """Return the offset (M,) of the token that precedes each token of `at` in its row.

        The first token of a segment that continues a prefix is preceded by the last token of the prefix.
        """
        if self.prefix_of is None:
            return at - 1
        previous_offsets = torch.arange(-1, self.size - 1)
        children = [segment for segment, prefix in enumerate(self.prefix_of) if prefix is not None]
        previous_offsets[self.starts[children]] = self.ends[[self.prefix_of[segment] for segment in children]] - 1
        return previous_offsets[at]
