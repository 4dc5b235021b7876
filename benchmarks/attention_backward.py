"""CPU time of the backward pass of packed attention on a CPU in bfloat16, with the kernel in both dtypes.

    python benchmarks/attention_backward.py      # writes results/attention_backward.md

The three sides take turns in every round: float32, bfloat16 with the kernel in bfloat16, and bfloat16 with the kernel
in float32, which `models/cpu.py` uses for segments of less than 512 tokens on average.
"""

import statistics
import time
from pathlib import Path

import torch
from machine import machine

from camshaft.models import cpu
from camshaft.models.packing import Packing

RESULTS = Path(__file__).parent / "results" / "attention_backward.md"
SIDES = {"float32": (torch.float32, 0), "in bfloat16": (torch.bfloat16, 0), "in float32": (torch.bfloat16, 1 << 30)}
TOKENS, ROUNDS = 1024, 5


def measure(length: int, heads: int, dim: int) -> dict[str, float]:
    """Return the median milliseconds of each side."""
    packing, spent = Packing([length] * (TOKENS // length)), {name: list[float]() for name in SIDES}
    tokens = TOKENS // length * length
    for number in range(ROUNDS + 1):
        for name, (dtype, cpu.SHORT) in SIDES.items():
            query, key, value = (torch.randn(heads, tokens, dim).to(dtype).requires_grad_() for _ in range(3))
            out = cpu.packed_cpu_attention(query, key, value, packing)
            began = time.process_time()
            out.backward(torch.ones_like(out))
            if number:  # the first round warms up
                spent[name].append(1000 * (time.process_time() - began))
    return {name: statistics.median(values) for name, values in spent.items()}


def main() -> None:
    torch.set_num_threads(1)
    lines = [
        "# Backward pass of attention in bfloat16",
        "",
        f"Milliseconds of {TOKENS} tokens, one thread. {machine()}",
    ]
    lines += [
        "",
        "| segments | heads | float32 | bfloat16, kernel in bfloat16 | bfloat16, kernel in float32 |",
        "|---" * 5,
    ]
    lines[-1] += "|"
    for length in (16, 48, 128, 256, 512):
        for heads, dim in ((4, 32), (8, 64)):
            cells = [f"{value:.1f}" for value in measure(length, heads, dim).values()]
            lines.append(f"| {length} tokens | {heads} of size {dim} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    RESULTS.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
