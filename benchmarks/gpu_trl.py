"""GRPO steps of TRL on one GPU, for the workload of `gpu.py --parts steps`: 64 prompts, 8 responses of 512 tokens each.

    python benchmarks/gpu.py --parts steps --out steps                     # camshaft
    python benchmarks/gpu_trl.py --generation transformers                 # TRL 1.16; run both on the same machine
    python benchmarks/gpu_trl.py --generation continuous                   # with continuous batching of transformers
    python benchmarks/gpu_trl.py --model tiny --device cpu                 # checks the script on any machine

It needs `trl`, `datasets` and `accelerate`. The script loads bfloat16 weights into TRL. This is faster than float32
weights with autocast, which would correspond to camshaft's setting. Neither side uses activation checkpointing or
compilation. A step generates all responses and has two optimizer steps. `update` is the time of a step minus that of
generation; it includes rewards and log-probs.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
from datasets import Dataset
from gpu_model import SIZES, make_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from camshaft.data import write_arithmetic

SAMPLES = 8
STEPS = 2
"""Steps, of which the first does not count."""


class Clock(TrainerCallback):
    """Times of steps and of generation."""

    def __init__(self, device: str, updates: int):
        self.device, self.updates = device, updates
        self.steps: list[float] = []
        """Time at which each step starts, and the end of the last one."""
        self.generation: list[float] = []
        """Seconds of each generation."""

    def now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.updates == 0:  # TRL generates after this call
            self.steps.append(self.now())

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(self.now())

    def timed(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = self.now()
            result = generate(*args, **kwargs)
            self.generation.append(self.now() - start)
            sys.stderr.write(f"generation {self.generation[-1]:.2f} s\n")
            return result

        return call


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=SIZES, default="1.5B")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--generation", choices=("transformers", "continuous"), default="transformers")
    parser.add_argument("--micro-batch", type=int, default=16, help="rows")
    options = parser.parse_args()
    on_cuda, continuous = options.device == "cuda", options.generation == "continuous"
    prompts, answer = (64, 512) if on_cuda else (8, 8)
    updates, rows = 2, prompts * SAMPLES
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, SIZES[options.model])
        write_arithmetic(folder / "sums", left=(0, 999), right=(0, 999), num_train=4 * prompts, num_heldout=16)
        texts = pyarrow.parquet.read_table(folder / "sums" / "train.parquet")["prompt"].to_pylist()
        clock = Clock(options.device, updates)
        config = GRPOConfig(
            output_dir=str(folder / "trl"), use_cpu=not on_cuda, bf16=on_cuda, gradient_checkpointing=False,
            learning_rate=1e-6, lr_scheduler_type="constant", weight_decay=0.01, max_grad_norm=1.0, temperature=1.0,
            beta=0.0, report_to=[], logging_strategy="no", save_strategy="no", disable_tqdm=True,
            max_steps=updates * STEPS, per_device_train_batch_size=options.micro_batch,
            gradient_accumulation_steps=rows // updates // options.micro_batch, generation_batch_size=rows,
            num_generations=SAMPLES, max_completion_length=answer, num_iterations=1,
            use_transformers_continuous_batching=continuous,
        )  # fmt: skip
        dtype, lengths = torch.bfloat16 if on_cuda else torch.float32, list[int]()

        def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
            lengths.extend(map(len, completion_ids))
            return [float(sum(ids) % 7) for ids in completion_ids]

        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
            processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
            reward_funcs=reward,
            args=config, train_dataset=Dataset.from_dict({"prompt": texts}), callbacks=[clock],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer._generate_single_turn = clock.timed(trainer._generate_single_turn)
        trainer.train()
    steps = [stop - start for start, stop in itertools.pairwise(clock.steps)][1:]
    generation = statistics.mean(clock.generation[1:])
    row = {"generation": options.generation, "step": statistics.mean(steps), "gen": generation}
    row |= {"update": row["step"] - generation, "steps": steps, "mean_length": statistics.mean(lengths)}
    if on_cuda:
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
