"""Attention kernels by shape, and updates whose tokens per second and memory another trainer has published.

    python benchmarks/gpu_rows.py --out benchmarks/results/gpu_rows      # on a CUDA machine, about nine minutes
    python benchmarks/gpu_rows.py --parts updates --rows 2 --profile --out rows      # one row, with its longest kernels
    python benchmarks/gpu_rows.py --forecast                             # memory of the updates, on any machine
    python benchmarks/gpu_rows.py --tiny --device cpu                    # checks the script on any machine

- Attention: the kernels of `gpu_attention.py`, in several processes, so that a crash loses one group of kernels.
  FlexAttention is compiled for each shape, so it is measured for single rows only.
- Updates: two rows of equal length per optimizer step, each a micro-batch of its own, with random tokens and weights:
  `ActorWorker.update_actor` with `strategy=fsdp`, or `SFTWorker.train_batch` for supervised rows. AdamW, bfloat16
  computation, float32 weights; with LoRA, frozen weights in bfloat16. Layers are compiled. One side runs at a time, in
  a process of its own: an update as warm-up, then the median of the timed ones. The peak is that of torch's allocator.
- The published numbers are those of prime-rl for one H100 (benchmarks/results/BENCHMARKS.md in its repository, February
  2026), which computed attention with FA3 and recomputed the activations of all layers.
- The textbook loop is `gpu_model.Padded` on a plain model of `transformers`, which is not compiled, with the attention
  "sdpa" and, for LoRA, adapters of PEFT. It recomputes activations where camshaft does.
- The bound is the time of the operations that the row requires: products at the rate of square products measured here,
  attention at the measured rates of the kernel in use, or of the fastest correct kernel. It includes the recomputation
  of activations where the row has it. MFU counts the operations without recomputation, relative to the datasheet.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_attention
import gpu_model
import roofline
import torch
import transformers
from gpu_attention import BACKWARD, Case, measured
from gpu_model import DTYPES, QWEN3, fill, random_weights, without_initialization
from gpu_parts import answer, in_process, synchronize, write_page
from machine import machine
from paired import arguments, table
from torch import Tensor
from workload import FIRST_WORD, GRAD_CLIP, LEARNING_RATE, Rows

ROWS_PER_UPDATE = 2
PARTS = ("attention", "updates")
GROUPS = (
    ("camshaft", "SDPA, flash", "SDPA, cuDNN", "SDPA, cuDNN, repeated keys", "varlen_attn"),
    ("cuDNN, variable length", "cuDNN, variable length, repeated keys"),
    ("FlexAttention",),
    ("FA3", "camshaft with FA3"),
)
"""Attention kernels that run in one process. The last one replaces kernels of torch."""
SECONDS = 150
"""Limit of one process."""
LARGEST_ERROR = 1e-2
"""Maximum error of a kernel that counts as correct, in bfloat16."""


@dataclass(frozen=True)
class Row:
    """An update, with the published tokens per second and GiB."""

    model: str
    length: int
    published: float
    gib: float
    goal: float
    """Tokens per second relative to the published ones."""
    lora: int = 0
    supervised: bool = False
    recompute: bool = True
    """Activation checkpointing. A row without it must still fit in the published memory."""

    def __str__(self) -> str:
        kind = f"LoRA rank {self.lora}" if self.lora else "supervised, full" if self.supervised else "full"
        return f"{self.model} {kind}, rows of {self.length:,}"

    def case(self) -> Case:
        shape = QWEN3[self.model]
        return Case(shape.heads, shape.kv_heads, shape.head_dim, (self.length,))

    def products(self, recomputes: bool) -> float:
        """Count the operations of matrix products per update, without those of adapters.

        Frozen weights have no gradients. The last product of a layer need not be recomputed.
        """
        shape, tokens = QWEN3[self.model], ROWS_PER_UPDATE * self.length
        passes = 2 if self.lora else 3
        weights = passes * shape.weights_of_layers
        if recomputes and self.recompute:
            weights += shape.weights_of_layers - shape.layers * shape.hidden * shape.intermediate
        return 2 * weights * tokens + 2 * passes * shape.weights_of_head * (tokens - ROWS_PER_UPDATE)

    def attention(self, recomputes: bool) -> tuple[float, float]:
        """Count the operations of attention per update, in forward and in backward kernels."""
        once = ROWS_PER_UPDATE * QWEN3[self.model].layers * self.case().operations
        return once * (1 + (recomputes and self.recompute)), BACKWARD * once

    def bound(self, matmul: float, rates: dict[str, Any]) -> float:
        """Return the seconds of an update at these rates."""
        forward, backward = self.attention(recomputes=True)
        return self.products(recomputes=True) / matmul + forward / rates["forward"] + backward / rates["backward"]


ROWS = (
    Row("0.6B", 16_384, 11_900, 12.5, 1.5),
    Row("0.6B", 65_536, 10_150, 19.6, 1.0),
    Row("0.6B", 16_384, 13_340, 5.1, 1.5, lora=16),
    Row("0.6B", 16_384, 25_490, 52.8, 1.3, supervised=True, recompute=False),
    Row("4B", 16_384, 6230, 23.3, 1.3, lora=16),
)
TINY = (
    Row("tiny", 64, 1.0, 1.0, 1.0),
    Row("tiny", 64, 1.0, 1.0, 1.0, lora=4),
    Row("tiny", 64, 1.0, 1.0, 1.0, supervised=True, recompute=False),
)


# -- sides of an update ---------------------------------------------------------------------------


def rows_of(row: Row, seed: int) -> Rows:
    """Return the rows of an update. Prompts have one token."""
    random, vocabulary = torch.Generator().manual_seed(seed), QWEN3[row.model].vocab_size
    tokens = [torch.randint(FIRST_WORD, vocabulary, (row.length,), generator=random) for _ in range(ROWS_PER_UPDATE)]
    responses = [each[1:] for each in tokens]
    die = -torch.tensor(float(vocabulary)).log()
    old = [die + 0.1 * torch.randn(len(response), generator=random) for response in responses]
    advantages = [torch.randn((), generator=random).expand(len(response)) for response in responses]
    return Rows([each[:1] for each in tokens], responses, old, advantages)


def policy_settings(row: Row, device: str, dtype: str) -> dict[str, Any]:
    actor, model = "actor_rollout_ref.actor", "actor_rollout_ref.model"
    return {
        f"{actor}.strategy": "fsdp",
        f"{actor}.fsdp_config.model_dtype": dtype if row.lora else "float32",
        f"{actor}.fsdp_config.mixed_precision.param_dtype": "null" if row.lora or dtype == "float32" else dtype,
        f"{actor}.ppo_mini_batch_size": 1,
        f"{actor}.ppo_max_token_len_per_gpu": row.length,
        f"{model}.random_init": True,
        f"{model}.lora_rank": row.lora,
        f"{model}.enable_gradient_checkpointing": row.recompute,
        "actor_rollout_ref.rollout.n": ROWS_PER_UPDATE,
        "data.train_batch_size": 1,
        "data.max_prompt_length": 1,
        "data.max_response_length": row.length - 1,
        "trainer.device": device,
    }


def supervised_settings(row: Row, folder: Path, device: str, dtype: str) -> dict[str, Any]:
    return {
        "strategy": "fsdp",
        "model.path": folder,
        "model.random_init": True,
        "model.enable_gradient_checkpointing": row.recompute,
        "fsdp_config.mixed_precision.param_dtype": "null" if dtype == "float32" else dtype,
        "optim.lr": LEARNING_RATE,
        "optim.weight_decay": 0.01,
        "optim.lr_warmup_steps_ratio": 0,
        "optim.lr_scheduler_type": "constant",
        "grad_clip": GRAD_CLIP,
        "data.train_files": folder / "train.parquet",
        "data.train_batch_size": ROWS_PER_UPDATE,
        "data.max_length": row.length,
        "data.max_token_len_per_gpu": row.length,
        "trainer.device": device,
        "trainer.n_gpus_per_node": 1,
    }


class Supervised:
    """A model in supervised training."""

    def __init__(self, row: Row, folder: Path, device: str, dtype: str):
        from camshaft.config import SFTConfig, compose
        from camshaft.roles import SFTWorker

        settings = supervised_settings(row, folder, device, dtype)
        (config,) = compose([f"{key}={value}" for key, value in settings.items()], SFTConfig)
        self.worker = SFTWorker(config, total_steps=1000)
        with random_weights():
            self.worker.init_model()

    def update(self, rows: Rows) -> dict[str, float]:
        from camshaft_side import update_metrics

        from camshaft.dataproto import DataProto, Ragged

        ids = Ragged.from_rows([torch.cat(pair) for pair in zip(rows.prompts, rows.responses, strict=True)])
        data = DataProto.from_dict({"input_ids": ids, "loss_mask": ids.like(ids.positions() > 0)})
        return update_metrics(self.worker.train_batch(data), "train/loss", "train/grad_norm")


class Textbook(gpu_model.Padded):
    """A plain model, with adapters of PEFT for LoRA."""

    def __init__(self, row: Row, folder: Path, device: str, dtype: str):
        config = transformers.AutoConfig.from_pretrained(folder)
        load: Any = transformers.AutoModelForCausalLM.from_config
        with torch.device(device), without_initialization():
            model = load(config, dtype=DTYPES[dtype] if row.lora else torch.float32, attn_implementation="sdpa")
        if row.lora:
            import peft

            adapter = peft.LoraConfig(r=row.lora, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
            model.add_adapter(adapter)
        model.to(device).train()
        fill(model)
        if row.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        super().__init__(model, row.length, device, dtype)
        self.supervised = row.supervised

    def loss_of(self, chosen: Tensor, rows: Rows) -> Tensor:
        return -chosen.sum() if self.supervised else super().loss_of(chosen, rows)


def build(side: str, row: Row, folder: Path, device: str, dtype: str) -> Any:
    """Build one side of a row."""
    if side == "textbook" or row.supervised:
        return (Textbook if side == "textbook" else Supervised)(row, folder, device, dtype)
    from camshaft_side import ActorUpdate

    with random_weights():
        return ActorUpdate(folder, **policy_settings(row, device, dtype))


def timed(task: dict[str, Any]) -> dict[str, Any]:
    """Build a side of a row and time its updates."""
    row, device = Row(**task["row"]), task["device"]
    side = build(task["side"], row, Path(task["folder"]), device, task["dtype"])
    first = side.update(rows_of(row, seed=0))
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for seed in range(task["rounds"]):
        rows = rows_of(row, 1 + seed)
        synchronize(device)
        start = time.perf_counter()
        side.update(rows)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    result: dict[str, Any] = {"seconds": statistics.median(seconds), **first}
    result["tokens_per_second"] = ROWS_PER_UPDATE * row.length / result["seconds"]
    if device.startswith("cuda"):
        result["gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    if task["profile"]:
        with torch.profiler.profile() as profile:
            side.update(rows_of(row, seed=0))
            synchronize(device)
        order = "self_cuda_time_total" if device.startswith("cuda") else "self_cpu_time_total"
        result["profile"] = profile.key_averages().table(sort_by=order, row_limit=20, max_name_column_width=90)
    return result


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    if "kernels" not in task:
        return timed(task)
    cases = [Case(**{**each, "lengths": tuple(each["lengths"])}) for each in task["cases"]]
    device, dtype = task["device"], DTYPES[task["dtype"]]
    return {"rows": [measured(kernel, case, device, dtype) for kernel in task["kernels"] for case in cases]}


def forecast(row: Row, folder: Path) -> float:
    """Forecast the peak of an update on a GPU in GiB, with layers that are not compiled."""
    from camshaft_side import config

    from camshaft.config import SFTConfig, compose
    from camshaft.planning import trace

    QWEN3[row.model].write(folder, row.length, "bfloat16" if row.lora else "float32")
    if row.supervised:
        words = supervised_settings(row, folder, "cuda", "bfloat16") | {"use_torch_compile": False}
        (settings,) = compose([f"{key}={value}" for key, value in words.items()], SFTConfig)
        phases = trace.forecast(settings, trace.MODEL)
    else:
        words = policy_settings(row, "cuda", "bfloat16") | {"actor_rollout_ref.actor.use_torch_compile": False}
        phases = trace.forecast(config(folder, **words), trace.POLICY)
    return next(phase.peak for phase in phases if phase.name in ("train", "update_actor")) / 2**30


# -- tables ---------------------------------------------------------------------------------------

ATTENTION = {
    "heads and rows": "{shape}",
    "kernel": "{kernel}",
    "forward, TFLOP/s": "{forward_tflops:.0f}",
    "backward, TFLOP/s": "{backward_tflops:.0f}",
    "error": "{error:.1e}",
    "not measured because": "{missing}",
}
UPDATES = {
    "row": "{row}",
    "published": "{published:,.0f} tokens/s, {published_gib:.1f} GiB",
    "camshaft": "{camshaft}",
    "of published": "{ratio:.2f}",
    "goal": "{goal}",
    "bound": "{bound:,.0f} tokens/s, {share:.0%} reached",
    "bound with the fastest kernel": "{best_bound:,.0f} tokens/s ({best_kernel})",
    "MFU of the datasheet": "{mfu:.1%}",
    "textbook loop": "{textbook}",
    "loss": "{loss:.4f}",
}


def attention_rows(options: argparse.Namespace, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Measure all kernels."""
    by_shape: dict[str, list[dict[str, Any]]] = {str(case): [] for case in cases}
    for kernels in GROUPS:
        chosen = [case for case in cases if len(case.lengths) == 1 or "FlexAttention" not in kernels]
        task = {"kernels": kernels, "cases": [vars(case) for case in chosen]}
        result = in_process("gpu_rows.py", task | {"device": options.device, "dtype": options.dtype}, SECONDS)
        failed = [
            {"shape": str(case), "kernel": kernel, "missing": result.get("failed")}
            for kernel in kernels
            for case in chosen
        ]
        for row in result.get("rows", failed):
            numbers = {f"{name}_tflops": row[name] / 1e12 if name in row else None for name in ("forward", "backward")}
            by_shape[row["shape"]].append({"error": None, "missing": None, **row, **numbers})
    return [row for rows in by_shape.values() for row in rows]


def update_row(row: Row, options: argparse.Namespace, attention: list[dict[str, Any]], matmul: float) -> dict[str, Any]:
    """Measure both sides of a row."""
    sides: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        QWEN3[row.model].write(Path(name), row.length, options.dtype if row.lora else "float32")
        task = {"row": vars(row), "folder": name, "device": options.device, "dtype": options.dtype}
        for side, rounds in (("camshaft", options.rounds), ("textbook", 1)):
            more = {"side": side, "rounds": rounds, "profile": options.profile and side == "camshaft"}
            sides[side] = in_process("gpu_rows.py", task | more, SECONDS)
    result: dict[str, Any] = dict.fromkeys(("ratio", "bound", "share", "best_bound", "best_kernel", "mfu", "loss"))
    result |= {"row": str(row), "published": row.published, "published_gib": row.gib, "sides": sides}
    result["goal"] = f"{row.goal:.1f} at no more memory"
    for side, numbers in sides.items():
        form = "{tokens_per_second:,.0f} tokens/s" + (", {gib:.1f} GiB" if "gib" in numbers else "")
        result[side] = numbers.get("failed") or form.format(**numbers)
    tokens, own = ROWS_PER_UPDATE * row.length, sides["camshaft"]
    rates = [each for each in attention if each["shape"] == str(row.case()) and each.get("backward")]
    correct = {each["kernel"]: each for each in rates if each["error"] < LARGEST_ERROR}
    if "camshaft" in correct:
        bounds = {kernel: tokens / row.bound(matmul, each) for kernel, each in correct.items()}
        best = max(bounds, key=lambda kernel: bounds[kernel])
        result |= {"bound": bounds["camshaft"], "best_bound": bounds[best], "best_kernel": best}
    if "failed" not in own:
        result |= {"ratio": own["tokens_per_second"] / row.published, "loss": own["loss"]}
        operations = row.products(recomputes=False) + sum(row.attention(recomputes=False))
        result["mfu"] = operations / own["seconds"] / (options.datasheet * 1e12)
        if result["bound"]:
            result["share"] = own["tokens_per_second"] / result["bound"]
    return result


def report(options: argparse.Namespace, matmul: float, attention: list[dict[str, Any]], updates: list[Any]) -> None:
    """Write what has been measured so far as Markdown and JSON."""
    if options.out is None:
        return
    rates = f"Square products ran at {matmul / 1e12:.2f} TFLOP/s; the datasheet has {options.datasheet:.0f}."
    about = f"{machine(options.device)}; {options.dtype}, {options.rounds} timed updates"
    tables = [table(rows, columns) for rows, columns in ((attention, ATTENTION), (updates, UPDATES)) if rows]
    record = {"matmul": matmul, "attention": attention, "updates": updates}
    write_page(options.out, __doc__ or "", about, rates, tables, record)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, help="bfloat16 on CUDA, float32 elsewhere")
    parser.add_argument("--tiny", action="store_true", help="tiny models and rows")
    parser.add_argument("--datasheet", type=float, default=989.0, help="the vendor's TFLOP/s in bfloat16")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated (default: all)")
    parser.add_argument("--rows", default="1,2,3,4,5", help="numbers of the updates, comma-separated (default: all)")
    parser.add_argument("--profile", action="store_true", help="write the longest kernels of each update to a file")
    parser.add_argument("--forecast", action="store_true", help="print the forecast memory of the updates, and end")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.set_defaults(rounds=2)
    options = parser.parse_args()
    if options.task is not None:
        answer(run_task, options.task)
        return
    if options.forecast:
        for row in TINY if options.tiny else ROWS:
            with tempfile.TemporaryDirectory() as name:
                print(f"{row}: {forecast(row, Path(name)):.2f} GiB, published {row.gib} GiB", flush=True)
        return
    parts, numbers = options.parts.split(","), options.rows.split(",")
    unknown = [*set(parts).difference(PARTS), *set(numbers).difference(map(str, range(1, len(ROWS) + 1)))]
    if unknown:
        parser.error(f"unknown parts or rows: {', '.join(unknown)}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no CUDA device found; --tiny --device cpu checks the script itself")
    options.dtype = options.dtype or ("bfloat16" if options.device.startswith("cuda") else "float32")
    threads = torch.get_num_threads()
    matmul = roofline.measured_rates(threads, options.device, dtype=DTYPES[options.dtype]).matmul
    if options.device.startswith("cuda"):
        torch.cuda.empty_cache()
    cases, rows = (gpu_attention.TINY, TINY) if options.tiny else (gpu_attention.CASES, ROWS)
    attention, updates = [], []
    if "attention" in parts:
        attention = attention_rows(options, cases)
        print(table(attention, ATTENTION), flush=True)
        report(options, matmul, attention, updates)
    if "updates" in parts:
        for number, row in enumerate(rows, 1):
            if str(number) in numbers:
                updates.append(update_row(row, options, attention, matmul))
                print(table(updates[-1:], UPDATES), flush=True)
                profile = updates[-1]["sides"]["camshaft"].pop("profile", None)
                if profile is not None:
                    name = f"{options.out or 'gpu_rows'}_profile_{number}.txt"
                    Path(name).write_text(f"{row}\n{profile}", encoding="utf-8")
                report(options, matmul, attention, updates)


if __name__ == "__main__":
    main()
