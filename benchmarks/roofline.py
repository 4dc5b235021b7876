"""How near to what the machine can do: operations and bytes counted from the model and the lengths, rates measured.

    work = update(shape, groups_of(prompts, responses), steps=2)    # Work(operations, bytes), of lengths
    reached(work, seconds, measured_rates())    # the share of either rate, and which of the two bounds the work

What counts is what the mathematics needs, of the faster way where there are two. Nothing that a side does beyond that
counts: padding, a prompt computed for each of its responses, a logit that nobody asked for, an elementwise operation.

- Operations: products with the weights for every token of a prompt, once for all of its responses, and of a response
  but its last; the projection on the vocabulary for what predicts a response token; attention of each token to itself
  and those before it. A backward pass is twice as much. On a GPU the share of the matmul rate is called MFU.
- Bytes: those of numbers of `number` bytes, float32 unless told, that pass between memory and processor if its caches
  keep what is computed inside a block of layers, and nothing from one block to the next. Every pass reads the weights
  once, writes the hidden states that enter a block or the head, and reads them. An update does so for each optimizer
  step; its backward pass reads weights and hidden states again, and writes and reads the gradients of the latter. It
  writes the weights' gradients, reads them for their norm and once more for the step, and reads and writes both moments
  and the weights.
  Generation is a pass over the prompts, and one for each further token of the longest response, with all rows at once.
  These read the weights, and the keys and values of rows that go on, those of a prompt once for all of its rows; each
  token's are written once.

A share is the time that the operations, or the bytes, would take alone, of the time that the work took. What fits into
the caches is faster than memory: of small models the share of the copy rate may be more than one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from workload import SAMPLES, Shape

NUMBER = 4
"""Bytes of a float32."""


@dataclass(frozen=True)
class Group:
    """Tokens of a prompt and of each of its responses."""

    prompt: int
    responses: Sequence[int]

    def tokens(self) -> int:
        """That a pass computes: nothing follows the last token of a response."""
        return self.prompt + sum(n - 1 for n in self.responses)

    def predicting(self) -> int:
        """That predict a token of a response; what ends the prompt predicts the first token of each."""
        return 1 + sum(n - 1 for n in self.responses)

    def pairs(self) -> int:
        """Of a token and one that it attends to."""
        own = sum((n - 1) * self.prompt + (n - 1) * n // 2 for n in self.responses)
        return self.prompt * (self.prompt + 1) // 2 + own

    def read_again(self) -> int:
        """Positions whose keys and values are read while the responses are generated, a token of each in turn."""
        return self.prompt * (max(self.responses) - 1) + sum((n - 1) * (n - 2) // 2 for n in self.responses)


@dataclass(frozen=True)
class Work:
    """Floating-point operations, and bytes to and from memory."""

    operations: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.operations + other.operations, self.bytes + other.bytes)

    def __truediv__(self, parts: float) -> Work:
        return Work(self.operations / parts, self.bytes / parts)


NOTHING = Work(0, 0)


@dataclass(frozen=True)
class Rates:
    """A second, with that many threads: operations of matrix products, and bytes that copies read and write."""

    threads: int
    matmul: float
    copy: float


def groups_of(prompts: Sequence[int], responses: Sequence[int]) -> list[Group]:
    """Of rows' lengths: as many rows as a prompt has samples follow each other."""
    starts = range(0, len(prompts), SAMPLES)
    return [Group(prompts[start], responses[start : start + SAMPLES]) for start in starts]


def evaluation(shape: Shape, groups: Sequence[Group], role: str = "actor", number: int = NUMBER) -> Work:
    """A forward pass: log-probs, or values of a critic, which projects on one number instead of the vocabulary."""
    numbers = _read(shape, role) + 2 * _hidden(shape, sum(group.tokens() for group in groups))
    return Work(_forward(shape, groups, role), number * numbers)


def update(shape: Shape, groups: Sequence[Group], steps: int, role: str = "actor", number: int = NUMBER) -> Work:
    """Forward and backward passes, and optimizer steps of AdamW with the norm of the gradients clipped.

    The passes compute with numbers of `number` bytes; weights, gradients and moments of the optimizer are float32.
    """
    weights = shape.weights_of_layers() + shape.vocab_size * shape.hidden
    hidden = _hidden(shape, sum(group.tokens() for group in groups))
    of_passes, of_steps = 2 * steps * _read(shape, role) + 5 * hidden, 9 * steps * weights
    return Work(3 * _forward(shape, groups, role), number * of_passes + NUMBER * of_steps)


def generation(shape: Shape, groups: Sequence[Group], number: int = NUMBER) -> Work:
    """Of the responses, with the keys and values of what was computed kept."""
    passes = max(max(group.responses) for group in groups)
    cached = 2 * shape.layers * shape.hidden * shape.kv_heads // shape.heads
    positions = sum(group.tokens() + group.read_again() for group in groups)
    hidden = 2 * _hidden(shape, sum(group.prompt for group in groups))
    return Work(_forward(shape, groups), number * (passes * _read(shape) + hidden + cached * positions))


def _forward(shape: Shape, groups: Sequence[Group], role: str = "actor") -> float:
    """Operations; a product with a matrix takes two for each weight, scores and their sums two each for each pair."""
    tokens, predicting, pairs = (
        sum(count(group) for group in groups) for count in (Group.tokens, Group.predicting, Group.pairs)
    )
    attention = 4 * shape.layers * shape.hidden * pairs
    return 2 * shape.weights_of_layers() * tokens + attention + 2 * _head(shape, role) * predicting


def _head(shape: Shape, role: str) -> int:
    """Weights of the projection."""
    return shape.hidden * (shape.vocab_size if role == "actor" else 1)


def _read(shape: Shape, role: str = "actor") -> int:
    """Weights that a pass reads."""
    return shape.weights_of_layers() + _head(shape, role)


def _hidden(shape: Shape, tokens: int) -> int:
    """Numbers that enter the blocks and the head."""
    return (shape.layers + 1) * shape.hidden * tokens


def measured_rates(
    threads: int = 1, device: str = "cpu", seconds: float = 1.0, dtype: torch.dtype = torch.float32
) -> Rates:
    """Of the best of many square products in this format, and of many float32 copies that no cache holds. torch keeps
    the threads. Numbers are random: of equal ones a GPU multiplies more in a second."""
    torch.set_num_threads(threads)
    size, numbers = (1 << 10, 1 << 25) if device == "cpu" else (1 << 13, 1 << 28)
    left, right, product = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(3))
    source, target = (torch.ones(numbers, device=device) for _ in range(2))
    return Rates(
        threads,
        matmul=2 * size**3 / _best(lambda: torch.mm(left, right, out=product), device, seconds),
        copy=2 * source.nbytes / _best(lambda: target.copy_(source), device, seconds),
    )


def _best(run: Callable[[], Any], device: str, seconds: float) -> float:
    """The fewest seconds that it took."""
    timed = _on_cuda if device.startswith("cuda") else _on_cpu
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        best = min(best, timed(run))
    return best


def _on_cpu(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _on_cuda(run: Callable[[], Any]) -> float:
    """By the clock of the device: the start of a kernel is no part of its rate."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1000


def reached(work: Work, seconds: float, rates: Rates) -> dict[str, Any]:
    """What a row of a result says of it."""
    of_matmul, of_copy = work.operations / rates.matmul / seconds, work.bytes / rates.copy / seconds
    return {
        "gigaflop": work.operations / 1e9,
        "gigabytes": work.bytes / 1e9,
        "cores": rates.threads,
        "matmul_gflops": rates.matmul / 1e9,
        "copy_gbytes": rates.copy / 1e9,
        "of_matmul_rate": of_matmul,
        "of_copy_rate": of_copy,
        "bound": "operations" if of_matmul > of_copy else "bytes",
    }


COLUMNS = {
    "GFLOP, of matmul rate": "{gigaflop:.1f}, {of_matmul_rate:.0%}",
    "GB, of copy rate": "{gigabytes:.2f}, {of_copy_rate:.0%}",
    "bound by": "{bound}",
}


def sentence(rows: Sequence[dict[str, Any]]) -> str:
    """The rates that the shares of these rows are of, for the page."""
    words = []
    for cores in sorted({row["cores"] for row in rows}):
        matmul, copy = (
            statistics.median(row[rate] for row in rows if row["cores"] == cores)
            for rate in ("matmul_gflops", "copy_gbytes")
        )
        words.append(f"on {cores} core{'s' * (cores > 1)} {matmul:.0f} GFLOP/s and {copy:.1f} GB/s")
    return f"Shares are relative to the rates of square float32 products and of copies: {'; '.join(words)}."
