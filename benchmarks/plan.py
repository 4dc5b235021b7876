"""Compare the memory that `camshaft plan` forecasts with the memory of real engines on real ranks.

    python benchmarks/plan.py --out benchmarks/results/plan.md
    python benchmarks/plan.py --ranks 2 --feature lora

For each layout, both sides run the phases of a training step with the same roles. `live` is the peak of live tensor
bytes on rank 0, the largest difference over all phases. `growth` is the growth of the process of rank 0: its maximum
resident memory (VmHWM) minus that before the roles are built. `libraries` is the part of it that is mapped from files,
mostly code that runs for the first time. `forecast growth` adds the growth besides tensors of `camshaft plan` to the
peak of the forecast. glibc keeps freed blocks below a threshold that grows with use, so the script fixes the threshold
(MALLOC_MMAP_THRESHOLD_).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from camshaft.config import PPOConfig, compose
from camshaft.controller import Dispatch, Options, PoolSpec, Worker, register, spawn
from camshaft.controller.local import process_pool
from camshaft.models.tiny import make_tiny_model, make_tiny_tokenizer
from camshaft.planning.plan import process_growth
from camshaft.planning.trace import CRITIC, POLICY, Phase, measure
from camshaft.subprocesses import resident_memory

MB = 1 << 20
GROUPS = {POLICY: "actor_rollout_ref.actor", CRITIC: "critic"}
"""Roles that share a worker, and the config section of their engine."""
FEATURES: dict[str, tuple[int, str]] = {
    "plain": (1, ""),
    "offload": (1, "{fsdp}.param_offload=true {fsdp}.optimizer_offload=true {fsdp}.grad_offload=true"),
    "offload_policy": (1, "{fsdp}.offload_policy=true"),
    "checkpointing": (1, "{model}.enable_gradient_checkpointing=true"),
    "lora": (1, "{model}.lora_rank=8"),
    "sequence parallel 2": (2, "{role}.ulysses_sequence_parallel_size=2"),
    "tensor parallel 2": (2, "{fsdp}.tensor_parallel_size=2"),
    "hybrid shard 2": (4, "{fsdp}.fsdp_size=2"),
}
"""Overrides of each feature, and the smallest number of ranks. `reference` has those of `SINGLE` only."""
SINGLE = ("plain", "checkpointing", "lora")
COLUMNS = (
    *("engine", "ranks", "roles", "feature", "worst phase", "error of live bytes", "peak, MiB", "growth, MiB"),
    *("libraries, MiB", "forecast growth, MiB", "error of growth"),
)


class Rank(Worker):
    """Rank that runs all phases of a group of roles."""

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def measure(self, config: PPOConfig, group: str) -> tuple[list[Phase], int, int]:
        torch.set_num_threads(1)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        resident, files = resident_memory(os.getpid()), resident_memory(os.getpid(), "RssFile")
        phases = measure(config, group)
        growth = resident_memory(os.getpid(), "VmHWM") - resident
        return phases, growth, resident_memory(os.getpid(), "RssFile") - files


def overrides(folder: Path, strategy: str, ranks: int, group: str, feature: str, **sizes: int) -> list[str]:
    """Return the arguments of a run with one feature. `sizes` are those of `run_arguments`."""
    role, model = GROUPS[group], "critic.model" if group == CRITIC else "actor_rollout_ref.model"
    fsdp = "critic.model.fsdp_config" if group == CRITIC else f"{role}.fsdp_config"
    changes = FEATURES[feature][1].format(role=role, fsdp=fsdp, model=model).split()
    if group == POLICY:  # the reference reads its own offload keys
        changes += [
            c.replace(".actor.", ".ref.") for c in changes if c.split("=")[0].endswith(("param_offload", "_size"))
        ]
    return [*run_arguments(folder, strategy, ranks, **sizes), *changes]


def run_arguments(folder: Path, strategy: str, ranks: int, batch: int = 8, length: int = 64) -> list[str]:
    """Return the arguments of a run whose prompts and responses have at most `length` tokens each."""
    return [
        f"model={folder / 'model'}",
        f"data={folder / 'train.jsonl'}",
        f"actor_rollout_ref.actor.strategy={strategy}",
        f"critic.strategy={strategy}",
        "trainer.device=cpu",
        f"trainer.n_gpus_per_node={ranks}",
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.model.random_init=true",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "actor_rollout_ref.rollout.n=4",
        f"data.train_batch_size={batch}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={batch // 2}",
        f"critic.ppo_mini_batch_size={batch // 2}",
        f"data.max_prompt_length={length}",
        f"data.max_response_length={length}",
    ]


def write_inputs(folder: Path, **model: Any) -> None:
    """Write the model and the data of `run_arguments`."""
    make_tiny_model(folder / "model", **model)
    make_tiny_tokenizer(folder / "model")
    (folder / "train.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n' * 8, encoding="utf-8")


def cases() -> Iterator[tuple[str, int, str, str]]:
    for strategy, ranks in (("reference", 1), ("fsdp", 1), ("fsdp", 2), ("fsdp", 4)):
        for feature, (least, _) in FEATURES.items():
            if ranks >= least and (strategy == "fsdp" or feature in SINGLE):
                for group in GROUPS:
                    yield strategy, ranks, group, feature


def compare(arguments: list[str], group: str, ranks: int) -> dict[str, Any]:
    """Return the largest relative error of live bytes, and the measured and forecast growth in MiB."""
    (config,) = compose(arguments, PPOConfig)
    pool = process_pool(PoolSpec("plan", ranks_per_node=ranks), Options(timeout=600))
    try:
        rank: Any = spawn(Rank, pool=pool, timeout=600)  # takes and returns one entry per rank
        measured, growth, files = rank.measure([config] * ranks, [group] * ranks)[0]
    finally:
        pool.shutdown()
    code = (
        "import sys, json; from camshaft.config import PPOConfig, compose;"
        "from camshaft.planning.trace import forecast;"
        "print(json.dumps(forecast(compose(sys.argv[2:], PPOConfig)[0], sys.argv[1])))"
    )
    out = subprocess.run([sys.executable, "-c", code, group, *arguments], check=True, capture_output=True, text=True)
    planned = [Phase(*values) for values in json.loads(out.stdout.splitlines()[-1])]
    errors = {f"{p.role} {p.name}": p.peak / m.peak - 1 for p, m in zip(planned, measured, strict=True)}
    rests = {f"{p.role} {p.name} rest": p.rest / m.rest - 1 for p, m in zip(planned, measured, strict=True)}
    worst = max(errors | rests, key=lambda name: abs((errors | rests)[name]))
    live = max(phase.peak for phase in planned) / MB
    forecast_growth = live + process_growth(config, group) / MB
    return {
        "phase": worst,
        "error": (errors | rests)[worst],
        "live": live,
        "growth": growth / MB,
        "files": files / MB,
        "forecast_growth": forecast_growth,
        "growth_error": forecast_growth * MB / growth - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--strategy", choices=("reference", "fsdp"))
    parser.add_argument("--feature", choices=FEATURES)
    parser.add_argument("--out")
    options = parser.parse_args()
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, hidden=options.hidden, layers=options.layers, intermediate_size=4 * options.hidden)
        for strategy, ranks, group, feature in cases():
            selected = zip((options.strategy, options.ranks, options.feature), (strategy, ranks, feature), strict=True)
            if any(option not in (None, value) for option, value in selected):
                continue
            result = compare(overrides(folder, strategy, ranks, group, feature), group, ranks)
            roles = "actor, ref" if group == POLICY else "critic"
            lines.append(
                f"| {strategy} | {ranks} | {roles} | {feature} | {result['phase']} | {result['error']:+.3%} | "
                f"{result['live']:.1f} | {result['growth']:.1f} | {result['files']:.1f} | "
                f"{result['forecast_growth']:.1f} | {result['growth_error']:+.1%} |"
            )
            sys.stdout.write(lines[-1] + "\n")
            sys.stdout.flush()
    if options.out:
        title = f"# Forecast and measured memory\n\n{platform.machine()}, torch {torch.__version__}, gloo ranks. "
        command = "Written by `python benchmarks/plan.py`.\n\n"
        Path(options.out).write_text(title + command + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 17)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    main()
