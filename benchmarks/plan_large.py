"""Forecast PPO runs of large models on GPUs with `camshaft plan`, and measure the command.

    python benchmarks/plan_large.py --out benchmarks/results/plan_large.md
    python benchmarks/plan_large.py --models 7B --ranks 8

The models have the shapes of Qwen2.5 7B and 32B and of Llama 3 70B. Their folders contain only config.json. Each plan
covers an actor, a critic of the same shape and a reference, on `fsdp` with responses from vLLM. The forecast was not
compared with a run, because none of these models has run. `seconds` is the wall time of the command with torch's
import, `CPU s` its processor time, and `host` its maximum resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

GIB, MIB = 2**30, 2**20
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
LLAMA = QWEN | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
MODELS: dict[str, dict[str, Any]] = {
    "7B": QWEN | dict(zip(SIZES, (3584, 18944, 28, 28, 4), strict=True)),
    "32B": QWEN | dict(zip(SIZES, (5120, 27648, 64, 40, 8), strict=True)),
    "70B": LLAMA | dict(zip(SIZES, (8192, 28672, 80, 64, 8), strict=True)),
}
"""Contents of config.json."""
TENSOR_PARALLEL = {"7B": 1, "32B": 4, "70B": 8}
"""Ranks of a vLLM engine."""
RANKS = (8, 64, 512)


def write_model(folder: Path, name: str) -> Path:
    """Write the config.json of a model, and return its folder."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(MODELS[name]), encoding="utf-8")
    return target


def run_arguments(folder: Path, name: str, ranks: int) -> list[str]:
    """Return the arguments of a PPO run of a model whose folder `write_model` wrote."""
    data = folder / "train.jsonl"
    data.write_text('{"prompt": "1+2=", "answer": "3"}\n', encoding="utf-8")
    arguments = [
        f"model={folder / name}",
        f"data={data}",
        "val_data=null",
        "algorithm=ppo",
        f"trainer.nnodes={-(-ranks // 8)}",
        f"trainer.n_gpus_per_node={min(ranks, 8)}",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={TENSOR_PARALLEL[name]}",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
        "data.train_batch_size=1024",
        "data.max_prompt_length=1024",
        "data.max_response_length=3072",
        "actor_rollout_ref.ref.fsdp_config.param_offload=true",
    ]
    for role, model, fsdp in (
        ("actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.actor.fsdp_config"),
        ("critic", "critic.model", "critic.model.fsdp_config"),
    ):
        arguments += [
            f"{role}.use_dynamic_bsz=true",
            f"{role}.ppo_max_token_len_per_gpu=16384",
            f"{model}.enable_gradient_checkpointing=true",
            f"{fsdp}.param_offload=true",
            f"{fsdp}.optimizer_offload=true",
        ]
    return arguments


def plan(arguments: list[str], device: str) -> tuple[dict[str, Any], float, float, float]:
    """Run `camshaft plan`; return the plan, the seconds, the processor seconds and the host memory in MiB."""
    command = [sys.executable, "-m", "camshaft", "plan", "--json", "--device", device, *arguments]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    if process.returncode not in (0, 3):
        raise SystemExit(f"camshaft plan failed with status {process.returncode}")
    return json.loads(text), seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--device", default="h100")
    parser.add_argument("--out")
    options = parser.parse_args()
    lines = [
        "| model | ranks | tightest phase | GiB per rank | fits | offloaded, GiB | seconds | CPU s | host, MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in options.models:
            write_model(folder, model)
            for ranks in options.ranks:
                content, seconds, cpu_seconds, host = plan(run_arguments(folder, model, ranks), options.device)
                row = content["tightest"]
                offloaded = max(item["host"] for item in content["rows"])
                lines.append(
                    f"| {model} | {ranks} | {row['phase']} | {row['peak'] / GIB:.1f} | "
                    f"{'yes' if content['fits'] else 'no'} | {offloaded / GIB:.1f} | {seconds:.1f} | "
                    f"{cpu_seconds:.1f} | {host:.0f} |"
                )
                sys.stdout.write(lines[-1] + "\n")
                sys.stdout.flush()
    if options.out:
        title = (
            f"# Forecast memory of large models\n\n`--device {options.device}`, {platform.machine()}, torch "
            f"{torch.__version__}. Forecasts, not measured on a GPU.\n"
        )
        command = (
            "Written by `python benchmarks/plan_large.py`. The time of a run that does not fit includes the search for "
            "a change with which it fits.\n\n"
        )
        Path(options.out).write_text(title + command + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
