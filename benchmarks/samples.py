"""Cost of writing the responses of each step to the run folder, relative to the step.

    python benchmarks/samples.py --models 1M,4M --rounds 8          # results/samples.md

The GRPO steps of `ppo_step.py`: 16 prompts, 8 responses each of at most 96 tokens. Each round runs one step and then
writes its responses with the default settings, in the same process, so the load of the machine affects both. A run with
`trainer.samples.enable=false` does the same work without the write.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import workload
from camshaft_side import Steps
from ppo_step import LEARNING_RATE, teach_lengths

from camshaft.data.tables import write_parquet
from camshaft.models.tiny import VOCABULARY_ROWS, make_tiny_model


class Spent(NamedTuple):
    """Seconds of one call."""

    wall: float
    cpu: float


def timed(call: Callable[[], Any]) -> Spent:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return Spent(time.perf_counter() - wall, time.process_time() - cpu)


def measure(model: str, rounds: int) -> str:
    """Return a row of the table of results."""
    steps_spent, writes = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape: dict[str, Any] = asdict(workload.SHAPES[model]) | {"vocab_size": VOCABULARY_ROWS}
        make_tiny_model(folder, **shape)
        teach_lengths(folder, VOCABULARY_ROWS)
        texts = [text for number in range(rounds + 1) for text in workload.prompt_texts(number)]
        write_parquet(folder / "train.parquet", [{"prompt": text, "data_source": "letters"} for text in texts])
        steps = Steps(folder, LEARNING_RATE)
        with steps.parts:
            for number in range(rounds + 1):
                step = timed(steps.step)
                write = timed(partial(steps.parts.samples.write, steps.trainer.batch, steps.trainer.global_step))
                if number:  # the first round warms up
                    steps_spent.append(step)
                    writes.append(write)
        files = list((folder / "run" / "samples").iterdir())
        size = statistics.mean(path.stat().st_size for path in files)
    shares = [
        statistics.median(write[kind] / step[kind] for write, step in zip(writes, steps_spent, strict=True))
        for kind in (0, 1)
    ]
    step_wall, write_wall = (statistics.median(spent.wall for spent in each) for each in (steps_spent, writes))
    fastest = min(write.wall for write in writes)
    cells = (model, f"{step_wall:.2f} s", f"{write_wall * 1e3:.1f} ms", f"{fastest * 1e3:.1f} ms")
    return "| " + " | ".join((*cells, f"{shares[0]:.2%}", f"{shares[1]:.2%}", f"{size / 1e3:.0f} kB")) + " |"


def main() -> None:
    """Print the table of results."""
    parser = argparse.ArgumentParser(description="Measure the cost of writing responses, relative to a step.")
    parser.add_argument("--models", default="1M,4M")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdout.write("| model | step | write, median | write, fastest | write / step: wall | CPU | size of a file |\n")
    sys.stdout.write("|---|---|---|---|---|---|---|\n")
    for model in options.models.split(","):
        sys.stdout.write(measure(model, options.rounds) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
