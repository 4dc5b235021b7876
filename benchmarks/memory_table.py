"""Forecast which model trains with which method on a GPU of 8, 16, 24 or 80 GB, with the code of `camshaft plan`.

    python benchmarks/memory_table.py --out benchmarks/results/memory_table.md

The models have the shapes and the dtype of Qwen2.5. Their folders contain only config.json. Every run uses one GPU, the
engine `fsdp` with bfloat16 computation, float32 trained weights and bfloat16 frozen weights, the built-in generator,
activation checkpointing, and micro-batches of one row of 1024 tokens. `CONTEXT` of each card is left to the CUDA
context and libraries, which a plan does not count.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from camshaft.config import PPOConfig, SFTConfig
from camshaft.planning.devices import GIB
from camshaft.planning.plan import Plan, Schema, compose_run, make_plan

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2),
    "1.5B": (1536, 8960, 28, 12, 2),
    "3B": (2048, 11008, 36, 16, 2),
    "7B": (3584, 18944, 28, 28, 4),
}
LORA = ("lora=32",)
OFFLOAD = ("fsdp_config.offload_policy=true",)
METHODS: dict[str, tuple[type[PPOConfig] | type[SFTConfig], tuple[str, ...]]] = {
    "SFT, LoRA": (SFTConfig, LORA),
    "SFT": (SFTConfig, ()),
    "GRPO, LoRA": (PPOConfig, ("algorithm=grpo", *LORA)),
    "GRPO": (PPOConfig, ("algorithm=grpo",)),
    "GRPO, offloading": (PPOConfig, ("algorithm=grpo", *(f"actor_rollout_ref.actor.{key}" for key in OFFLOAD))),
    "PPO with a critic, offloading": (
        PPOConfig,
        (
            "algorithm=ppo",
            *(f"actor_rollout_ref.actor.{key}" for key in OFFLOAD),
            *(f"critic.model.{key}" for key in OFFLOAD),
        ),
    ),
}
"""Command and overrides of each method."""
CARDS = {"8 GB": 7, "16 GB": 15, "24 GB": 23, "80 GB": 79}
"""GiB that torch reports for a card, rounded down."""
CONTEXT = 1.5
"""GiB of a card for the CUDA context, libraries and fragmentation."""
GENERATION = ("sync", "gen")
"""Phases in which the built-in generator fills free memory with its KV cache."""


def write_inputs(folder: Path) -> None:
    """Write the config.json of every model, and a row of data."""
    for name, sizes in SHAPES.items():
        model = folder / name
        model.mkdir()
        config: dict[str, Any] = {
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936,
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
            "tie_word_embeddings": name != "7B", "eos_token_id": 1, "dtype": "bfloat16",
            **dict(zip(SIZES, sizes, strict=True)),
        }  # fmt: skip
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    row = {"prompt": "1+2=", "response": "3", "answer": "3"}
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")


def arguments(folder: Path, model: str, method: str) -> tuple[Schema, list[str]]:
    """Return the command and the arguments of a run on one GPU."""
    schema, overrides = METHODS[method]
    words = [f"model={folder / model}", f"data={folder / 'train.jsonl'}", "val_data=null", "device=cuda", "devices=1"]
    words += ["engine=fsdp", *overrides]
    if schema is SFTConfig:
        words += ["max_length=1024", "batch=16", "data.micro_batch_size_per_gpu=1"]
        return schema, [*words, "model.enable_gradient_checkpointing=true"]
    policy = "actor_rollout_ref"
    words += ["rollout=torch", "reward=exact_match", "prompt_length=512", "response_length=512", "batch=16"]
    words += [f"{policy}.actor.ppo_micro_batch_size_per_gpu=1", "critic.ppo_micro_batch_size_per_gpu=1"]
    words += [f"{policy}.rollout.log_prob_micro_batch_size_per_gpu=1"]
    words += [f"{policy}.model.enable_gradient_checkpointing=true", "critic.model.enable_gradient_checkpointing=true"]
    return schema, words


def plans(folder: Path, model: str, method: str) -> dict[str, Plan]:
    """Return the plan for each card. The roles are traced once."""
    schema, words = arguments(folder, model, method)
    config = compose_run(words, schema)
    return {card: make_plan(config, int((size - CONTEXT) * GIB)) for card, size in CARDS.items()}


def row(folder: Path, model: str, method: str) -> str:
    """Return a row of the table."""
    forecasts = plans(folder, model, method)
    largest = forecasts[next(reversed(CARDS))]
    peak = max(phase.peak for phase in largest.rows if phase.phase not in GENERATION)
    host = max(phase.host for phase in largest.rows)
    verdicts = ["yes" if plan.fits else "no" for plan in forecasts.values()]
    cells = [model, method, f"{peak / GIB:.1f}", f"{host / GIB:.1f}", *verdicts]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = [
        f"| model | method | GiB on the GPU | GiB in host memory | {' | '.join(CARDS)} |",
        f"|{'---|' * (4 + len(CARDS))}",
    ]
    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name))
        for model in options.models:
            for method in options.methods:
                lines.append(row(Path(name), model, method))
                print(lines[-1], flush=True)
    if options.out is not None:
        text = f"# Which model fits on which GPU\n\nForecast by `python benchmarks/{Path(__file__).name}`.\n\n"
        options.out.write_text(text + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
