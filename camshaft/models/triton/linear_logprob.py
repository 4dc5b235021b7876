"""What `linear_logprob.py` does with the logits of a tile, each in one pass over memory: kernels in Triton for GPUs.

    normalisers, chosen, entropy = looked(logits, columns, temperature=0.7, need_entropy=True)
    grad = slopes(logits, columns, normalisers, entropy, grad_log_probs, grad_entropy, 0.7, torch.bfloat16)

The products with the weight are torch's. Between them, operators of torch would read and write a tile about ten times:
by the count of bytes, longer than the products take for a hidden size of some thousands. Here it is read once forward,
and backward read once and written once, in the dtype that the next product takes.

`logits` (C, V) are float32, next to each other and as the product gave them, before the temperature; `columns` (C,)
int64 say where the target of each token is, which may be outside of the tile. Everything else is float32. The
mathematics, and what the names mean, are in the docstring of `linear_logprob.py`.

Imported where there is a GPU alone: importing Triton takes a while, and builds of torch for CPUs come without it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 4096
"""Words of a row that are looked at together. (A power of two.)"""

WARPS = 8
"""Groups of 32 threads that do it: 16 numbers for each thread, few enough to stay in registers."""


def looked(logits: Tensor, columns: Tensor, temperature: float, need_entropy: bool) -> list[Tensor]:
    """Of each token, over the words of the tile: the logsumexp, the target's logit or 0 if it is elsewhere, and if
    wanted the entropy."""
    tokens, words = logits.shape
    found = logits.new_empty(3 if need_entropy else 2, tokens)
    if tokens:
        _launch(_look, (tokens,), logits, columns, found, tokens, words, temperature, ENTROPY=need_entropy)
    return list(found)


def slopes(
    logits: Tensor,
    columns: Tensor,
    normalisers: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """(C, V) in `dtype`: the gradient of the scaled logits. `normalisers` and `entropy` are those of all words."""
    tokens, words = logits.shape
    grad = torch.empty_like(logits, dtype=dtype)
    none = torch.zeros_like(normalisers)
    given = (normalisers, entropy, grad_log_probs, grad_entropy)
    about = torch.stack([none if each is None else each for each in given])
    if tokens:
        grid = (tokens, -(-words // _block(words)))
        _launch(_slope, grid, logits, columns, about, grad, tokens, words, temperature)
    return grad


def _launch(kernel: Any, grid: tuple[int, ...], logits: Tensor, *rest: Any, **constants: bool) -> None:
    kernel[grid](logits, *rest, **constants, BLOCK=_block(logits.shape[1]), num_warps=WARPS)


def _block(words: int) -> int:
    return min(WORDS, 1 << (words - 1).bit_length())


@triton.jit
def _look(
    logits, columns, found, num_tokens, num_words, temperature, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A program for each token. `total` is the sum of exp(z - top) and `moment` that of exp(z - top) (z - top), with
    `top` the largest z so far: the entropy is log(total) - moment / total, and neither term is negative."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * num_words
    top = -float("inf")
    total = 0.0
    moment = 0.0
    for start in range(0, num_words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(row + at, mask=at < num_words, other=-float("inf")) / temperature
        new = tl.maximum(top, tl.max(z, axis=0))
        shift = tl.where(new == -float("inf"), 0.0, new)  # words that cannot be said have no distance from each other
        smaller = tl.exp(tl.where(top == -float("inf"), 0.0, top - shift))
        below = z - shift
        share = tl.exp(below)
        if ENTROPY:
            moved = tl.where(total > 0, moment + (top - shift) * total, 0.0)
            moment = moved * smaller + tl.sum(tl.where(share > 0, share * below, 0.0), axis=0)
        total = total * smaller + tl.sum(share, axis=0)
        top = new
    tl.store(found + token, top + tl.log(total))
    column = tl.load(columns + token)
    here = (column >= 0) & (column < num_words)
    tl.store(found + num_tokens + token, tl.load(row + column, mask=here, other=0.0) / temperature)
    if ENTROPY:
        tl.store(found + 2 * num_tokens + token, tl.log(total) - moment / total)


@triton.jit
def _slope(logits, columns, about, grad, num_tokens, num_words, temperature, BLOCK: tl.constexpr):
    """A program for each token and block of words."""
    token = tl.program_id(0).to(tl.int64)
    normaliser = tl.load(about + token)
    entropy = tl.load(about + num_tokens + token)
    of_log_prob = tl.load(about + 2 * num_tokens + token)
    of_entropy = tl.load(about + 3 * num_tokens + token)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_words
    z = tl.load(logits + token * num_words + at, mask=inside, other=-float("inf")) / temperature
    log_p = z - normaliser
    p = tl.exp(log_p)
    slope = tl.where(p == 0, 0.0, p * (of_log_prob + of_entropy * (log_p + entropy)))
    result = tl.where(at == tl.load(columns + token), of_log_prob, 0.0) - slope
    tl.store(grad + token * num_words + at, result.to(grad.dtype.element_ty), mask=inside)
