"""Learning runs of PPO and GRPO: three tasks, five seeds each, with goals stated below before the runs.

    python benchmarks/learning.py --out docs/results.md
    python benchmarks/learning.py --task gcd --algorithms grpo --seeds 1
    python benchmarks/learning.py --staleness 0,1,4 --seeds 3 --jobs 1 --out docs/results.md

For each task, `camshaft sft` warms up a tiny random model on text in which six of ten answers contain the same mistake.
From there `camshaft ppo` trains it with GAE and a critic (PPO) and with GRPO, once per seed. The result is the share of
held-out problems that the greedy response solves, before the first and after the last step. A run reaches its goal if
it starts at `start` or below and ends at `goal` or above.

All runs are ordinary commands, which the JSON contains in a form that can be typed. Finished runs stay in the folder
`--work`, so the same command resumes after an interruption; runs with other settings or problems are repeated. Two runs
execute concurrently (`--jobs`), with one thread each. With `--staleness`, each run is repeated with each bound, and the
section of the page about staleness is written instead of the rest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from learning_page import Run, Task, page, reached, result_table, staleness_section, staleness_table, verdict
from machine import machine

from camshaft.data import write_arithmetic
from camshaft.data.reasoning_gym import write_reasoning_gym
from camshaft.data.tables import read_rows, write_parquet
from camshaft.models.tiny import make_tiny_model

RESULTS = Path(__file__).parent / "results" / "learning.json"
STALENESS = "learning_staleness.json"
"""File beside `RESULTS` with the runs of several bounds of staleness."""
RESULT = "result.json"
"""File in the folder of a finished run. The run itself writes a file `run.json`."""
NUM_HELDOUT = 256
MISTAKEN = 0.6
"""Share of the warm-up answers that contain the mistake."""
FIXED_SEED = 1
"""Seed of problems, initial weights and warm-up. The seeds of runs apply after the warm-up."""


def ends_swapped(backward: str) -> str:
    """Given a word's reversal, return the word with only its ends swapped: `lnug` -> `lung` for the word `gunl`."""
    return backward if len(backward) < 2 else backward[0] + backward[-2:0:-1] + backward[-1]


TASKS = {
    "arithmetic": Task(
        source="camshaft/arithmetic",
        about="Sums of two two-digit numbers. The mistake: carries are dropped (57+68=15).",
        num_train=7000,
        settings={"left": (10, 99), "right": (10, 99), "careless": MISTAKEN},
        longest_prompt=16,
        hidden=96,
        warm_up=800,
        steps=40,
        start=0.5,
        goal=0.85,
    ),
    "spell_backward": Task(
        source="reasoning_gym/spell_backward",
        about="Spell words of three or four letters backwards. The score is the share of letters in place, minus a "
        "penalty for extra letters. The mistake: only the first and the last letter are swapped.",
        num_train=3000,
        settings={"min_word_len": 3, "max_word_len": 4},
        longest_prompt=60,
        hidden=64,
        warm_up=300,
        steps=120,
        start=0.4,
        goal=0.6,
        mistake=ends_swapped,
    ),
    "gcd": Task(
        source="reasoning_gym/gcd",
        about="The greatest common divisor of two numbers up to 60. The mistake: the answer is always 1.",
        num_train=2000,
        settings={"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 60},
        longest_prompt=112,
        hidden=64,
        warm_up=250,
        steps=40,
        start=0.4,
        goal=0.5,
        mistake=lambda answer: "1",
    ),
}


def model(name: str) -> dict[str, Any]:
    """Return the model sizes of a task."""
    hidden = TASKS[name].hidden
    return {"hidden": hidden, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 3 * hidden}


WARM_UP: dict[str, Any] = {
    "strategy": "reference",
    "data.val_files": "null",
    "data.max_length": 128,
    "data.train_batch_size": 64,
    "data.micro_batch_size_per_gpu": 64,
    "optim.lr": 3e-3,
    "optim.lr_scheduler_type": "cosine",
    "optim.min_lr_ratio": 0.1,
    "trainer.device": "cpu",
    "trainer.logger": "[jsonl]",
    "trainer.resume_mode": "disable",
    "trainer.total_epochs": 1000,
    "trainer.seed": FIXED_SEED,
}

TRAINING: dict[str, Any] = {
    "data.train_batch_size": 32,
    "data.val_batch_size": NUM_HELDOUT,
    "data.max_response_length": 6,
    "actor_rollout_ref.actor.strategy": "reference",
    "actor_rollout_ref.actor.optim.lr": 5e-4,
    "actor_rollout_ref.actor.entropy_coeff": 0.0,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 64,
    "actor_rollout_ref.rollout.name": "torch",
    "actor_rollout_ref.rollout.dtype": "float32",
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 128,
    "custom_reward_function.num_workers": 1,
    "custom_reward_function.on_error": "raise",
    "trainer.device": "cpu",
    "trainer.n_gpus_per_node": 1,
    "trainer.logger": "[jsonl]",
    "trainer.test_freq": 20,
    "trainer.resume_mode": "disable",
    "trainer.total_epochs": 1000,
}
"""Settings of both algorithms, without a KL penalty in the reward or in the loss."""

ALGORITHMS: dict[str, dict[str, Any]] = {
    "gae": {
        "algorithm.adv_estimator": "gae",
        "critic.strategy": "reference",
        "critic.optim.lr": 1e-3,
        "critic.ppo_micro_batch_size_per_gpu": 64,
    },
    "grpo": {"algorithm.adv_estimator": "grpo"},
}

STALE: dict[str, Any] = {"algorithm.rollout_correction.bypass_mode": True}
"""Further settings of runs whose `async_training.max_staleness` is above 0: the correction."""


# -- problems and warm-up -------------------------------------------------------------------------


FILES = ("train.parquet", "heldout.parquet", "warm_up.parquet")


def write_problems(name: str, folder: Path) -> None:
    """Write `FILES`; the last one has the problems of the first one with answers."""
    task = TASKS[name]
    sizes: dict[str, Any] = {"num_train": task.num_train, "num_heldout": NUM_HELDOUT, "seed": FIXED_SEED}
    if task.mistake is None:
        written = write_arithmetic(folder, **sizes, **task.settings)
        written.sft_train.replace(folder / "warm_up.parquet")
        return
    paths = write_reasoning_gym(folder, name, **sizes, settings=task.settings)
    columns = ["data_source", "prompt", "reward_model", "extra_info"]
    train, heldout = (read_rows(path, columns).rows for path in (paths.train, paths.test))
    kept_out = {question(row) for row in heldout}
    train = [row for row in train if question(row) not in kept_out]
    write_parquet(folder / "train.parquet", train)
    paths.test.replace(folder / "heldout.parquet")
    chance = random.Random(FIXED_SEED)
    answered = []
    for row in train:
        right = row["reward_model"]["ground_truth"]
        answer = task.mistake(right) if chance.random() < MISTAKEN else right
        answered.append({"prompt": row["prompt"], "response": answer})
    write_parquet(folder / "warm_up.parquet", answered)


def question(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the sorted words of a problem. "12, 18" and "18, 12" are equal: both are held out, or none is."""
    return tuple(sorted(re.findall(r"\w+", row["prompt"][-1]["content"])))


def warm_up_command(name: str, work: Path) -> list[str]:
    settings = {
        "model.path": work / name / "model",
        "data.train_files": work / name / "data" / "warm_up.parquet",
        "trainer.total_training_steps": TASKS[name].warm_up,
        "trainer.default_local_dir": work / name / "warm_up",
    }
    return command("sft", WARM_UP | settings)


def warm_up(name: str, work: Path) -> None:
    """Train the initial model of a task's runs, unless it exists."""
    folder, args = work / name, warm_up_command(name, work)
    kept, inputs = folder / "warm_up" / RESULT, inputs_of(name, work, args)
    if finished(kept, inputs) is None:
        make_tiny_model(folder / "model", **model(name), seed=FIXED_SEED, initializer_range=0.06)
        seconds, cpu_seconds = camshaft(args, folder / "warm_up.log")
        keep(kept, inputs, {"seconds": seconds, "cpu_seconds": cpu_seconds})
        print(f"{name} is warmed up, {seconds:.0f} s", flush=True)


# -- runs -----------------------------------------------------------------------------------------


def folder_of(name: str, algorithm: str, seed: int, work: Path, max_staleness: int) -> Path:
    return work / name / (f"{algorithm}_{seed}" + (f"_stale_{max_staleness}" if max_staleness else ""))


def training_command(name: str, algorithm: str, seed: int, work: Path, max_staleness: int = 0) -> list[str]:
    task, folder = TASKS[name], work / name
    settings = {
        "data.train_files": folder / "data" / "train.parquet",
        "data.val_files": folder / "data" / "heldout.parquet",
        "data.max_prompt_length": task.longest_prompt,
        "actor_rollout_ref.model.path": folder / "warm_up" / "huggingface",
        "trainer.total_training_steps": task.steps,
        "trainer.default_local_dir": folder_of(name, algorithm, seed, work, max_staleness),
        "trainer.seed": seed,
    }
    if algorithm == "gae":
        settings["critic.model.path"] = settings["actor_rollout_ref.model.path"]
    if max_staleness:
        settings |= {"async_training.max_staleness": max_staleness, **STALE}
    return command("ppo", TRAINING | ALGORITHMS[algorithm] | settings)


def train(name: str, algorithm: str, seed: int, work: Path, max_staleness: int = 0) -> Run:
    """Execute one run, unless it is finished."""
    args = training_command(name, algorithm, seed, work, max_staleness)
    folder = folder_of(name, algorithm, seed, work, max_staleness)
    before = warm_up_command(name, work)
    kept, inputs = folder / RESULT, inputs_of(name, work, before, args)
    result = finished(kept, inputs)
    if result is None:
        shutil.rmtree(folder, ignore_errors=True)  # remains of an interrupted run
        seconds, cpu_seconds = camshaft(args, folder.with_suffix(".log"))
        curves = read_curves(folder / "metrics.jsonl", TASKS[name].source)
        run = Run(name, algorithm, seed, *curves, seconds, cpu_seconds, max_staleness)
        result = keep(kept, inputs, asdict(run))
        label = folder.relative_to(work)
        print(f"{label}: {run.correct[0]:.3f} to {run.correct[-1]:.3f}, {seconds:.0f} s", flush=True)
    return Run(**result)


def read_curves(path: Path, source: str) -> tuple[list[int], list[float], list[float], list[float]]:
    """Return steps, correct shares and scores of the validations, and the sampled score of each step."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    right = f"val-aux/{source}/correct/mean@1"
    tried = [line for line in lines if right in line]
    return (
        [line["step"] for line in tried],
        [line[right] for line in tried],
        [line["val/reward/mean"] for line in tried],
        [round(line["critic/score/mean"], 4) for line in lines if "critic/score/mean" in line],
    )


def command(name: str, settings: Mapping[str, Any]) -> list[str]:
    return [name, *(f"{key}={value}" for key, value in settings.items())]


def camshaft(args: Sequence[str], log: Path) -> tuple[float, float]:
    """Run a camshaft command and return its wall seconds and the CPU seconds of all its processes."""
    log.parent.mkdir(parents=True, exist_ok=True)
    start_time = time.perf_counter()
    with open(log, "w", encoding="utf-8") as out:
        process = subprocess.Popen([sys.executable, "-m", "camshaft", *args], stdout=out, stderr=out)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"status {process.returncode}, {log}: {log.read_text(encoding='utf-8')[-2000:]}")
    return time.perf_counter() - start_time, usage.ru_utime + usage.ru_stime


def inputs_of(name: str, work: Path, *commands: Sequence[str]) -> dict[str, Any]:
    """Return everything that determines the outcome, except for the code."""
    problems = {file: hashlib.sha256((work / name / "data" / file).read_bytes()).hexdigest() for file in FILES}
    return {"problems": problems, "model": model(name), "commands": commands}


def finished(path: Path, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the stored result of a run with the same inputs, or None."""
    if not path.exists():
        return None
    kept = json.loads(path.read_text(encoding="utf-8"))
    return kept["result"] if kept["inputs"] == json.loads(json.dumps(inputs)) else None


def keep(path: Path, inputs: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Store a result atomically."""
    half = path.with_suffix(".part")
    half.write_text(json.dumps({"inputs": inputs, "result": result}, indent=1) + "\n", encoding="utf-8")
    half.replace(path)
    return result


def write(out: Path, runs: Sequence[Run], work: Path) -> None:
    """Write the page and its data."""
    ran = dict.fromkeys((run.task, run.algorithm) for run in runs)
    first = [warm_up_command(name, work) for name in dict.fromkeys(name for name, _ in ran)]
    first += [training_command(name, algorithm, 0, work) for name, algorithm in ran]
    record = {
        "machine": machine(),
        "stated": {name: {"start": task.start, "goal": task.goal} for name, task in TASKS.items()},
        "models": {name: model(name) for name in TASKS},
        "commands": [shlex.join(["camshaft", *args]) for args in first],
        "runs": [asdict(run) | {"reached": reached(TASKS[run.task], run)} for run in runs],
    }
    RESULTS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    write_page(out)


def write_staleness(out: Path, runs: Sequence[Run], work: Path) -> None:
    """Write the runs of several bounds of staleness, and the page with them."""
    ran = dict.fromkeys((run.task, run.algorithm, run.max_staleness) for run in runs)
    commands = [training_command(name, algorithm, 0, work, bound) for name, algorithm, bound in ran]
    record = {
        "machine": machine(),
        "commands": [shlex.join(["camshaft", *args]) for args in commands],
        "runs": [asdict(run) for run in runs],
    }
    RESULTS.with_name(STALENESS).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    write_page(out)


def write_page(out: Path) -> None:
    """Write the page from its data."""
    record, runs = stored(RESULTS)
    blocks = [ALGORITHMS[name] for name in ALGORITHMS if any(run.algorithm == name for run in runs)]
    settings = "\n\n".join("\n".join(command("", block)[1:]) for block in (TRAINING, *blocks))
    staleness = ""
    if (file := RESULTS.with_name(STALENESS)).exists():
        stale_record, stale_runs = stored(file)
        staleness = staleness_section(TASKS, stale_runs, command("", STALE)[1:], stale_record["machine"])
    about = {"mistaken": MISTAKEN, "heldout": NUM_HELDOUT, "settings": settings, "machine": record["machine"]}
    out.write_text(page(TASKS, runs, staleness=staleness, **about), encoding="utf-8")


def stored(file: Path) -> tuple[dict[str, Any], list[Run]]:
    """Return a file of results and its runs."""
    record, names = json.loads(file.read_text(encoding="utf-8")), {field.name for field in fields(Run)}
    return record, [Run(**{key: value for key, value in run.items() if key in names}) for run in record["runs"]]


def some_of(choices: Mapping[str, Any], text: str) -> list[str]:
    """Parse comma-separated names for argparse."""
    names = text.split(",")
    if unknown := [name for name in names if name not in choices]:
        raise argparse.ArgumentTypeError(f"unknown name '{unknown[0]}'; use {', '.join(choices)}")
    return names


def bounds(text: str) -> list[int]:
    return [int(bound) for bound in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--task", type=partial(some_of, TASKS), default=list(TASKS), help=", ".join(TASKS))
    parser.add_argument(
        "--algorithms", type=partial(some_of, ALGORITHMS), default=list(ALGORITHMS), help=", ".join(ALGORITHMS)
    )
    parser.add_argument("--staleness", type=bounds, default=[0], help="bounds of staleness, separated by commas")
    parser.add_argument("--seeds", type=int, default=5, help="runs per task and algorithm (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="concurrent runs (%(default)s)")
    parser.add_argument("--work", type=Path, default=Path("outputs/learning"), help="folder of the runs (%(default)s)")
    parser.add_argument("--out", type=Path, help=f"write the page here, and {RESULTS.name} beside this script")
    options = parser.parse_args()
    if min(options.seeds, options.jobs) < 1:
        parser.error("--seeds and --jobs are at least 1")
    if options.staleness != [0] and (0 not in options.staleness or options.seeds < 2):
        parser.error("--staleness compares with 0, and takes the deviation of at least 2 seeds")
    for name in options.task:
        write_problems(name, options.work / name / "data")
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(partial(warm_up, work=options.work), options.task))
        every = product(options.task, options.algorithms, range(options.seeds), options.staleness)
        runs = list(pool.map(lambda run: train(run[0], run[1], run[2], options.work, run[3]), every))
    if options.staleness == [0]:
        print("\n".join([verdict(TASKS, runs), "", result_table(TASKS, runs)]))
    else:
        print(staleness_table(TASKS, runs))
    if options.out:
        (write if options.staleness == [0] else write_staleness)(options.out, runs, options.work)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
