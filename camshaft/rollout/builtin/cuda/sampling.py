"""Triton kernels that sample the next token of each row in one pass over the logits.

    tokens, log_probs = draw(logits, uniforms, temperature=0.8)

The first kernel sums the probabilities of each block of tokens. The second one selects a block, and then a token of
that block, by inverting the CDF. `camshaft.rollout.sampling.draw` computes the same with torch operators, which read
the probabilities several times. Import this module lazily, because it imports Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from camshaft.rollout.builtin.cuda.kernels import launch

BLOCK_SIZE = 2048
"""Tokens per block."""

SCALE = 2.0**40
"""Scale at which the probabilities of a block, relative to the largest of them, are converted to integers."""


def draw(scores: Tensor, uniforms: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Sample one token per row from softmax(scores / temperature); return tokens (B,) and float32 log-probs (B,).

    The arguments and the guarantees are those of `camshaft.rollout.sampling.draw`.
    """
    scores, (rows, size) = scores.contiguous(), scores.shape
    blocks = -(-size // BLOCK_SIZE)
    sums = torch.empty(2, rows, blocks, dtype=torch.float32, device=scores.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=scores.device)
    log_probs = torch.empty(rows, dtype=torch.float32, device=scores.device)
    padded = 1 << (blocks - 1).bit_length()
    launch(_sum_blocks, (rows, blocks), scores, sums, rows, size, temperature, BLOCK=BLOCK_SIZE)
    launch(
        _select, (rows,), scores, sums, uniforms.contiguous(), tokens, log_probs, rows, size, blocks, temperature,
        SCALE, BLOCK=BLOCK_SIZE, BLOCKS=padded,
    )  # fmt: skip
    return tokens, log_probs


@triton.jit
def _load_block(scores, row, block, size, temperature, BLOCK: tl.constexpr):
    """Return the scaled scores of one block in float32, -inf for tokens that are excluded or do not exist."""
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(scores + row * size + offsets, mask=offsets < size, other=-float("inf"))
    return z.to(tl.float32) / temperature


@triton.jit
def _exp_below(z, top):
    """Return exp(z - top), or 0 if all scores are -inf."""
    return tl.exp(z - tl.where(top == -float("inf"), 0.0, top))


@triton.jit
def _sum_blocks(scores, sums, rows, size, temperature, BLOCK: tl.constexpr):
    """Store the maximum z of one block of one row, and the sum of exp(z - maximum)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    z = _load_block(scores, row, block, size, temperature, BLOCK)
    top = tl.max(z, 0)
    target = sums + row * tl.num_programs(1) + block
    tl.store(target, top)
    tl.store(target + rows * tl.num_programs(1), tl.sum(_exp_below(z, top), 0))


@triton.jit
def _select(
    scores, sums, uniforms, tokens, log_probs, rows, size, blocks, temperature, scale, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Select the token of one row. Integer sums are exact, so a token of probability zero is never selected."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCKS)
    tops = tl.load(sums + row * blocks + index, mask=index < blocks, other=-float("inf"))
    totals = tl.load(sums + (rows + row) * blocks + index, mask=index < blocks, other=0.0)
    top = tl.max(tops, 0)
    shares = totals * _exp_below(tops, top)
    counts = (shares.to(tl.float64) * scale).to(tl.int64)
    cdf = tl.cumsum(counts, 0)
    uniform = tl.load(uniforms + row)
    total = tl.sum(counts, 0)
    point = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    block = tl.minimum(tl.sum((cdf <= point).to(tl.int32), 0), blocks - 1)
    count = tl.sum(tl.where(index == block, counts, 0), 0)
    before = tl.sum(tl.where(index == block, cdf - counts, 0), 0)
    # The relative position within the block is not computed from `point`, which is rounded to an integer.
    exact = uniform * total.to(tl.float64) - before.to(tl.float64)
    fraction = tl.minimum(tl.maximum(exact / tl.maximum(count, 1).to(tl.float64), 0.0), 1.0)

    z = _load_block(scores, row, block, size, temperature, BLOCK)
    counts = (_exp_below(z, tl.max(z, 0)).to(tl.float64) * scale).to(tl.int64)
    total = tl.sum(counts, 0)
    point = tl.minimum((fraction * total.to(tl.float64)).to(tl.int64), total - 1)
    offset = tl.sum((tl.cumsum(counts, 0) <= point).to(tl.int32), 0)
    token = tl.minimum(block * BLOCK + offset, size - 1)
    chosen = tl.sum(tl.where(tl.arange(0, BLOCK) == offset, z, 0.0), 0)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(log_probs + row, chosen - top - tl.log(tl.sum(shares, 0)))
