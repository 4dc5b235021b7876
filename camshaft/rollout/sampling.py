"""Sample the next token: pure functions of logits and of one uniform number per row.

    scores = restrict(logits, temperature=0.8, top_k=50, top_p=0.95)
    tokens, log_probs = draw(scores, uniform(seeds, positions))
    tokens, log_probs = greedy(logits)

Temperature applies first, then `top_k`, then `top_p`. Excluded tokens have score -inf, and `log_probs` belong to the
remaining distribution, from which the token is sampled. The uniforms are a hash of a row's seed and of the token's
position, so a row's samples do not depend on the other rows of the batch. Third-party generators may import this
module.
"""

import torch
from torch import Tensor

AT_ONCE = 1024
"""Largest vocabulary that is searched in one pass; larger ones are searched in blocks."""

BLOCK = 128
"""Tokens per block."""

CANDIDATES = 256
"""Number of top tokens whose probabilities usually add up to `top_p`; if they do not, the entire row is sorted."""

UNITS = 2.0**48
"""Probabilities are added up as integers, in units of 1 / UNITS."""


def restrict(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Return (B, V) scores of the distribution to sample from, float32 or float64; -inf for excluded tokens.

    `top_k` < 1 and `top_p` >= 1 keep all tokens. All tokens that tie at the threshold are kept, because an
    independent computation could not reproduce an arbitrary choice between them.
    """
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        scores = scores / temperature
    size = scores.shape[-1]
    kept = min(top_k, size) if top_k > 0 else size
    if kept < size:
        scores = scores.masked_fill(scores < scores.topk(kept, dim=-1).values[:, -1:], -torch.inf)
    if top_p < 1.0:
        scores = scores.masked_fill(scores < _edge_of_nucleus(scores, top_p, kept), -torch.inf)
    return scores


def _edge_of_nucleus(scores: Tensor, top_p: float, kept: int) -> Tensor:
    """Return (B, 1) the lowest score in the `top_p` nucleus; at most `kept` scores per row are finite."""
    total = scores.double().logsumexp(-1, keepdim=True)
    for width in (min(kept, CANDIDATES), kept):
        best = scores.topk(width, dim=-1).values  # in descending order
        shares = (best.double() - total).exp()
        until = shares.cumsum(-1)
        if width == kept or bool((until[:, -1] >= top_p).all()):
            break
    last = (until - shares < top_p).sum(-1, keepdim=True).clamp(min=1) - 1
    return best.gather(-1, last)


def draw(scores: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverse CDF; return (B,) tokens and (B,) float32 log-probs.

    `uniforms` is (B,) float64 in [0, 1). A token of probability zero is never sampled. Scores that contain NaN or +inf
    give log-probs that are not finite.
    """
    probs = scores.softmax(-1)
    size = probs.shape[-1]
    tokens = _pick(probs, uniforms)[0] if size <= AT_ONCE else _pick_in_blocks(probs, uniforms)
    # With NaN scores the search returns an index past the end.
    tokens = tokens.clamp(max=size - 1)
    return tokens[:, 0], probs.gather(-1, tokens)[:, 0].log().float()


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most probable token per row (the first of equals) and its log-prob at temperature 1."""
    tokens = logits.argmax(-1)
    probs = restrict(logits, temperature=1.0).softmax(-1)
    return tokens, probs.gather(-1, tokens[:, None])[:, 0].log().float()


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return float64 numbers in [0, 1), a fixed function of seed and position; both are int64 and broadcast.

    The result is number `positions` of the splitmix64 stream with state mix(seeds + g). With g = 0x9E3779B97F4A7C15,

        uniform = (mix(mix(seed + g) + (position + 1) * g) >> 11) * 2^-53

    where mix is the finaliser of splitmix64 (see `_mix`) and all arithmetic is modulo 2^64.
    """
    return _shift(_mix(_mix(seeds + _GOLDEN) + (positions + 1) * _GOLDEN), 11).double() * 2.0**-53


def row_seeds(seed: int, call: int, num_rows: int) -> Tensor:
    """Return (num_rows,) int64 seeds for the rows of call number `call`; collisions are improbable."""
    streams = _mix(_mix(torch.tensor([seed]) + _GOLDEN) + torch.tensor([call + 1]) * _GOLDEN)
    return _mix(streams + (torch.arange(num_rows) + 1) * _GOLDEN)


def spread(seeds: Tensor) -> Tensor:
    """Map seeds (B,) int64 one to one so that each input bit affects all output bits.

    For generators that use only a part of the bits of a seed.
    """
    return _mix(seeds + _GOLDEN)


def _pick(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sample (B, 1) indices in proportion to `weights` (B, W); return them, the CDF, and (B,) the points on the CDF.

    Integer sums are exact in any order, so the CDF never decreases and is constant exactly where the weight is zero.
    """
    cdf = (weights * UNITS).long().cumsum(-1)  # a product with a power of two is exact
    point = uniforms * cdf[:, -1]
    return torch.searchsorted(cdf, point.long()[:, None], right=True), cdf, point


def _pick_in_blocks(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Sample (B, 1) indices in proportion to `probs` (B, V): first a block, then a token in it.

    A large vocabulary is read once, to sum its blocks, instead of being converted to integers and summed cumulatively.
    """
    size = probs.shape[-1]
    full_blocks = size - size % BLOCK
    totals = probs[:, :full_blocks].unflatten(-1, (-1, BLOCK)).sum(-1)
    if full_blocks < size:
        totals = torch.cat([totals, probs[:, full_blocks:].sum(-1, keepdim=True)], dim=-1)
    block, cdf, point = _pick(totals, uniforms)
    block = block.clamp(max=totals.shape[-1] - 1)
    before, until = torch.nn.functional.pad(cdf, (1, 0)).gather(-1, torch.cat([block, block + 1], dim=1)).unbind(1)
    rest = (point - before) / (until - before)  # relative position within the block
    index = block * BLOCK + torch.arange(BLOCK, device=probs.device)
    inside = probs.gather(-1, index.clamp(max=size - 1)).masked_fill(index >= size, 0)
    # `_pick` expects weights that add up to about one.
    token, _, _ = _pick(inside / inside.sum(-1, keepdim=True), rest.clamp(0, 1 - 2.0**-53))
    return block * BLOCK + token


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""The increment of splitmix64, as a signed integer."""


def _mix(x: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64 to int64, whose products wrap around like uint64 products."""
    x = (x ^ _shift(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shift(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; torch itself fills int64 with the sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
