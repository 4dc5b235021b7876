"""Time of an update on a CPU with micro-batches of 8 sequences, and with limits by tokens.

    python benchmarks/micro_batches.py --rounds 5      # writes results/micro_batches.md

Each case updates one model on one batch of GRPO (8 responses to each prompt). All limits take turns in every round, so
they see the same load of the machine. The gradient norms must agree, because results do not depend on the split.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import machine

from camshaft.config.engine import EngineConfig, EngineModel, OptimConfig
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import BaseEngine, engine_class
from camshaft.models.tiny import make_tiny_model

RESULTS = Path(__file__).parent / "results" / "micro_batches.md"
LIMITS: dict[str, dict[str, Any]] = {
    "8 sequences": {"micro_batch_size": 8},
    **{f"{tokens} tokens": {"max_tokens": tokens} for tokens in (1024, 2048, 4096, 8192, 16384)},
}


class Case(NamedTuple):
    """A model and the lengths of its batch."""

    model: dict[str, Any]
    prompts: int
    prompt: int
    shortest: int
    longest: int


CASES = {
    "hidden size 64, 256 responses of 4 to 12 tokens": Case({}, 32, 20, 4, 12),
    "hidden size 256, 64 responses of 20 to 200 tokens": Case(
        {"hidden_size": 256, "intermediate_size": 1024, "layers": 4}, 8, 60, 20, 200
    ),
}


def make_batch(case: Case) -> DataProto:
    """Return 8 responses to each prompt, with random tokens."""
    random, rows = torch.Generator().manual_seed(0), []
    for _ in range(case.prompts):
        prompt = torch.randint(3, 60, (case.prompt,), generator=random)
        for _ in range(8):
            length = int(torch.randint(case.shortest, case.longest + 1, (1,), generator=random))
            rows.append(torch.cat([prompt, torch.randint(3, 60, (length,), generator=random)]))
    ids = Ragged.from_rows(rows)
    return DataProto.from_dict({"input_ids": ids, "loss_mask": ids.like(ids.positions() >= case.prompt)})


def loss(data, predictions, ctx):
    return -(predictions["log_probs"].values * data["loss_mask"].values).sum() / ctx["num_tokens"], ctx


def measure(case: Case, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round with each limit."""
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder, **case.model)
        engines = {}
        for name, limit in LIMITS.items():
            config = EngineConfig(model=EngineModel(path=folder), optim=OptimConfig(lr=1e-4), **limit)
            engines[name] = engine_class("reference")(config)
            engines[name].init_model()
            engines[name].set_loss_fn(loss)
    return time_updates(engines, make_batch(case), rounds, time.perf_counter)


def time_updates(
    engines: Mapping[str, BaseEngine], batch: DataProto, rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return the seconds of each round for each engine. Their gradient norms must agree."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        norms = []
        for name, engine in engines.items():
            began = clock()
            with engine.train_mode():
                norms.append(engine.train_batch(batch).grad_norm)
            if number:  # the first round warms up
                seconds[name].append(clock() - began)
        assert max(norms) - min(norms) < 1e-3 * max(norms), norms
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    lines = [f"Seconds of an update, median of {arguments.rounds} rounds, and the ratio to 8 sequences.", ""]
    lines += [machine(), "", "| case | " + " | ".join(LIMITS) + " |", "|---" * (len(LIMITS) + 1) + "|"]
    for title, case in CASES.items():
        medians = {name: statistics.median(values) for name, values in measure(case, arguments.rounds).items()}
        first = medians["8 sequences"]
        cells = [f"{median:.3f} ({median / first:.2f})" for median in medians.values()]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    RESULTS.write_text("\n".join(["# Limits of micro-batches on a CPU", "", *lines, ""]))


if __name__ == "__main__":
    main()
