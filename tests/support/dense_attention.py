"""An independent computation of attention over packed segments: one softmax over all tokens with a mask."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    parents: Sequence[int | None] | None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of packed segments that may continue a prefix: (H, N, D) and (Hkv, N, D) -> (N, H, D)."""
    ends = list(itertools.accumulate(lengths, initial=0))
    sees = torch.zeros(ends[-1], ends[-1], dtype=torch.bool, device=query.device)
    positions = torch.zeros(ends[-1], dtype=torch.int64, device=query.device)
    for segment, length in enumerate(lengths):
        tokens = slice(ends[segment], ends[segment + 1])
        sees[tokens, tokens] = torch.ones(length, length, device=query.device).tril().bool()
        positions[tokens] = torch.arange(length, device=query.device)
        parent = None if parents is None else parents[segment]
        if parent is not None:
            sees[tokens, ends[parent] : ends[parent + 1]] = True
            positions[tokens] += lengths[parent]
    if window is not None:
        sees &= positions[:, None] - positions < window
    groups = len(query) // len(key)
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = query @ key.transpose(1, 2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~sees, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(-1, ends[-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    return (scores.softmax(-1)[..., : ends[-1]] @ value).transpose(0, 1)
