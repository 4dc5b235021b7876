"""Time of a weight sync to a generator in another process, with and without overlap of gathering and loading.

    python benchmarks/weight_sync.py --out benchmarks/results/weight_sync.md
    python benchmarks/weight_sync.py --ranks 1 --layers 16 --rounds 20

The ranks of `strategy=fsdp` gather each weight over gloo and send it to a `process` rollout of their own, which checks
and loads it. Each round syncs once with overlap and once without, in alternating order. Without overlap, a rank waits
before each weight until the generator has read all buckets, as with a single buffer.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from machine import machine
from torch import Tensor

from camshaft.config.engine import EngineConfig, EngineModel
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.controller import Dispatch, Worker, register, workers
from camshaft.engine import build_engine
from camshaft.models.tiny import make_tiny_model, make_tiny_tokenizer
from camshaft.rollout.process.rollout import ProcessRollout

Round = dict[str, float]
"""Seconds of the sync with and without overlap."""


class Rank(Worker):
    """Rank that syncs the weights of a sharded engine to a generator in another process."""

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def measure(self, engine_config: EngineConfig, rollout_config: RolloutEngineConfig, rounds: int) -> list[Round]:
        torch.set_num_threads(1)
        engine: Any = build_engine("fsdp", engine_config)
        engine.init_model()
        rollout = ProcessRollout(rollout_config)
        digests: list[Any] = []

        def sync(overlaps: bool) -> float:
            weights = engine.named_weights(dtype_of=rollout.sync_dtype)
            torch.distributed.barrier()
            start = time.perf_counter()
            rollout.load_weights(weights if overlaps else _waiting(rollout, weights))
            seconds = time.perf_counter() - start
            digests.append(rollout.weight_digests())
            return seconds

        with engine.eval_mode():
            sync(True)  # the first sync also asks the generator for the dtypes
            results = []
            for number in range(rounds):
                order = (True, False) if number % 2 else (False, True)
                seconds = {overlaps: sync(overlaps) for overlaps in order}
                results.append({"overlap": seconds[True], "serial": seconds[False]})
        assert all(digest == digests[0] for digest in digests)
        return results


def _waiting(rollout: ProcessRollout, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Gather each weight after the generator has read all buckets."""
    while True:
        rollout._wait_until_read()
        weight = next(weights, None)
        if weight is None:
            return
        yield weight


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--bucket", type=int, default=16, help="MiB of a bucket")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_tokenizer(folder)
        make_tiny_model(folder, hidden=args.hidden, layers=args.layers, heads=12, kv_heads=4)
        num_bytes = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        engine_config = EngineConfig(model=EngineModel(path=folder))
        rollout_config = RolloutEngineConfig(model_path=folder, update_weights_bucket_megabytes=args.bucket)
        lines = [
            "| ranks | serial, s | overlap, s | serial / overlap, median of the rounds | quartiles |",
            "|---|---|---|---|---|",
        ]
        for ranks in map(int, args.ranks.split(",")):
            group: Any  # takes and returns one entry per rank
            with workers(Rank, world_size=ranks) as group:
                per_rank = group.measure([engine_config] * ranks, [rollout_config] * ranks, [args.rounds] * ranks)
            lines.append(_row(ranks, [_slowest(rounds) for rounds in zip(*per_rank, strict=True)]))
    text = (
        "# Weight sync to a generator in another process\n\n"
        f"`benchmarks/weight_sync.py` wrote this page: {num_bytes / 2**20:.0f} MiB of float32 weights in buckets of "
        f"{args.bucket} MiB, {args.rounds} rounds, one thread per process. Each rank has a generator of its own. Times "
        f"are medians.\n{machine()}\n\n" + "\n".join(lines) + "\n"
    )
    print(text)
    if args.out:
        args.out.write_text(text, encoding="utf-8")


def _slowest(rounds: tuple[Round, ...]) -> Round:
    return {name: max(seconds[name] for seconds in rounds) for name in rounds[0]}


def _row(ranks: int, rounds: list[Round]) -> str:
    serial, overlap = (statistics.median(seconds[name] for seconds in rounds) for name in ("serial", "overlap"))
    ratios = [seconds["serial"] / seconds["overlap"] for seconds in rounds]
    low, median, high = statistics.quantiles(ratios, n=4)
    return f"| {ranks} | {serial:.2f} | {overlap:.2f} | {median:.2f} | {low:.2f} to {high:.2f} |"


if __name__ == "__main__":
    main()
