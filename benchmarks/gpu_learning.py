"""Learning runs of a model of 0.5B parameters: bfloat16 and LoRA beside float32.

    python benchmarks/gpu_learning.py --algorithms grpo --out grpo     # on a CUDA machine, under ten minutes
    python benchmarks/gpu_learning.py --algorithms gae --out ppo       # the same
    python benchmarks/gpu_learning.py --tiny --device cpu              # checks the script on any machine

A model in the shape of Qwen2.5-0.5B with random weights is trained by `camshaft.sft` on additions, of which six of ten
answers add without carrying. From there, 50 steps of `camshaft.train` with 32 prompts and 8 responses each:

- float32: weights, computation and generation in float32
- bfloat16: float32 weights, computation and generation in bfloat16
- lora: adapters of rank 16 on frozen bfloat16 weights, with ten times the learning rate

All runs have the same seed, prompts and initial weights. Each is a process. Scores are those of the sampled responses.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_model import random_weights
from gpu_parts import answer, in_process, write_page
from machine import machine
from paired import table
from transformers import Qwen2Config

import camshaft
from camshaft.data import write_arithmetic
from camshaft.models.tiny import make_tiny_tokenizer

SECONDS = 300
"""Limit of one process."""
SIZES: dict[str, dict[str, Any]] = {
    "0.5B": {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151_936,
    },
    "tiny": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 112,
    },
}  # fmt: skip
ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("actor", "model", "rollout"))
RATE = 1e-5
MODES: dict[str, dict[str, Any]] = {
    "float32": {f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": None, f"{ROLLOUT}.dtype": "float32"},
    "bfloat16": {f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": "bfloat16", f"{ROLLOUT}.dtype": "bfloat16"},
    "lora": {
        f"{MODEL}.lora_rank": 16,
        f"{ACTOR}.fsdp_config.model_dtype": "bfloat16",
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": None,
        f"{ROLLOUT}.dtype": "bfloat16",
        f"{ACTOR}.optim.lr": 10 * RATE,
    },
}


def warm_up(task: dict[str, Any]) -> dict[str, Any]:
    """Write the task, train the initial model on it, and return the last loss."""
    folder, size = Path(task["folder"]), SIZES[task["model"]]
    make_tiny_tokenizer(folder / "model")
    Qwen2Config(
        **size, tie_word_embeddings=True, max_position_embeddings=64, architectures=["Qwen2ForCausalLM"],
        pad_token_id=0, eos_token_id=2, bos_token_id=None, dtype="float32",
    ).save_pretrained(folder / "model")  # fmt: skip
    data = write_arithmetic(
        folder / "sums", left=(0, 49), right=(0, 49), num_train=1000, num_heldout=100, careless=0.6, seed=1
    )
    with random_weights() if task["device"].startswith("cuda") else contextlib.nullcontext():
        run = camshaft.sft(
            model=str(folder / "model"),
            data=data.sft_train,
            steps=task["warm_up"],
            config={
                "model.random_init": True,
                "data.train_batch_size": 64,
                "data.max_length": 32,
                "optim.lr": 3e-4,
                "strategy": "fsdp",
                "use_torch_compile": False,
                "trainer.device": task["device"],
                "trainer.n_gpus_per_node": 1,
                "trainer.save_freq": -1,
                "trainer.export_path": str(folder / "warm"),
                "trainer.default_local_dir": str(folder / "sft"),
            },
        )
    return {"loss": run.history["train/loss"][-1]}


def train(task: dict[str, Any]) -> dict[str, Any]:
    """Run one training and return its curve."""
    folder, start = Path(task["folder"]), time.perf_counter()
    prompts, critic = task["prompts"], {"critic.optim.lr": RATE, "critic.use_torch_compile": False}
    run = camshaft.train(
        model=str(folder / "warm"),
        data=folder / "sums" / "train.parquet",
        algorithm=task["algorithm"],
        steps=task["steps"],
        config={
            "data.train_batch_size": prompts,
            "data.max_prompt_length": 16,
            "data.max_response_length": 8,
            f"{ACTOR}.strategy": "fsdp",
            f"{ACTOR}.ppo_mini_batch_size": prompts // 2,
            f"{ACTOR}.use_torch_compile": False,
            f"{ACTOR}.optim.lr": RATE,
            f"{ROLLOUT}.name": "torch",
            f"{ROLLOUT}.n": 8,
            "trainer.device": task["device"],
            "trainer.n_gpus_per_node": 1,
            "trainer.save_freq": -1,
            "trainer.test_freq": -1,
            "trainer.val_before_train": False,
            "trainer.logger": ["jsonl"],
            "trainer.default_local_dir": str(folder / f"{task['algorithm']}-{task['mode']}"),
            **(critic if task["algorithm"] == "gae" else {}),
            **MODES[task["mode"]],
        },
    )
    history = run.history
    return {
        "scores": [float(score) for score in history["critic/score/mean"]],
        "apart": max(float(value) for value in history["rollout/log_prob_diff_max"]),
        "seconds": time.perf_counter() - start,
    }


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    return train(task) if "mode" in task else warm_up(task)


COLUMNS = {
    "algorithm": "{algorithm}",
    "run": "{mode}",
    "score, first five steps": "{first:.3f}",
    "middle five": "{middle:.3f}",
    "last five": "{last:.3f}",
    "rise relative to float32": "{relative:.2f}",
    "largest difference of log-probs": "{apart:.3f}",
    "seconds": "{seconds:.0f}",
    "failed": "{failed}",
}


def result_row(task: dict[str, Any], result: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the table row of a run. `rows` may contain that of float32."""
    names = ("first", "middle", "last", "relative", "apart", "seconds", "failed", "scores")
    row: dict[str, Any] = dict.fromkeys(names) | {"algorithm": task["algorithm"], "mode": task["mode"]} | result
    if scores := row["scores"]:
        half = max(0, len(scores) // 2 - 2)
        parts = {"first": scores[:5], "middle": scores[half : half + 5], "last": scores[-5:]}
        row |= {name: statistics.mean(part) for name, part in parts.items()}
        exact = next((r for r in [*rows, row] if (r["algorithm"], r["mode"]) == (task["algorithm"], "float32")), None)
        if exact is not None and exact["scores"] and exact["last"] != exact["first"]:
            row["relative"] = (row["last"] - row["first"]) / (exact["last"] - exact["first"])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--algorithms", default="grpo,gae", help="comma-separated (default: all)")
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated (default: all)")
    parser.add_argument("--warm-up", type=int, default=400, help="steps of supervised training")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", help="write the table to <out>.md and the numbers to <out>.json")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task is not None:
        answer(run_task, options.task)
        return
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no CUDA device found; --tiny --device cpu checks the script itself")
    task: dict[str, Any] = {"device": options.device, "model": "0.5B", "prompts": 32, "steps": options.steps}
    task["warm_up"] = options.warm_up
    if options.tiny:
        task |= {"model": "tiny", "prompts": 4, "steps": 2, "warm_up": 4}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        warm = in_process("gpu_learning.py", task | {"folder": name}, SECONDS)
        if "failed" in warm:
            raise SystemExit(f"the supervised training failed: {warm['failed']}")
        for algorithm in options.algorithms.split(","):
            for mode in options.modes.split(","):
                each = task | {"folder": name, "algorithm": algorithm, "mode": mode}
                rows.append(result_row(each, in_process("gpu_learning.py", each, SECONDS), rows))
                print(table(rows[-1:], COLUMNS), flush=True)
                report(options, warm["loss"], rows)


def report(options: argparse.Namespace, loss: float, rows: list[dict[str, Any]]) -> None:
    """Write what has been measured so far as Markdown and JSON."""
    if options.out is None:
        return
    how = f"The loss after the supervised training was {loss:.3f}."
    record = {"loss": loss, "rows": rows}
    write_page(options.out, __doc__ or "", machine(options.device), how, [table(rows, COLUMNS)], record)


if __name__ == "__main__":
    main()
