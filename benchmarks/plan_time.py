"""Compare the step time that `camshaft plan --like` forecasts with measured ones.

    python benchmarks/plan_time.py --rounds 3 --out benchmarks/results/plan_step_time.md

Each round runs every model and batch size once, one after another, for a few steps. A forecast is compared with a run
of the same round, so that other work on the machine affects both. Every response has the maximum length.

With `--clock cpu`, the timers of the runs count the CPU time of their process, which has one thread. This is the time
on an idle machine, as long as no phase waits for another process.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import permutations
from pathlib import Path

import torch
import workload

from camshaft.config import PPOConfig, compose
from camshaft.data.tables import write_parquet
from camshaft.models.tiny import VOCABULARY_ROWS, make_tiny_model
from camshaft.planning.step_time import WARM_UP, forecast_times, measured_times
from camshaft.tracking.run_folder import RunFolder

MODELS = ("1M", "4M", "18M")
BATCHES = (2, 4)
"""Prompts per step."""
STEPS = WARM_UP + 2
PHASES = ("gen", "old_log_prob", "ref", "update_actor")
PROGRAM = """
import sys, time, types
from camshaft.trainer import metrics
if sys.argv[1] == "cpu":
    metrics.time = types.SimpleNamespace(time=time.time, perf_counter=time.process_time)
from camshaft.cli import main
if __name__ == "__main__":
    sys.exit(main(["ppo", *sys.argv[2:]]))
"""
"""A run whose timers count seconds of a clock."""
Case = tuple[str, int]
"""Model and number of prompts per step."""


def overrides(folder: Path, case: Case) -> list[str]:
    """Return the arguments of a GRPO run with a reference model on one process."""
    model, batch = case
    return [
        f"model={folder / model}",
        f"data={folder / 'train.parquet'}",
        "val_data=null",
        "algorithm=grpo",
        f"reward={Path(__file__).parent / 'even_letters.py'}",
        "engine=reference",
        "rollout=torch",
        "device=cpu",
        "devices=1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.ignore_eos=true",
        f"actor_rollout_ref.rollout.n={workload.SAMPLES}",
        "actor_rollout_ref.actor.use_kl_loss=true",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={batch // 2}",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={workload.TOKEN_BUDGET}",
        f"data.train_batch_size={batch}",
        f"data.max_prompt_length={workload.LONGEST_PROMPT}",
        f"data.max_response_length={workload.LONGEST_ANSWER}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.total_epochs=100",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.logger=[jsonl]",
    ]


def run(folder: Path, case: Case, name: str, clock: str) -> RunFolder:
    """Run a case, and return its folder."""
    out = folder / name
    arguments = [*overrides(folder, case), f"trainer.default_local_dir={out}"]
    subprocess.run([sys.executable, "-c", PROGRAM, clock, *arguments], check=True, stdout=subprocess.DEVNULL)
    return RunFolder(out)


def write_inputs(folder: Path, models: Sequence[str]) -> None:
    """Write the models and the prompts."""
    for model in models:
        make_tiny_model(folder / model, **asdict(replace(workload.SHAPES[model], vocab_size=VOCABULARY_ROWS)))
    rows = [{"prompt": text, "data_source": "letters"} for text in workload.prompt_texts(1)]
    write_parquet(folder / "train.parquet", rows)


def compare(models: Sequence[str], rounds: int, clock: str) -> dict[tuple[Case, Case], dict[str, list[float]]]:
    """Return forecast / measured of all rounds, for each planned case, earlier case and phase."""
    ratios: dict[tuple[Case, Case], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    cases = [(model, batch) for model in models for batch in BATCHES]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, models)
        for number in range(rounds):
            order = cases if number % 2 == 0 else cases[::-1]
            runs = {case: run(folder, case, f"{case[0]}-{case[1]}-{number}", clock) for case in order}
            for planned, earlier in permutations(cases, 2):
                if (planned[0] == earlier[0]) == (planned[1] == earlier[1]):
                    continue  # both model and batch differ
                (config,) = compose(overrides(folder, planned), PPOConfig)
                times, measured = forecast_times(config, runs[earlier].path), measured_times(runs[planned])
                for phase in PHASES:
                    if phase in measured:
                        ratios[planned, earlier][phase].append(times.phases[phase] / measured[phase])
                ratios[planned, earlier]["step"].append(times.step / sum(measured.values()))
            sys.stdout.write(f"round {number + 1} of {rounds}\n")
            sys.stdout.flush()
    return ratios


def table(ratios: dict[tuple[Case, Case], dict[str, list[float]]]) -> list[str]:
    """Format the medians over the rounds, and the lowest and the highest ratio of the step."""
    names = [phase for phase in (*PHASES, "step") if any(phase in each for each in ratios.values())]
    lines = [f"| planned | --like | {' | '.join(names)} | lowest, highest step |", "|---" * (len(names) + 3) + "|"]
    for (planned, earlier), values in ratios.items():
        medians = " | ".join(f"{statistics.median(values[name]):.2f}" for name in names)
        bounds = f"{min(values['step']):.2f}, {max(values['step']):.2f}"
        lines.append(f"| {_name(planned)} | {_name(earlier)} | {medians} | {bounds} |")
    return lines


def _name(case: Case) -> str:
    return f"{case[0]}, {case[1]} prompts"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--out")
    options = parser.parse_args()
    ratios = compare(options.models.split(","), options.rounds, options.clock)
    lines = table(ratios)
    sys.stdout.write("\n".join(lines) + "\n")
    if options.out:
        title = (
            "# Forecast and measured time of a step\n\n"
            f"{platform.machine()}, torch {torch.__version__}, {os.environ.get('OMP_NUM_THREADS')} thread. "
            f"Medians of forecast / measured over {options.rounds} rounds of {STEPS} steps, of which the first "
            f"{WARM_UP} do not count. Written by `python benchmarks/plan_time.py --models {options.models} --rounds "
            f"{options.rounds} --clock {options.clock}`.\n\n"
        )
        Path(options.out).write_text(title + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
