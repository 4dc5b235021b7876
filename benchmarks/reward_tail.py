"""Wall time saved by scoring responses while slower ranks still generate.

    python benchmarks/reward_tail.py --out benchmarks/results/reward_tail.md

Runs steps of the real trainer with a tiny policy on two process ranks. Each rank sleeps after generation, to simulate a
device with longer responses. Each call of the reward function sleeps, to simulate a judge or a sandbox. The result
therefore shows dependencies between the phases, not the speed of this machine.

Every second step scores after all ranks have finished, as batch reward functions require. This step and the next one
form a pair. The table has medians over the pairs: seconds of the whole step, and the ratio within a pair.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from camshaft.config import PPOConfig, load_ppo
from camshaft.data import write_arithmetic
from camshaft.dataproto import DataProto, Ragged
from camshaft.models.tiny import make_tiny_model
from camshaft.rewards.manager import PendingScores
from camshaft.rollout import Generation, SamplingParams
from camshaft.rollout.builtin.rollout import TorchRollout
from camshaft.trainer.metrics import StepMetrics
from camshaft.trainer.ppo import PPOTrainer

ROWS, WORKERS = 32, 4
CASES = [
    ((1.0, 3.0), 0.0),
    ((1.0, 3.0), 0.1),
    ((1.0, 3.0), 0.4),
    ((2.0, 2.0), 0.1),
    ((2.0, 2.0), 0.4),
]
"""Seconds per rank, seconds per call."""
SLEEPS = "CAMSHAFT_BENCHMARK_SLEEPS"
"""Environment variable: path of the file with the seconds of the first rank, of the second, and of a call."""

REWARD = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(float(open({sleeps!r}).read().split()[2]))
    return len(solution_str) / 8
"""


class UnevenRollout(TorchRollout):
    """The built-in generator on ranks of different speed."""

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        generated = super().generate_sequences(prompts, sampling, seeds)
        time.sleep(float(Path(os.environ[SLEEPS]).read_text().split()[dist.get_rank()]))
        return generated


def config_in(folder: Path) -> PPOConfig:
    make_tiny_model(folder / "model", hidden=32)
    write_arithmetic(folder / "data", left=(0, 20), right=(0, 20), num_train=256, num_heldout=16)
    (folder / "reward.py").write_text(REWARD.format(sleeps=os.environ[SLEEPS]))
    return load_ppo(
        [
            f"data.train_files={folder}/data/train.parquet",
            f"data.val_files={folder}/data/heldout.parquet",
            "data.max_prompt_length=16",
            "data.max_response_length=8",
            f"data.train_batch_size={ROWS}",
            "algorithm.adv_estimator=reinforce_plus_plus",
            f"actor_rollout_ref.model.path={folder}/model",
            "actor_rollout_ref.actor.strategy=fsdp",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={ROWS}",
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={ROWS // 2}",
            "actor_rollout_ref.rollout.name=reward_tail:UnevenRollout",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
            f"custom_reward_function.path={folder}/reward.py",
            f"custom_reward_function.num_workers={WORKERS}",
            "trainer.device=cpu",
            "trainer.n_gpus_per_node=2",
            "trainer.total_epochs=1000",
            f"trainer.default_local_dir={folder}/run",
        ]
    )


def seconds_of(trainer: PPOTrainer, prompts: DataProto) -> float:
    trainer.global_step += 1
    metrics = StepMetrics(trainer.status)
    return trainer.step(trainer.collect(prompts, metrics), metrics)["timing_s/step"]


def nothing_begins(rows: DataProto) -> PendingScores | None:
    """Replace `RewardManager.begin`, so that `score` makes all calls, as for batch reward functions."""
    return None


def measured(trainer: PPOTrainer, pairs: int) -> list[list[str]]:
    rewards, prompts = trainer.parts.rewards, iter(trainer.parts.loader)
    begins = rewards.begin
    rows = []
    for ranks, call in CASES:
        Path(os.environ[SLEEPS]).write_text(f"{ranks[0]} {ranks[1]} {call}")
        seconds: list[tuple[float, float]] = []
        for _ in range(pairs + 1):
            pair = []
            for begin in (nothing_begins, begins):
                rewards.begin = begin  # pyright: ignore[reportAttributeAccessIssue]
                pair.append(seconds_of(trainer, next(prompts)))
            seconds.append((pair[0], pair[1]))
        after, tail = (statistics.median(times) for times in zip(*seconds[1:], strict=True))  # first pair: warm-up
        ratio = statistics.median(with_it / without for without, with_it in seconds[1:])
        rows.append([f"{ranks[0]:g}, {ranks[1]:g}", f"{call:g}", f"{after:.2f}", f"{tail:.2f}", f"{ratio:.2f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[SLEEPS] = f"{folder}/sleeps"
        Path(os.environ[SLEEPS]).write_text("0 0 0")
        config = config_in(Path(folder))
        with PPOTrainer.open(config) as trainer:
            trainer.prepare()
            rows = measured(trainer, options.pairs)
    head = ["seconds per rank", "seconds per call"]
    head += ["step, scoring after generation", "step, scoring during generation", "ratio"]
    lines = [head, ["---"] * len(head), *rows]
    page = [
        "# Scoring while slower ranks generate",
        "",
        "`python benchmarks/reward_tail.py`; the docstring of the script describes the measurement.",
        "",
        f"{ROWS} responses, {WORKERS} reward processes, {options.pairs} pairs of steps; torch {torch.__version__}.",
        "",
        *(f"| {' | '.join(line)} |" for line in lines),
    ]
    text = "\n".join(page) + "\n"
    sys.stdout.write(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
