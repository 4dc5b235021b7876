"""Memory of one rank (parameters, gradients, optimizer state, process memory) for 1, 2 and 4 ranks.

    python benchmarks/fsdp_memory.py --out benchmarks/results/fsdp_memory.md
    python benchmarks/fsdp_memory.py --layers 16 --hidden 768

Tensors are counted by their storage on the rank. `resident` is the process memory minus that before the model was
built. `peak` is its maximum, while building (rank 0 reads the whole model) and over two optimizer steps.

glibc keeps freed blocks below a threshold that grows with use, so gathered layers would seem to stay in memory. The
script fixes the threshold (MALLOC_MMAP_THRESHOLD_). Any CPU run with little memory benefits from the same setting.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import resource
import sys
import tempfile
from typing import Any

import torch

from camshaft.config.engine import EngineConfig, EngineModel, OptimConfig
from camshaft.controller import Dispatch, Worker, register, workers
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import build_engine
from camshaft.models.tiny import make_tiny_model, make_tiny_tokenizer

MB = 1 << 20


class Rank(Worker):
    """Rank that builds an engine and takes two steps."""

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def measure(self, config: EngineConfig) -> dict[str, float]:
        torch.set_num_threads(1)
        random = torch.Generator().manual_seed(self.rank)
        rows = [torch.randint(3, 90, (64,), generator=random) for _ in range(2)]
        batch = DataProto.from_dict({"input_ids": Ragged.from_rows(rows)})
        gc.collect()
        _forget_peak()
        before = _resident()
        engine: Any = build_engine("fsdp2", config)
        engine.init_model()
        gc.collect()
        built, building = _resident() - before, _peak() - before
        engine.set_loss_fn(lambda data, out, ctx: (-out["log_probs"].values.sum() / ctx["num_tokens"], ctx))
        _forget_peak()
        with engine.train_mode():
            for _ in range(2):
                engine.train_batch(batch)
        parameters = list(engine.module.parameters())
        moments = [v for state in engine.optimizer.state.values() for v in state.values() if v.numel() > 1]
        return {
            "parameters": _held(parameters),
            "gradients": _held([p.grad for p in parameters if p.grad is not None]),
            "optimizer": _held(moments),
            "built": built,
            "building": building,
            "stepping": _peak() - before,
        }


def _held(tensors: list[Any]) -> float:
    """Return the MiB of this rank's shards."""
    return sum(t.to_local().nbytes if hasattr(t, "to_local") else t.nbytes for t in tensors) / MB


def _resident() -> float:
    with open("/proc/self/statm", encoding="ascii") as handle:
        return int(handle.read().split()[1]) * resource.getpagesize() / MB


def _peak() -> float:
    with open("/proc/self/status", encoding="ascii") as handle:
        return int(next(line for line in handle if line.startswith("VmHWM")).split()[1]) / 1024


def _forget_peak() -> None:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as handle:
        handle.write("5")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--out", help="also write the table to this Markdown file")
    options = parser.parse_args()
    heads = ["ranks", "layout", "rank", "parameters", "gradients", "optimizer", "sum", "share of one rank"]
    heads += ["resident, built", "peak, building", "peak, stepping"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    one_rank = None
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_tokenizer(folder)
        make_tiny_model(folder, hidden=options.hidden, layers=options.layers, heads=8, kv_heads=8)
        gc.collect()
        cases: list[tuple[int, str, dict[str, Any]]] = [(world, "sharded", {}) for world in (1, 2, 4)]
        cases.append((4, "2 copies x 2 shards", {"fsdp_size": 2}))
        for world, layout, changes in cases:
            config = EngineConfig(model=EngineModel(path=folder), optim=OptimConfig(lr=1e-4), options=changes)
            group: Any  # takes and returns one entry per rank
            with workers(Rank, world_size=world) as group:
                results = group.measure([config] * world)
            for rank, result in enumerate(results):
                total = result["parameters"] + result["gradients"] + result["optimizer"]
                one_rank = one_rank or total
                numbers = [result["parameters"], result["gradients"], result["optimizer"], total]
                cells = [f"{number:.1f}" for number in numbers] + [f"{total / one_rank:.3f}"]
                cells += [f"{result[name]:.0f}" for name in ("built", "building", "stepping")]
                lines.append(f"| {world} | {layout} | {rank} | " + " | ".join(cells) + " |")
                print(lines[-1], flush=True)
    head = f"MiB per rank; qwen2, {options.layers} layers, {options.hidden} wide, float32, AdamW, gloo on the CPU."
    machine = f"{platform.machine()}, {os.cpu_count()} cores, no accelerator, torch {torch.__version__}."
    text = "\n".join([f"# Memory of one rank\n\n{head}\n{machine} `python benchmarks/fsdp_memory.py`\n", *lines, ""])
    print(text)
    if options.out:
        with open(options.out, "w", encoding="utf-8") as handle:
            handle.write(text)


if __name__ == "__main__":
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        fixed = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | fixed)
    main()
