"""Optimizer steps of the training engines on two ranks, compared with `fsdp` (FSDP2) in alternation.

    .venv-megatron/bin/python benchmarks/engines.py --sides fsdp,megatron,megatron:use_distributed_optimizer=true
    .venv-titan/bin/python benchmarks/engines.py --sides fsdp,torchtitan --model 18M

A side is a strategy, followed by engine options. All sides train the same qwen2 model in float32 on the same 64 rows
per step with AdamW, in two processes with one thread each. Each round runs one step of every side. Ratios are medians
of the ratios of a round; the first side is the baseline.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import workload
import yaml
from machine import machine

from camshaft.config.engine import EngineConfig, EngineModel, OptimConfig
from camshaft.controller import Dispatch, Worker, register, workers
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import build_engine
from camshaft.models.tiny import make_tiny_model


class Rank(Worker):
    """Rank of one side."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def build(self, strategy: str, config: EngineConfig) -> None:
        torch.set_num_threads(1)
        self.engine = build_engine(strategy, config)
        self.engine.init_model()
        self.engine.set_loss_fn(
            lambda data, outputs, ctx: (-outputs["log_probs"].values.sum() / ctx["num_tokens"], ctx)
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step(self, batch: DataProto) -> float:
        """Run one optimizer step on this rank's rows of `batch`, and return the loss."""
        seat = self.engine.seat
        with self.engine.train_mode():
            return self.engine.train_batch(batch.chunk(seat.dp_size)[seat.dp_rank]).loss


def rows_of(model: str, number: int) -> DataProto:
    """Return the rows of a step, the same for all sides."""
    rows = workload.training_rows(workload.SHAPES[model].vocab_size, number)
    pairs = list(zip(rows.prompts, rows.responses, strict=True))[: workload.MINI_BATCH]
    ids = Ragged.from_rows([torch.cat(pair) for pair in pairs])
    return DataProto.from_dict({"input_ids": ids, "loss_mask": ids.like(ids.positions() > 0)})


def parse_side(side: str) -> tuple[str, dict[str, Any]]:
    """Split "megatron:tensor_model_parallel_size=2" into the strategy and its options."""
    strategy, *options = side.split(":")
    return strategy, {key: yaml.safe_load(value) for key, value in (option.split("=") for option in options)}


def measure(model: str, sides: list[str], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every step of each side."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_tiny_model(folder, **asdict(workload.SHAPES[model]))
        ranks = {}
        for side in sides:
            strategy, options = parse_side(side)
            ranks[side] = stack.enter_context(workers(Rank, world_size=2))
            config = EngineConfig(
                model=EngineModel(path=folder),
                optim=OptimConfig(lr=workload.LEARNING_RATE),
                micro_batch_size=workload.MICRO_BATCH,
                options=options,
            )
            ranks[side].build(strategy, config)
        for number in range(rounds + 1):
            losses = {}
            for side in sides:
                start = time.perf_counter()
                losses[side] = ranks[side].step(rows_of(model, number))
                seconds[side].append(time.perf_counter() - start)
            spread = max(losses.values()) - min(losses.values())
            assert spread < 1e-3, f"the sides compute different losses: {losses}"
    return {side: times[1:] for side, times in seconds.items()}  # the first step includes one-time work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", default="fsdp,megatron")
    parser.add_argument("--model", default="4M", choices=list(workload.SHAPES))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, help="Markdown file to append the table to")
    args = parser.parse_args()
    sides = args.sides.split(",")
    seconds = measure(args.model, sides, args.rounds)
    lines = [
        f"{args.model}, {args.rounds} rounds, {machine()}",
        "",
        "| side | s / step | side / first |",
        "|---|---|---|",
    ]
    for side, times in seconds.items():
        ratios = [each / first for each, first in zip(times, seconds[sides[0]], strict=True)]
        lines.append(f"| {side} | {statistics.median(times):.3f} | {statistics.median(ratios):.2f} |")
    text = "\n".join(lines)
    print(text)
    if args.out is not None:
        with args.out.open("a", encoding="utf-8") as out:
            out.write(f"\n{text}\n")


if __name__ == "__main__":
    main()
