"""Triton kernels that process the logits of one tile of `models/linear_logprob.py` in a single pass over memory.

    normalizers, target_logits, entropy = reduce_tile(logits, columns, 0.7, need_entropy=True, need_squares=False)
    grad = logit_gradient(logits, columns, normalizers, entropy, grad_log_probs, grad_entropy, 0.7, torch.bfloat16)

Torch computes the matrix products. Without these kernels, torch operators would read and write each tile about ten
times between the products. Estimated from the number of bytes, that takes longer than the products even if the hidden
size is several thousand. The forward kernel reads the tile once. The backward kernel reads it once and writes the
gradient once, in the dtype of the next product.

`logits` (C, V) are contiguous float32 logits before the division by the temperature. `columns` (C,) int64 are the
columns of the targets, which may be outside the tile. All other tensors are float32. The module docstring of
`models/linear_logprob.py` defines the formulas.

This module is imported only on a GPU, because importing Triton is slow and CPU builds of torch do not include it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_SIZE = 4096
"""Maximum number of vocabulary entries per block; a power of two."""

WARPS = 8
"""Warps per program. Each thread then processes 16 logits of a block, which fit into registers."""


def reduce_tile(
    logits: Tensor, columns: Tensor, temperature: float, need_entropy: bool, need_squares: bool
) -> list[Tensor]:
    """Return the logsumexp and the target logit of each token, each (C,).

    With `need_entropy` the entropy follows, and with `need_squares` the sum of squared probabilities. The target logit
    is 0 if the target is outside the tile.
    """
    tokens, vocabulary = logits.shape
    results = logits.new_empty(2 + need_entropy + need_squares, tokens)
    if tokens:
        arguments = logits, columns, results, tokens, vocabulary, temperature
        _launch(_reduce_kernel, (tokens,), *arguments, ENTROPY=need_entropy, SQUARES=need_squares)
    return list(results)


def logit_gradient(
    logits: Tensor,
    columns: Tensor,
    normalizers: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return (C, V), the gradient with respect to the scaled logits, in `dtype`.

    `normalizers` (logsumexp) and `entropy` are those of the whole vocabulary.
    """
    tokens, vocabulary = logits.shape
    grad = torch.empty_like(logits, dtype=dtype)
    zeros = torch.zeros_like(normalizers)
    tensors = (normalizers, entropy, grad_log_probs, grad_entropy)
    statistics = torch.stack([zeros if tensor is None else tensor for tensor in tensors])
    if tokens:
        grid = (tokens, -(-vocabulary // _block(vocabulary)))
        _launch(_gradient_kernel, grid, logits, columns, statistics, grad, tokens, vocabulary, temperature)
    return grad


def _launch(kernel: Any, grid: tuple[int, ...], logits: Tensor, *arguments: Any, **constants: bool) -> None:
    kernel[grid](logits, *arguments, **constants, BLOCK=_block(logits.shape[1]), num_warps=WARPS)


def _block(vocabulary: int) -> int:
    return min(BLOCK_SIZE, 1 << (vocabulary - 1).bit_length())


@triton.jit
def _reduce_kernel(
    logits, columns, results, num_tokens, vocabulary_size, temperature,
    ENTROPY: tl.constexpr, SQUARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce the logits z of one token per program.

    `top` is the maximum of z so far, `total` the sum of exp(z - top), `moment` the sum of exp(z - top) (z - top), and
    `squares` the sum of exp(2 z - 2 top). The entropy is log(total) - moment / total. It adds two terms that are not
    negative, so nothing cancels. The sum of squared probabilities is squares / total^2.
    """
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * vocabulary_size
    top = -float("inf")
    total = 0.0
    moment = 0.0
    squares = 0.0
    for start in range(0, vocabulary_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(row + at, mask=at < vocabulary_size, other=-float("inf")) / temperature
        new_top = tl.maximum(top, tl.max(z, axis=0))
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)  # avoids -inf - -inf
        rescale = tl.exp(tl.where(top == -float("inf"), 0.0, top - shift))
        below = z - shift
        share = tl.exp(below)
        if ENTROPY:
            shifted_moment = tl.where(total > 0, moment + (top - shift) * total, 0.0)
            moment = shifted_moment * rescale + tl.sum(tl.where(share > 0, share * below, 0.0), axis=0)
        if SQUARES:
            squares = squares * rescale * rescale + tl.sum(share * share, axis=0)
        total = total * rescale + tl.sum(share, axis=0)
        top = new_top
    tl.store(results + token, top + tl.log(total))
    column = tl.load(columns + token)
    inside = (column >= 0) & (column < vocabulary_size)
    tl.store(results + num_tokens + token, tl.load(row + column, mask=inside, other=0.0) / temperature)
    if ENTROPY:
        tl.store(results + 2 * num_tokens + token, tl.log(total) - moment / total)
    if SQUARES:
        tl.store(results + (3 if ENTROPY else 2) * num_tokens + token, squares / (total * total))


@triton.jit
def _gradient_kernel(logits, columns, statistics, grad, num_tokens, vocabulary_size, temperature, BLOCK: tl.constexpr):
    """Compute the gradient of one token and one block of the vocabulary per program."""
    token = tl.program_id(0).to(tl.int64)
    normalizer = tl.load(statistics + token)
    entropy = tl.load(statistics + num_tokens + token)
    grad_log_prob = tl.load(statistics + 2 * num_tokens + token)
    grad_entropy = tl.load(statistics + 3 * num_tokens + token)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocabulary_size
    z = tl.load(logits + token * vocabulary_size + at, mask=inside, other=-float("inf")) / temperature
    log_p = z - normalizer
    p = tl.exp(log_p)
    slope = tl.where(p == 0, 0.0, p * (grad_log_prob + grad_entropy * (log_p + entropy)))
    result = tl.where(at == tl.load(columns + token), grad_log_prob, 0.0) - slope
    tl.store(grad + token * vocabulary_size + at, result.to(grad.dtype.element_ty), mask=inside)
