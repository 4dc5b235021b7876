"""What short rows gain by sharing calls of attention on a CPU: forward, and with backward, beside a call for each.

    python benchmarks/shared_calls.py --threads 2 --rounds 25

8 prompts of 1 to 64 tokens with 8 responses each, exponential with a mean of 33 and at most 96; heads of the 1M model
(4 of 32 numbers, 2 for keys), float32. Both ways take turns on the same rows in one process; ratios are medians of the
rounds, below 1 where sharing is faster.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from camshaft.models.cpu import attention as attention_cpu

HEADS, KEY_HEADS, DIM = 4, 2, 32


def rows() -> tuple[list[int], list[int | None]]:
    """Lengths and parents, packed as engines pack them."""
    random = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    parents: list[int | None] = []
    for _ in range(8):
        parent = len(lengths)
        answers = torch.empty(8).exponential_(1 / 33, generator=random).long().clamp(1, 96)
        lengths += [int(torch.randint(1, 65, (), generator=random)), *answers.tolist()]
        parents += [None, *[parent] * 8]
    return lengths, parents


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lengths, parents = rows()
    inputs = [torch.randn(sum(lengths), n, DIM).transpose(0, 1).requires_grad_() for n in (HEADS, KEY_HEADS, KEY_HEADS)]
    shared = attention_cpu.CALL
    spent: dict[tuple[int, bool], list[float]] = {(call, back): [] for call in (0, shared) for back in (False, True)}
    for number in range(-1, options.rounds):
        for (call, back), seconds in list(spent.items())[:: 1 if number % 2 else -1]:
            attention_cpu.CALL = call
            attention_cpu.calls_of.cache_clear()
            start = time.perf_counter()
            for _ in range(4):  # layers, which share what is made for a micro-batch
                with torch.set_grad_enabled(back):
                    out = attention_cpu.cpu_documents(*inputs, lengths, parents)
                if back:
                    torch.autograd.grad(out, inputs, out)
            if number >= 0:
                seconds.append(time.perf_counter() - start)
    for back, what in ((False, "forward"), (True, "with backward")):
        alone, together = spent[0, back], spent[shared, back]
        ratio = statistics.median(b / a for a, b in zip(alone, together, strict=True))
        print(f"{options.threads} threads, {what}: {1e3 * statistics.median(alone):.1f} ms, shared {ratio:.2f} of it")


if __name__ == "__main__":
    main()
