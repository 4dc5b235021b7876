"""Roofline: operations and bytes of `operations.py`, relative to measured rates.

    work = update(shape, groups_of(prompts, responses), steps=2)    # Work(operations, bytes)
    reached(work, seconds, measured_rates())    # the share of either rate, and the bound

A share is the time for the operations, or for the bytes, at the measured rate, divided by the measured time. On a GPU
the share of the matmul rate is called MFU. Caches are faster than memory, so the share of the copy rate can exceed one
for small models.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from operations import NOTHING, Group, Work, evaluation, generation, update
from workload import SAMPLES

__all__ = ["NOTHING", "Group", "Rates", "Work", "evaluation", "generation", "groups_of", "measured_rates", "update"]


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
    timed = on_cuda if device.startswith("cuda") else on_cpu
    best, deadline = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        best = min(best, timed(run))
    return best


def on_cpu(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def on_cuda(run: Callable[[], Any]) -> float:
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
