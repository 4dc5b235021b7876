"""Roofline: operations and bytes counted from the model and the lengths, relative to measured rates.

    work = update(shape, groups_of(prompts, responses), steps=2)    # Work(operations, bytes)
    reached(work, seconds, measured_rates())    # the share of either rate, and the bound

Only the work that the mathematics requires counts, by the cheaper method where there are two. Padding, recomputed
prompts, unused logits and elementwise operations do not count.

- Operations: products with the weights for every token of a prompt (once for all of its responses) and every token of a
  response but its last; the output layer for tokens that predict a response token; causal attention. A backward pass
  takes twice as many. On a GPU the share of the matmul rate is called MFU.
- Bytes: traffic between memory and processor for numbers of `number` bytes (default: float32). The caches are assumed
  to keep everything inside a block of layers, and nothing between blocks. Every pass reads the weights once, and writes
  and reads the hidden states that enter a block or the head. In an update this happens per optimizer step. The backward
  pass reads weights and hidden states again, and writes and reads the gradients of the hidden states. It writes the
  gradients of the weights. The step reads them for the norm and once more, and reads and writes both moments and the
  weights. Generation is one pass over the prompts and one pass per further token of the longest response, with all rows
  at once. These passes read the weights, and the keys and values of unfinished rows, those of a prompt once for all of
  its rows. Each token's keys and values are written once.

A share is the time for the operations, or for the bytes, at the measured rate, divided by the measured time. Caches are
faster than memory, so the share of the copy rate can exceed one for small models.
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
    """Number of tokens of a prompt and of each of its responses."""

    prompt: int
    responses: Sequence[int]

    def tokens(self) -> int:
        """Count the tokens of a pass; the last token of a response predicts nothing and is not computed."""
        return self.prompt + sum(n - 1 for n in self.responses)

    def predicting(self) -> int:
        """Count the tokens that predict a response token; the last prompt token predicts all first ones."""
        return 1 + sum(n - 1 for n in self.responses)

    def pairs(self) -> int:
        """Count the pairs of a token and a token that it attends to."""
        responses = sum((n - 1) * self.prompt + (n - 1) * n // 2 for n in self.responses)
        return self.prompt * (self.prompt + 1) // 2 + responses

    def read_again(self) -> int:
        """Count the cached positions that are read while the responses are generated token by token."""
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
    """Rates per second with a number of threads: operations of matrix products, bytes read and written by copies."""

    threads: int
    matmul: float
    copy: float


def groups_of(prompts: Sequence[int], responses: Sequence[int]) -> list[Group]:
    """Group row lengths by prompt; the `SAMPLES` rows of a prompt are consecutive."""
    starts = range(0, len(prompts), SAMPLES)
    return [Group(prompts[start], responses[start : start + SAMPLES]) for start in starts]


def evaluation(shape: Shape, groups: Sequence[Group], role: str = "actor", number: int = NUMBER) -> Work:
    """Count a forward pass for log-probs, or for values with a head of one output."""
    numbers = _read(shape, role) + 2 * _hidden(shape, sum(group.tokens() for group in groups))
    return Work(_forward(shape, groups, role), number * numbers)


def update(shape: Shape, groups: Sequence[Group], steps: int, role: str = "actor", number: int = NUMBER) -> Work:
    """Count forward and backward passes and AdamW steps with gradient clipping.

    The passes use numbers of `number` bytes; weights, gradients and optimizer moments are float32.
    """
    weights = shape.weights_of_layers() + shape.vocab_size * shape.hidden
    hidden = _hidden(shape, sum(group.tokens() for group in groups))
    of_passes, of_steps = 2 * steps * _read(shape, role) + 5 * hidden, 9 * steps * weights
    return Work(3 * _forward(shape, groups, role), number * of_passes + NUMBER * of_steps)


def generation(shape: Shape, groups: Sequence[Group], number: int = NUMBER) -> Work:
    """Count the generation of the responses with a KV cache."""
    passes = max(max(group.responses) for group in groups)
    cached = 2 * shape.layers * shape.hidden * shape.kv_heads // shape.heads
    positions = sum(group.tokens() + group.read_again() for group in groups)
    hidden = 2 * _hidden(shape, sum(group.prompt for group in groups))
    return Work(_forward(shape, groups), number * (passes * _read(shape) + hidden + cached * positions))


def _forward(shape: Shape, groups: Sequence[Group], role: str = "actor") -> float:
    """Count operations: two per weight and token, four per hidden unit and pair of tokens in attention."""
    tokens, predicting, pairs = (
        sum(count(group) for group in groups) for count in (Group.tokens, Group.predicting, Group.pairs)
    )
    attention = 4 * shape.layers * shape.hidden * pairs
    return 2 * shape.weights_of_layers() * tokens + attention + 2 * _head(shape, role) * predicting


def _head(shape: Shape, role: str) -> int:
    """Count the weights of the head."""
    return shape.hidden * (shape.vocab_size if role == "actor" else 1)


def _read(shape: Shape, role: str = "actor") -> int:
    """Count the weights that a pass reads."""
    return shape.weights_of_layers() + _head(shape, role)


def _hidden(shape: Shape, tokens: int) -> int:
    """Count the numbers that enter the blocks and the head."""
    return (shape.layers + 1) * shape.hidden * tokens


def measured_rates(
    threads: int = 1, device: str = "cpu", seconds: float = 1.0, dtype: torch.dtype = torch.float32
) -> Rates:
    """Measure the fastest of many square products in this format, and of many float32 copies larger than the caches.

    Sets the number of torch threads. The numbers are random, because a GPU multiplies equal numbers faster.
    """
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
    """Return the minimum number of seconds over repeated calls."""
    timed = _on_cuda if device.startswith("cuda") else _on_cpu
    best, deadline = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        best = min(best, timed(run))
    return best


def _on_cpu(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _on_cuda(run: Callable[[], Any]) -> float:
    """Time a call with CUDA events, which exclude the launch of the kernel."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1000


def reached(work: Work, seconds: float, rates: Rates) -> dict[str, Any]:
    """Return the roofline entries of a result row."""
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
    """Describe the measured rates of these rows for the page."""
    parts = []
    for cores in sorted({row["cores"] for row in rows}):
        matmul, copy = (
            statistics.median(row[rate] for row in rows if row["cores"] == cores)
            for rate in ("matmul_gflops", "copy_gbytes")
        )
        parts.append(f"on {cores} core{'s' * (cores > 1)} {matmul:.0f} GFLOP/s and {copy:.1f} GB/s")
    return f"Shares are relative to the rates of square float32 products and of copies: {'; '.join(parts)}."
