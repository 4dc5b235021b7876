"""Tokenize prompts in one process and in several, and measure wall time and CPU time.

    python benchmarks/tokenising.py [rows ...]

The prompts pass through `camshaft/data/tokens.py` as in a run. Wall time shows what more processes save, CPU time what
they cost in total.
"""

import os
import sys
import tempfile
import time

from camshaft.data import tokens
from camshaft.models.tiny import make_tiny_tokenizer

WORKERS = (1, 2, 4, 8, 16)


def seconds(job: tokens._Job, workers: int) -> tuple[float, float]:
    before, clock = os.times(), time.perf_counter()
    tokens._tokenize(job, workers)
    after = os.times()
    spent = sum(getattr(after, name) - getattr(before, name) for name in ("user", "system"))
    spent += sum(
        getattr(after, f"children_{name}") - getattr(before, f"children_{name}") for name in ("user", "system")
    )
    return time.perf_counter() - clock, spent


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sizes = [int(word) for word in sys.argv[1:]] or [1000, 5000, 10_000, 20_000, 100_000]
    cpus = tokens._usable_cpus()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tiny_tokenizer(f"{folder}/tokenizer")
        print(f"{cpus} CPUs; prompts of 230 tokens\n{'rows':>8} {'workers':>8} {'clock s':>8} {'cpu s':>8}")
        for size in sizes:
            text = "Question {0}: what is {0} plus {0}? " * 6
            prompts = [[{"role": "user", "content": text.format(i)}] for i in range(size)]
            job = tokens._Job(prompts, tokenizer, ["row"] * size, [{}] * size)
            for workers in (count for count in WORKERS if count <= cpus):
                clock, spent = seconds(job, workers)
                print(f"{size:>8} {workers:>8} {clock:>8.2f} {spent:>8.2f}")


if __name__ == "__main__":
    main()
