"""Efficiency of one GPU: updates, log-prob memory, generation, host waits, weight syncs, and whole steps.

    python benchmarks/gpu.py --out benchmarks/results/gpu                      # on a CUDA machine, some minutes
    python benchmarks/gpu.py --parts update --against textbook --datasheet 989
    python benchmarks/gpu.py --model tiny --device cpu                         # checks the script on any machine

- update: `ActorWorker.update_actor` on one rank of the sharded engine: AdamW on float32 weights, bfloat16 computation,
  full activation checkpointing. `textbook` is `gpu_model.Padded` in a separate process, in turns, on the same rows.
  Each round has an untimed update before the timed one. MFU is the time of the counted operations at a rate, divided by
  the measured time. The rate is that of square products in the same format, measured here, or that of the datasheet
  (`--datasheet`, TFLOP/s). Recomputation does not count.
- memory: peak of `linear_logprob` with entropy at three vocabularies. Forward: minus inputs and outputs. With the
  backward pass: also minus the gradients, in float32 as they are accumulated over tiles.
- decode: the built-in generator, all tokens but the first. The bound is the time to read, at the measured copy rate or
  that of the datasheet (`--bandwidth`, TB/s), the weights once per step and the keys and values of all rows at their
  lengths.
- syncs: host waits between the marks around a micro-batch in the profiler's trace, and an update in which CUDA rejects
  synchronizing calls inside the marks.
- weights, prompts, steps, kernels: weight syncs and offloading, updates with shared prompts, GRPO steps by phase, and
  single kernels (`gpu_system.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_model
import roofline
import torch
import transformers
from gpu_model import DTYPES, SIZES
from machine import machine
from paired import Case, Sides, arguments, middle, serve, table

GOALS = {
    "update": "MFU of at least 45 %",
    "memory": "the same at every vocabulary",
    "decode": "at least 50 % of the bound",
    "syncs": "none",
    "weights": "half of the copy rate",
    "prompts": "",
    "steps": "",
    "kernels": "",
}
PARTS = tuple(GOALS)
COLUMNS = {"part": "{part}", "what": "{what}", "measured": "{measured}", "goal": "{goal}"}
AGAINST = ("textbook",)


# -- updates, a process for each side -------------------------------------------------------------


def build(name: str, case: Case) -> Callable[[int], dict[str, float]]:
    """Build one side; the result runs a round."""
    from camshaft_side import ActorUpdate

    size, folder, device, dtype = SIZES[case["model"]], Path(case["folder"]), case["device"], case["dtype"]
    if name == "textbook":
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        model = load(folder, dtype=torch.float32).to(device).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        loop: Any = gpu_model.Padded(model, size.longest_prompt + size.longest_response, device, dtype)
    else:
        loop = ActorUpdate(folder, **(gpu_model.settings(size, device, dtype) | case["settings"]))
    return lambda number: timed_update(loop, gpu_model.rows_of(size, number), device)


def timed_update(loop: Any, rows: Any, device: str) -> dict[str, float]:
    """Time the second of two updates of the rows; the first one allocates memory again."""
    metrics = loop.update(rows)
    on_cuda = device.startswith("cuda")
    if on_cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    loop.update(rows)
    if on_cuda:
        torch.cuda.synchronize(device)
    metrics["seconds"] = time.perf_counter() - start
    if on_cuda:
        metrics["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        torch.cuda.empty_cache()  # for the other side
    return metrics


def update_rows(job: Any, names: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one result row per side."""
    case = {"model": options.model, "folder": str(job.folder), "device": job.device, "dtype": job.dtype}
    case["settings"] = dict(word.split("=", 1) for word in options.set)
    with Sides("gpu.py", names, case, threads=torch.get_num_threads()) as sides:
        rounds = sides.rounds(job.rounds)
    rows = [gpu_model.rows_of(job.size, number + 1) for number in range(job.rounds)]
    work = sum((gpu_model.work_of(job.size, each, job.dtype) for each in rows), roofline.NOTHING) / len(rows)
    results = [{name: each[name]["result"] for name in names} for each in rounds]
    tokens = gpu_model.mean_tokens(rows)
    return [_update_row(name, results, work, tokens, job.rates, options.datasheet) for name in names]


def _update_row(
    name: str, results: Any, work: roofline.Work, tokens: float, rates: roofline.Rates, datasheet: float | None
) -> dict[str, Any]:
    seconds = middle(results, name, "seconds")
    row: dict[str, Any] = {"what": name, "seconds": seconds, "tokens_per_second": tokens / seconds}
    row |= roofline.reached(work, seconds, rates)
    row["matmul_tflops"] = rates.matmul / 1e12
    if name in AGAINST:
        row["goal"] = ""
    parts = ["{of_matmul_rate:.1%} MFU of the {matmul_tflops:.2f} TFLOP/s measured"]
    if datasheet is not None:
        row |= {"datasheet_tflops": datasheet, "of_datasheet": work.operations / (datasheet * 1e12) / seconds}
        parts.append("{of_datasheet:.1%} of the datasheet's {datasheet_tflops:.0f} TFLOP/s")
    parts.append("{seconds:.3f} s, {tokens_per_second:.0f} tokens/s")
    if "peak_gib" in results[0][name]:
        row["peak_gib"] = middle(results, name, "peak_gib")
        parts.append("{peak_gib:.1f} GiB")
    row |= {key: middle(results, name, key) for key in ("loss", "grad_norm")}
    parts.append("loss {loss:.4f}, norm {grad_norm:.4f}")
    return row | {"measured": "; ".join(parts).format(**row)}


def beside_bandwidth(row: dict[str, Any], terabytes: float | None) -> dict[str, Any]:
    """Add the share of the datasheet's bandwidth to a row of decode steps that was measured."""
    if terabytes is None or "of_copy_rate" not in row:
        return row
    share = row["of_copy_rate"] * row["copy_gbytes"] / (1000 * terabytes)
    more = f"; {share:.1%} of the bound at the datasheet's {terabytes:.2f} TB/s"
    return row | {"of_bandwidth": share, "measured": row["measured"] + more}


# -- the command ----------------------------------------------------------------------------------


def options_of() -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="1.5B", choices=SIZES)
    parser.add_argument("--dtype", choices=DTYPES, help="bfloat16 on CUDA, float32 elsewhere")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated (default: all)")
    parser.add_argument("--against", default="textbook", help="textbook, or an empty string for camshaft only")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="config key of camshaft's update; repeatable"
    )
    parser.add_argument("--datasheet", type=float, help="the vendor's TFLOP/s in that format, without sparsity")
    parser.add_argument("--bandwidth", type=float, help="the vendor's TB/s of memory")
    parser.set_defaults(rounds=3)
    options = parser.parse_args()
    for option, choices in ((options.parts, PARTS), (options.against, AGAINST)):
        unknown = set(filter(None, option.split(","))) - set(choices)
        if unknown:
            parser.error(f"unknown: {', '.join(sorted(unknown))}; use {', '.join(choices)}")
    if any("=" not in word for word in options.set):
        parser.error("--set takes KEY=VALUE")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no CUDA device found; --model tiny --device cpu checks the script itself")
    options.dtype = options.dtype or ("bfloat16" if options.device.startswith("cuda") else "float32")
    return options


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the chosen parts and return all table rows."""
    import gpu_parts
    import gpu_system

    size, rows = SIZES[options.model], []
    rates = roofline.measured_rates(torch.get_num_threads(), options.device, dtype=DTYPES[options.dtype])
    if options.device.startswith("cuda"):
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gpu_model.make_model(folder, size)
        job = gpu_parts.Job(size, folder, options.device, options.dtype, rates, options.rounds)
        names = ["camshaft", *filter(None, options.against.split(","))]
        ways: dict[str, Callable[[], list[dict[str, Any]]]] = {
            "update": lambda: update_rows(job, names, options),
            "memory": lambda: gpu_parts.memory_rows(job),
            "decode": lambda: [beside_bandwidth(row, options.bandwidth) for row in gpu_parts.decode_rows(job)],
            "syncs": lambda: gpu_parts.syncs_rows(job),
            "weights": lambda: gpu_system.sync_rows(job),
            "prompts": lambda: gpu_system.prompt_rows(job),
            "steps": lambda: gpu_system.steps_rows(job),
            "kernels": lambda: gpu_system.kernel_rows(job),
        }
        for part in (part for part in PARTS if part in options.parts.split(",")):
            print(f"{part} ...", file=sys.stderr, flush=True)
            rows += [{"part": part, "goal": GOALS[part], **row} for row in ways[part]()]
    return rows


def report(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write the result and the machine as Markdown and JSON."""
    about = machine(options.device)
    command = " ".join(["python", "benchmarks/gpu.py", *sys.argv[1:]])
    title, _, rest = (__doc__ or "").partition("\n\n")
    how = f"{about}; model {options.model}, {options.dtype}, medians of {options.rounds} rounds. `{command}`"
    page = [f"# {title.rstrip('.')}", rest.partition("\n\n")[2].strip(), how, table(rows, COLUMNS)]
    Path(f"{options.out}.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
    record = {"machine": about, "command": command, "model": options.model, "dtype": options.dtype, "rows": rows}
    Path(f"{options.out}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    options = options_of()
    rows = measured(options)
    print(table(rows, COLUMNS), flush=True)
    if options.out is not None:
        report(options, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(build)
    else:
        main()
