"""How much of what the machine can do is reached: operations counted from the model and the lengths, rates measured.

    work = update_operations(shape, rows)           # of one forward and backward pass over these rows
    share = work / cpu_seconds / matmul_rate()      # 1.0: nothing but matrix products at full speed

Operations are what the mathematics needs: products with the weights for every token of a row, the projection on the
vocabulary for response tokens, attention of each token to those before it, and twice as much backward. Nothing that a
side computes beyond that counts: padding, a logit computed twice, an elementwise operation.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from workload import Rows, Shape


def forward_operations(shape: Shape, lengths: list[int], predicted: int) -> float:
    """Floating-point operations of rows of these lengths, `predicted` tokens of which are asked for."""
    attention = 2 * shape.layers * shape.hidden * sum(n * (n + 1) for n in lengths)  # scores and sums, causal
    return 2 * shape.weights_of_layers() * sum(lengths) + attention + 2 * shape.hidden * shape.vocab_size * predicted


def update_operations(shape: Shape, rows: Rows, role: str = "actor") -> float:
    """Of actor or critic; a critic projects on one number instead of the vocabulary."""
    lengths = [len(p) + len(r) for p, r in zip(rows.prompts, rows.responses, strict=True)]
    wide = shape if role == "actor" else replace(shape, vocab_size=1)
    return 3 * forward_operations(wide, lengths, sum(map(len, rows.responses)))


def matmul_rate(size: int = 1024, seconds: float = 1.0) -> float:
    """Operations a second of square float32 products, best of many, with the threads that torch has now."""
    left, right, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
