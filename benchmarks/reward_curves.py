"""Reward curves with vLLM and with the built-in generator, over many seeds.

    python benchmarks/reward_curves.py --seeds 20 --out benchmarks/results/reward_curves
    python benchmarks/reward_curves.py --algorithms grpo --seeds 4

Each run trains a tiny model (qwen2, 128 wide, 2 layers, float32) on additions for ten steps: 16 prompts x 4 responses
of at most 16 tokens and 4 optimizer steps per step, with a learning rate of 3e-3. The reward is the share of even
digits, and 1 for the correct answer. Each seed has three runs with the same initial weights and the same order of
prompts:

- torch: the built-in generator.
- vllm: `rollout.name=vllm`, otherwise the same.
- again: torch with another `trainer.seed`, which changes the samples, the order of mini-batches and the critic's head.
  The difference between torch and again is the noise level.

Two generators sample different tokens from equal seeds, so a seed pairs only data and initial weights. The sampling
noise grows over a run: a run that finds an even digit early learns from it.

The criterion was fixed before any result was seen. Each run is reduced to its mean reward over the ten steps, the area
under its curve. The paired differences are tested with an exact two-sided sign-flip test over all 2^N sign patterns,
and the confidence interval contains the shifts that this test does not reject at 5 %. Two curves are

- different, if p is below 0.05 divided by the number of algorithms,
- same within noise, if they are not different and the whole interval lies within +-0.1,
- undecided otherwise: more seeds are needed.

Differences at single steps are reported with their standard errors and are not part of the criterion.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

from camshaft.config import load_ppo
from camshaft.data import write_arithmetic
from camshaft.models.tiny import make_tiny_model
from camshaft.trainer.ppo import PPOTrainer

STEPS = 10
LEVEL, MARGIN = 0.05, 0.1
MOST_SEEDS = 22
"""Limit of the memory for all sign patterns."""

ARMS = ("torch", "vllm", "again")
OTHER_NUMBERS = 10_000
"""Difference between the seeds of torch and of again."""

SETTINGS: dict[str, Any] = {
    "data.max_prompt_length": 16,
    "data.max_response_length": 16,
    "data.train_batch_size": 16,
    "actor_rollout_ref.actor.strategy": "reference",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 16,
    "actor_rollout_ref.actor.optim.lr": 3e-3,
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.rollout.dtype": "float32",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "critic.ppo_micro_batch_size_per_gpu": 16,
    "critic.optim.lr": 1e-3,
    "custom_reward_function.path": Path(__file__).parents[1] / "tests" / "support" / "even_digits.py",
    "custom_reward_function.num_workers": 1,
    "custom_reward_function.on_error": "raise",
    "trainer.device": "cpu",
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 1,
    "trainer.logger": "[]",
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": False,
    "trainer.default_hdfs_dir": "null",
    "trainer.resume_mode": "disable",
    "trainer.total_training_steps": STEPS,
    "trainer.total_epochs": STEPS,
}


@dataclass(frozen=True)
class Run:
    """Result of one run."""

    seed: int
    rewards: list[float]
    """Mean over the responses, for each step."""
    log_prob_diff_max: float
    """Maximum difference between the generator's and the trainer's log-prob of a token, over the run."""
    seconds: float


class Curve:
    """Tracker that keeps two metrics."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.apart: list[float] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.rewards.append(metrics["critic/score/mean"])
        self.apart.append(metrics["rollout/log_prob_diff_max"])


def train(folder: Path, algorithm: str, arm: str, seed: int) -> Run:
    """Train ten steps. All runs use the same folder, so vLLM starts once and receives new weights."""
    for name, number in (("actor", seed), ("critic", seed + 1)):
        shutil.rmtree(folder / name, ignore_errors=True)
        make_tiny_model(folder / name, hidden=128, seed=number, initializer_range=0.1)
    config = load_ppo(
        [
            f"{key}={value}"
            for key, value in {
                **SETTINGS,
                "algorithm.adv_estimator": algorithm,
                "actor_rollout_ref.rollout.name": "vllm" if arm == "vllm" else "torch",
                "data.seed": seed,
                "trainer.seed": seed + OTHER_NUMBERS * (arm == "again"),
                "data.train_files": folder / "data" / "train.parquet",
                "data.val_files": folder / "data" / "heldout.parquet",
                "actor_rollout_ref.model.path": folder / "actor",
                "critic.model.path": folder / "critic",
                "trainer.default_local_dir": folder / "run",
            }.items()
        ]
    )
    start, curve = time.perf_counter(), Curve()
    with PPOTrainer.open(config) as trainer:
        trainer.prepare()
        trainer.fit(curve)  # pyright: ignore[reportArgumentType]
    del trainer
    gc.collect()  # frees the generator and its vLLM engine
    assert len(curve.rewards) == STEPS
    return Run(seed, curve.rewards, max(curve.apart), time.perf_counter() - start)


def sign_flips(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the exact two-sided p of a mean of 0, and the ends of the 95 % interval of shifts that are not rejected.

    The means of all subsets divide the line into 2^N intervals that contain the centre of a symmetric distribution with
    equal probability (Hartigan 1969). The result omits as many of them at both ends as 5 % allows, and is infinite for
    fewer than 6 values.
    """
    sums, counts, flipped = np.zeros(1), np.zeros(1), np.zeros(1)
    for value in values:
        sums, counts = np.concatenate([sums, sums + value]), np.concatenate([counts, counts + 1])
        flipped = np.concatenate([flipped - value, flipped + value])
    p = float(np.mean(np.abs(flipped) >= abs(math.fsum(values)) - 1e-12))
    means = np.sort(sums[1:] / counts[1:])
    left_out = int(LEVEL / 2 * len(sums))
    if left_out < 1:
        return p, -math.inf, math.inf
    return p, float(means[left_out - 1]), float(means[-left_out])


@dataclass(frozen=True)
class Verdict:
    """Comparison of two arms over the whole curve."""

    one: float
    other: float
    """Mean reward of each arm over all steps and seeds."""
    difference: float
    standard_error: float
    low: float
    high: float
    p: float
    word: str


def judge(one: Sequence[Run], other: Sequence[Run], level: float) -> Verdict:
    """Compare two arms by the criterion of the module docstring."""
    areas = [[statistics.fmean(run.rewards) for run in runs] for runs in (one, other)]
    differences = [b - a for a, b in zip(*areas, strict=True)]
    p, low, high = sign_flips(differences)
    word = "different" if p < level else "same within noise" if low > -MARGIN and high < MARGIN else "undecided"
    mean, error = mean_and_error(differences)
    return Verdict(statistics.fmean(areas[0]), statistics.fmean(areas[1]), mean, error, low, high, p, word)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def step_lines(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """Table rows, one per step."""
    heads = ["step", *ARMS, "vllm - torch", "again - torch"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for step in range(STEPS):
        at = {arm: [run.rewards[step] for run in runs[arm]] for arm in ARMS}
        columns = [at[arm] for arm in ARMS]
        columns += [[b - a for a, b in zip(at["torch"], at[arm], strict=True)] for arm in ARMS[1:]]
        statistics_per_column = [mean_and_error(values) for values in columns]
        cells = [f"{mean:.3f} +- {error:.3f}" for mean, error in statistics_per_column[:3]]
        cells += [f"{mean:+.3f} +- {error:.3f}" for mean, error in statistics_per_column[3:]]
        lines.append(f"| {step + 1} | " + " | ".join(cells) + " |")
    return lines


def verdict_lines(verdicts: Mapping[str, Mapping[str, Verdict]]) -> list[str]:
    """Table rows, one per algorithm and pair."""
    heads = ["algorithm", "pair", "mean reward", "difference", "95 % interval", "p", "verdict"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for algorithm, pairs in verdicts.items():
        for pair, verdict in pairs.items():
            cells = [algorithm, pair, f"{verdict.other:.3f}, {verdict.one:.3f}"]
            cells += [f"{verdict.difference:+.4f} +- {verdict.standard_error:.4f}"]
            cells += [f"{verdict.low:+.4f} to {verdict.high:+.4f}", f"{verdict.p:.3f}", f"**{verdict.word}**"]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def write(out: Path, runs: Mapping[str, Mapping[str, list[Run]]], seeds: int) -> None:
    """Write the tables as Markdown, and all data as JSON."""
    verdicts = {
        algorithm: {f"{arm}, torch": judge(arms["torch"], arms[arm], LEVEL / len(runs)) for arm in ("vllm", "again")}
        for algorithm, arms in runs.items()
    }
    text = ["# Reward curves with vLLM and with the built-in generator", ""]
    text += [(__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip(), ""]
    text += [f"{machine()}; 1 thread, {seeds} seeds.", f"`python benchmarks/reward_curves.py --seeds {seeds}`", ""]
    text += ["Over the whole curve, with standard errors:", "", *verdict_lines(verdicts), ""]
    for algorithm, arms in runs.items():
        apart = ", ".join(f"{arm} {max(run.log_prob_diff_max for run in arms[arm]):.1e}" for arm in ARMS)
        spent = ", ".join(f"{arm} {statistics.median(run.seconds for run in arms[arm]):.1f}" for arm in ARMS)
        text += [f"## {algorithm}", "", f"Mean reward of each step over {seeds} seeds, with standard errors:", ""]
        text += [*step_lines(arms), ""]
        text += [f"Maximum difference between the generator's and the trainer's log-prob of a token: {apart}.", ""]
        text += [f"Median seconds per run: {spent}.", ""]
    print("\n".join(text))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text("\n".join(text), encoding="utf-8")
    record = {
        "machine": machine(),
        "settings": {key: value for key, value in SETTINGS.items() if not isinstance(value, Path)},
        "verdicts": {name: {pair: asdict(v) for pair, v in pairs.items()} for name, pairs in verdicts.items()},
        "runs": {name: {arm: [asdict(run) for run in arms[arm]] for arm in ARMS} for name, arms in runs.items()},
    }
    out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=8, help=f"2 to {MOST_SEEDS}")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--algorithms", default="grpo,gae", help="values of algorithm.adv_estimator")
    parser.add_argument("--out", default="reward_curves", help="path of the output, to which .md and .json are added")
    options = parser.parse_args()
    if not 2 <= options.seeds <= MOST_SEEDS:
        parser.error(f"--seeds is 2 to {MOST_SEEDS}")
    runs: dict[str, dict[str, list[Run]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_arithmetic(folder / "data", left=(0, 20), right=(0, 20), num_train=64, num_heldout=16)
        for algorithm in options.algorithms.split(","):
            arms = runs[algorithm] = {arm: [] for arm in ARMS}
            for seed in range(options.first_seed, options.first_seed + options.seeds):
                for arm in ARMS:
                    arms[arm].append(run := train(folder, algorithm, arm, seed))
                    curve = " ".join(f"{reward:.2f}" for reward in run.rewards)
                    print(f"{algorithm} seed {seed} {arm:5} {curve}  {run.seconds:.1f} s", flush=True)
    write(Path(options.out), runs, options.seeds)


if __name__ == "__main__":
    if "OMP_NUM_THREADS" not in os.environ:
        fixed = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | fixed)
    main()
