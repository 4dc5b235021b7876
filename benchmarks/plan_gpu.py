"""Compare the memory that `camshaft plan` forecasts for a GPU with the memory that the same phases use on one.

    python benchmarks/plan_gpu.py --out benchmarks/results/plan_gpu.md        # on a CUDA machine, some minutes
    python benchmarks/plan_gpu.py --case plain --shape tiny

Each case runs in a process of its own: the roles of a group with their engines on one rank, and batches whose rows have
the maximum length. `measured` is the peak of the tensors of torch's allocator during a phase. `reserved beyond the
peak` is the largest memory that the allocator has reserved minus the largest peak: fragmentation and cached blocks.
`outside of the allocator` is the other memory in use on the device, such as the CUDA context and the libraries. The
forecast needs no GPU; it runs in a process beside the measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from machine import machine
from plan import run_arguments, write_inputs

from camshaft.config import PPOConfig, compose
from camshaft.planning.tensor_memory import Part
from camshaft.planning.trace import CRITIC, POLICY, Phase, forecast, measure

MB = 1 << 20
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {
        "hidden": 896, "layers": 24, "heads": 14, "kv_heads": 2, "intermediate": 4864, "vocab_size": 151_936,
        "max_position_embeddings": 8192,
    },
    "tiny": {"hidden": 64, "layers": 8, "heads": 4, "kv_heads": 2},
}  # fmt: skip
"""The first is the shape of Qwen2.5-0.5B."""
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
CASES: dict[str, tuple[str, list[str]]] = {
    "plain": (POLICY, []),
    "compiled": (POLICY, [f"{ACTOR}.use_torch_compile=true"]),
    "activation checkpointing": (POLICY, [f"{MODEL}.enable_gradient_checkpointing=true"]),
    "offload": (
        POLICY,
        [f"{ACTOR}.fsdp_config.{name}=true" for name in ("param_offload", "grad_offload", "optimizer_offload")]
        + ["actor_rollout_ref.ref.fsdp_config.param_offload=true"],
    ),
    "float32": (POLICY, [f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=null"]),
    "lora": (POLICY, [f"{MODEL}.lora_rank=16"]),
    "reference engine": (POLICY, [f"{ACTOR}.strategy=reference"]),
    "plain, critic": (CRITIC, []),
}
"""Group of roles and overrides of each case."""


class DeviceMemory:
    """The memory of the device, with the interface of `TensorMemory` that the phases use."""

    computes = True

    def __init__(self) -> None:
        self.reserved = 0
        """Maximum of the memory that the allocator has reserved."""

    @property
    def live(self) -> int:
        return torch.cuda.memory_allocated()

    @property
    def parts(self) -> list[Part]:
        return [Part(None, torch.cuda.max_memory_allocated(), 0)]

    def reset_peak(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def mark(self, _label: None) -> None:
        torch.cuda.synchronize()
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())

    def on_host(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def arguments(folder: Path, shape: str, extra: list[str]) -> list[str]:
    """Return the arguments of a PPO run with a reference on one GPU."""
    length = 1024 if shape != "tiny" else 64
    on_cpu = {"trainer.device=cpu", "actor_rollout_ref.model.random_init=true"}
    common = [word for word in run_arguments(folder, "fsdp", ranks=1, batch=16, length=length) if word not in on_cpu]
    return [
        *common,
        "trainer.device=cuda",
        f"{ACTOR}.use_torch_compile=false",
        "critic.use_torch_compile=false",
        "actor_rollout_ref.rollout.name=torch",
        *extra,
    ]


def run_case(case: str, words: list[str], mode: str) -> dict[str, Any]:
    """Forecast the phases of a case, or measure them."""
    group = CASES[case][0]
    (config,) = compose(words, PPOConfig)
    if mode == "forecast":
        return {"phases": forecast(config, group)}
    memory = DeviceMemory()
    phases = measure(config, group, memory)
    free, total = torch.cuda.mem_get_info()
    return {
        "phases": phases,
        "reserved": memory.reserved - max(phase.peak for phase in phases),
        "outside": total - free - torch.cuda.memory_reserved(),
    }


def compare(case: str, measured: dict[str, Any] | None, planned: dict[str, Any]) -> list[str]:
    """Return the table rows of a case, one per phase."""
    rows = []
    for number, entry in enumerate(planned["phases"]):
        phase = Phase(*entry)
        row = [case, f"{phase.role} {phase.name}", f"{phase.peak / MB:.0f}", "needs CUDA", ""]
        if measured is not None:
            actual = Phase(*measured["phases"][number])
            assert (actual.role, actual.name) == (phase.role, phase.name), (actual, phase)
            row[3:] = [f"{actual.peak / MB:.0f}", f"{phase.peak / actual.peak - 1:+.1%}"]
        rows.append(f"| {' | '.join(row)} |")
    if measured is not None:
        rest = [f"{measured[name] / MB:.0f}" for name in ("reserved", "outside")]
        rows.append(f"| {case} | reserved beyond the peak, and outside of the allocator | | {' and '.join(rest)} | |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--out")
    parser.add_argument("--run", nargs=2, metavar=("MODE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None:
        mode, folder = options.run
        case = options.case[0]
        words = arguments(Path(folder), options.shape, CASES[case][1])
        sys.stdout.write("\n" + json.dumps(run_case(case, words, mode)) + "\n")
        return
    columns = ("case", "phase", "forecast, MiB", "measured, MiB", "error")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name), **SHAPES[options.shape])
        modes = ["forecast", *(["measure"] if torch.cuda.is_available() else [])]
        for case in options.case or CASES:
            started = {
                mode: subprocess.Popen(
                    [sys.executable, __file__, "--shape", options.shape, "--case", case, "--run", mode, name],
                    stdout=subprocess.PIPE, text=True,
                )
                for mode in modes
            }  # fmt: skip
            results = {mode: _result(process) for mode, process in started.items()}
            rows = compare(case, results.get("measure"), results["forecast"])
            lines += rows
            sys.stdout.write("\n".join(rows) + "\n")
            sys.stdout.flush()
    if options.out:
        title, _, rest = (__doc__ or "").partition("\n\n")
        about = f"{machine('cuda')}. Model in the shape of {options.shape}, random weights."
        page = [f"# {title.rstrip('.')}", rest.partition("\n\n")[2].strip(), about, "\n".join(lines)]
        Path(options.out).write_text("\n\n".join(page) + "\n", encoding="utf-8")


def _result(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=600)
    if process.returncode:
        raise SystemExit(f"a case failed with exit code {process.returncode}")
    return json.loads(out.splitlines()[-1])


if __name__ == "__main__":
    main()
