"""Whole GRPO steps by phase: compiled updates beside generation, with long prompts and responses.

    python benchmarks/gpu_steps.py --out benchmarks/results/gpu_steps    # on a CUDA machine, under ten minutes
    python benchmarks/gpu_steps.py --responses 8192 --out long           # the same
    python benchmarks/gpu_steps.py --tiny --device cpu                   # checks the script on any machine

A model in the shape of Qwen2.5-1.5B with random weights, 64 prompts of 1024 tokens with 8 responses each, the rollout
`torch` in the process that trains, `strategy=fsdp`, no activation checkpointing, and `use_torch_compile` as a run
chooses it. All responses have the same length, or with `tails` lognormal lengths: a median of 512 tokens, sigma 1, at
most 8192. Each run is a process; its first step compiles, and the last one is reported.

Shares are the time that the counted work needs at a rate, divided by the time of the phase (`operations.py`). Work of a
generation: the operations of the prompts at the matmul rate, and then the bytes of the decode steps at the copy rate,
as if all rows were decoded at once. Work of log-probs and updates: their operations at the matmul rate, without
recomputation, prompts once for all their responses. Rates are those measured here, and those of the datasheet.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import roofline
import torch
from camshaft_side import Steps
from gpu_model import DTYPES, SIZES, random_weights
from gpu_parts import answer, in_process, write_page
from machine import machine
from paired import arguments, table
from roofline import Group, Rates
from torch import Tensor
from transformers import Qwen2Config

from camshaft.data.tables import write_parquet
from camshaft.models.tiny import CHARACTERS, make_tiny_tokenizer
from camshaft.rollout.base import BaseRollout

SAMPLES = 8
SECONDS = 580
"""Limit of one process."""
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
PHASES = ("gen", "old_log_prob", "update_actor")
LETTERS = CHARACTERS[:62]


def write_inputs(folder: Path, model: str, prompts: int, length: int, longest: int) -> None:
    """Write a model folder without weights, and prompts of `length` letters."""
    shape = SIZES[model].shape
    make_tiny_tokenizer(folder)
    Qwen2Config(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, intermediate_size=shape.intermediate, vocab_size=shape.vocab_size,
        tie_word_embeddings=True, max_position_embeddings=longest, architectures=["Qwen2ForCausalLM"],
        pad_token_id=0, eos_token_id=2, bos_token_id=None, dtype="float32",
    ).save_pretrained(folder)  # fmt: skip
    random = torch.Generator().manual_seed(0)
    texts = ["".join(LETTERS[i] for i in torch.randint(62, (length,), generator=random)) for _ in range(4 * prompts)]
    write_parquet(folder / "train.parquet", [{"prompt": text, "data_source": "letters"} for text in texts])


def settings(task: dict[str, Any], prompt: int, longest: int) -> dict[str, Any]:
    device, dtype, prompts = task["device"], task["dtype"], task["prompts"]
    return {
        f"{ACTOR}.strategy": "fsdp",
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": "null" if dtype == "float32" else dtype,
        f"{ACTOR}.ppo_max_token_len_per_gpu": max(task["budget"], prompt + longest),
        f"{ACTOR}.ppo_mini_batch_size": prompts // 2,
        f"{ROLLOUT}.n": SAMPLES,
        f"{ROLLOUT}.dtype": dtype,
        f"{ROLLOUT}.enforce_eager": not device.startswith("cuda"),
        f"{ROLLOUT}.ignore_eos": True,
        "actor_rollout_ref.model.random_init": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "data.train_batch_size": prompts,
        "data.max_prompt_length": prompt,
        "data.max_response_length": longest,
        "trainer.device": device,
    }


def tailed(median: int, longest: int) -> Any:
    """Limit the responses of rollouts to lognormal lengths."""
    limits, random = BaseRollout.limits, torch.Generator().manual_seed(1)

    def drawn(rollout: Any, prompts: Any, *rest: Any) -> Tensor:
        lengths = (torch.randn(len(prompts.lengths), generator=random).exp() * median).long().clamp(1, longest)
        return torch.minimum(limits(rollout, prompts, *rest), lengths)

    return mock.patch.object(BaseRollout, "limits", drawn)


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    """Run the steps of one kind, and return the times and the response lengths of the last one."""
    longest = task["longest"] if task["response"] == "tails" else int(task["response"])
    lengths = tailed(task["median"], longest) if task["response"] == "tails" else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as name, random_weights(), lengths:
        folder = Path(name)
        write_inputs(folder, task["model"], task["prompts"], task["prompt"], task["prompt"] + longest)
        steps = Steps(folder, learning_rate=1e-6, **settings(task, task["prompt"], longest))
        metrics: dict[str, Any] = {}
        for _ in range(task["steps"]):
            metrics = steps.step()
        result = {"lengths": metrics["lengths"]}
        result |= {phase: metrics[f"timing_s/{phase}"] for phase in (*PHASES, "sync", "step")}
        if task["device"].startswith("cuda"):
            result["gib"] = torch.cuda.max_memory_allocated(task["device"]) / 2**30
    return result


def seconds_at(rates: Rates, model: str, prompt: int, lengths: list[int], dtype: str) -> dict[str, float]:
    """Return the time that the work of each phase needs at these rates."""
    shape, number = SIZES[model].shape, DTYPES[dtype].itemsize
    groups = [Group(prompt, lengths[start : start + SAMPLES]) for start in range(0, len(lengths), SAMPLES)]
    first = roofline.generation(shape, [Group(prompt, [1] * SAMPLES)] * len(groups), number=number)
    decoded = roofline.generation(shape, groups, number=number).bytes - first.bytes
    return {
        "gen": first.operations / rates.matmul + decoded / rates.copy,
        "old_log_prob": roofline.evaluation(shape, groups).operations / rates.matmul,
        "update_actor": roofline.update(shape, groups, steps=2).operations / rates.matmul,
    }


COLUMNS = {
    "responses": "{response}",
    "mean length": "{mean:.0f}",
    "step": "{step:.1f} s, {tokens_per_second:,.0f} tokens/s",
    "generation": "{gen:.1f} s: {gen_measured:.0%}, {gen_datasheet:.0%}",
    "of it weight sync": "{sync:.2f} s",
    "log-probs": "{old_log_prob:.1f} s: {old_log_prob_measured:.0%}, {old_log_prob_datasheet:.0%}",
    "update": "{update_actor:.1f} s: {update_actor_measured:.0%}, {update_actor_datasheet:.0%}",
    "peak": "{memory}",
}
"""Shares of the measured rates, and then of those of the datasheet."""


def result_row(task: dict[str, Any], result: dict[str, Any], rates: dict[str, Rates]) -> dict[str, Any]:
    """Return the table row of a run; without numbers if it failed."""
    names = (*PHASES, "sync", "step", "mean", "tokens_per_second", *(f"{p}_{r}" for p in PHASES for r in rates))
    row: dict[str, Any] = dict.fromkeys(names) | {"response": task["response"], "memory": result.get("failed", "")}
    if "failed" in result:
        return row
    lengths = result["lengths"]
    row |= {name: result[name] for name in (*PHASES, "sync", "step")}
    row |= {"mean": sum(lengths) / len(lengths), "tokens_per_second": sum(lengths) / result["step"]}
    row["memory"] = f"{result['gib']:.1f} GiB" if "gib" in result else ""
    for kind, rate in rates.items():
        for phase, seconds in seconds_at(rate, task["model"], task["prompt"], lengths, task["dtype"]).items():
            row[f"{phase}_{kind}"] = seconds / result[phase]
    return row


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short rows")
    parser.add_argument("--responses", default=None, help="lengths and tails, comma-separated (512,2048,tails)")
    parser.add_argument("--steps", type=int, default=2, help="steps of each run, of which the last is reported")
    parser.add_argument("--datasheet", type=float, default=989.0, help="the vendor's TFLOP/s in bfloat16")
    parser.add_argument("--bandwidth", type=float, default=3.35, help="the vendor's TB/s of memory")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task is not None:
        answer(run_task, options.task)
        return
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no CUDA device found; --tiny --device cpu checks the script itself")
    dtype = "bfloat16" if options.device.startswith("cuda") else "float32"
    task: dict[str, Any] = {"device": options.device, "dtype": dtype, "steps": options.steps}
    task |= (
        {"model": "tiny", "prompts": 4, "prompt": 16, "median": 4, "longest": 12, "budget": 256}
        if options.tiny
        else {"model": "1.5B", "prompts": 64, "prompt": 1024, "median": 512, "longest": 8192, "budget": 16_384}
    )
    measured = roofline.measured_rates(torch.get_num_threads(), options.device, dtype=DTYPES[dtype])
    rates = {"measured": measured, "datasheet": Rates(1, options.datasheet * 1e12, options.bandwidth * 1e12)}
    if options.device.startswith("cuda"):
        torch.cuda.empty_cache()
    rows: list[dict[str, Any]] = []
    for response in (options.responses or ("8,tails" if options.tiny else "512,2048,tails")).split(","):
        each = task | {"response": response}
        rows.append(result_row(each, in_process("gpu_steps.py", each, SECONDS), rates))
        print(table(rows[-1:], COLUMNS), flush=True)
        report(options, rates, rows)


def report(options: argparse.Namespace, rates: dict[str, Rates], rows: list[dict[str, Any]]) -> None:
    """Write what has been measured so far as Markdown and JSON."""
    if options.out is None:
        return
    form = "{} rates: {:.2f} TFLOP/s and {:.2f} TB/s."
    how = " ".join(form.format(name, rate.matmul / 1e12, rate.copy / 1e12) for name, rate in rates.items())
    write_page(options.out, __doc__ or "", machine(options.device), how, [table(rows, COLUMNS)], {"rows": rows})


if __name__ == "__main__":
    main()
