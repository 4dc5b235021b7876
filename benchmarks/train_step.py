"""Speed and memory of an update of the actor, beside the loops that a user would write or pick instead.

    python benchmarks/train_step.py --against careful,transformers,trainer
    python benchmarks/train_step.py --models 4M --against careful --rounds 12 --threads 1,2 --out results

- camshaft: `ActorWorker.update_actor` on the reference engine, as a run calls it.
- careful: the loop of `careful.py`. transformers: the textbook loop of `textbook.py`. trainer: `transformers.Trainer`.

The batch is that of `workload.py`: 128 rows, two optimizer steps, float32. In the first round sides that compute the
same loss have to tell the same losses and gradient norms.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import workload
from paired import Case, Sides, main, middle, ratio, serve
from roofline import matmul_rate, update_operations


def build(name: str, case: Case) -> Callable[[int], dict[str, float]]:
    """One side, ready for its rounds."""
    folder, vocabulary = Path(case["folder"]), workload.SHAPES[case["model"]].vocab_size
    if name == "camshaft":
        from camshaft_side import ActorUpdate

        loop: Any = ActorUpdate(folder)
    elif name == "careful":
        from careful import CarefulLoop

        loop = CarefulLoop(folder)
    else:
        from textbook import TextbookLoop, TrainerLoop

        loop = {"transformers": TextbookLoop, "trainer": TrainerLoop}[name](folder)
    return lambda number: loop.update(workload.training_rows(vocabulary, number))


def compared(model: str, names: list[str], threads: int, rounds: int) -> list[dict[str, Any]]:
    """A row of the result for each side."""
    from camshaft.models.tiny import make_tiny_model

    shape = workload.SHAPES[model]
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder, **shape.options())
        (Path(folder) / "train.parquet").touch()
        with Sides(Path(__file__).name, names, {"folder": folder, "model": model}, threads) as sides:
            found = sides.rounds(rounds, alike=("loss", "grad_norm"))
    torch.set_num_threads(threads)
    rows = [workload.training_rows(shape.vocab_size, number + 1) for number in range(rounds)]
    tokens = statistics.mean(sum(map(len, each.prompts)) + sum(map(len, each.responses)) for each in rows)
    operations = statistics.mean(update_operations(shape, each) for each in rows)
    rate = matmul_rate()
    return [
        {
            "model": model,
            "threads": threads,
            "side": name,
            "seconds": middle(found, name, "wall"),
            "cpu_seconds": middle(found, name, "cpu"),
            "tokens_per_cpu_second": tokens / middle(found, name, "cpu"),
            "memory_mib": middle(found, name, "memory") / 2**20,
            "of_matmul_rate": operations / middle(found, name, "wall") / rate,
            "matmul_gflops": rate / 1e9,
            "cpu_ratio": ratio(found, name, "camshaft", "cpu"),
            "wall_ratio": ratio(found, name, "camshaft", "wall"),
            "memory_ratio": ratio(found, name, "camshaft", "memory"),
        }
        for name in names
    ]


COLUMNS = {
    "model": "{model}",
    "threads": "{threads}",
    "side": "{side}",
    "seconds": "{seconds:.2f}",
    "tokens / CPU s": "{tokens_per_cpu_second:.0f}",
    "memory, MiB": "{memory_mib:.0f}",
    "of matmul rate": "{of_matmul_rate:.0%}",
    "side / camshaft: CPU": "**{cpu_ratio:.2f}**",
    "wall": "{wall_ratio:.2f}",
    "memory": "{memory_ratio:.1f}",
}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(build)
    else:
        main(__doc__ or "", compared, COLUMNS, models=",".join(workload.SHAPES), against="careful,transformers,trainer")
