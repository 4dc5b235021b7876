"""Demo: teach a tiny model to carry, in a few minutes on two CPU cores and without downloads.

    python examples/arithmetic/demo.py [--out demo_out] [--steps N]

1. Create a 0.6M-parameter model and a data set of two-digit additions; 256 of them are held out.
2. Fine-tune on answers of which six in ten forget to carry (57+68=15): `camshaft sft`.
3. Train with PPO, a critic and a KL penalty; the reward is 1 for a correct sum: `camshaft ppo`.
4. Print responses before and after PPO, and plot the curves.

Both runs use the ordinary commands, which are printed so that you can repeat them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from camshaft import load_run

console = Console(highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description="Teach a tiny model arithmetic with PPO on a laptop.")
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for everything (default: demo_out)")
    parser.add_argument("--sft-steps", type=int, default=600, help="optimizer steps of the warm-up (default: 600)")
    parser.add_argument("--steps", type=int, default=80, help="iterations of PPO (default: 80)")
    options = parser.parse_args()
    out, start_time = options.out, time.perf_counter()

    console.rule("1. a model and a task")
    make_task(out)

    console.rule("2. supervised fine-tuning on sums that often forget to carry")
    run("sft", sft_arguments(out, options.sft_steps))

    console.rule("3. PPO with reward 1 for a correct sum")
    run("ppo", ppo_arguments(out, options.steps))

    console.rule("4. results")
    metrics = [json.loads(line) for line in (out / "ppo" / "metrics.jsonl").read_text().splitlines()]
    first, last = scores(metrics)[0], scores(metrics)[-1]
    show_transcripts(out / "ppo" / "validation", metrics[-1]["step"])
    load_run(out / "ppo").plot(out / "curves.png")
    seconds = round(time.perf_counter() - start_time)
    console.print(
        f"held-out sums right: {first:.3f} before, {last:.3f} after PPO, {seconds // 60}:{seconds % 60:02} in all"
    )
    console.print(f"curves: {out / 'curves.png'}   the run in a browser: camshaft view {out / 'ppo'}")
    return 0


def make_task(out: Path) -> None:
    """Write `out/data/*.parquet` and `out/model`."""
    from camshaft.data import write_arithmetic
    from camshaft.models.tiny import make_tiny_model

    sums = {"left": (10, 99), "right": (10, 99), "num_train": 7000, "num_heldout": 256}
    paths = write_arithmetic(out / "data", **sums, careless=0.6, seed=1)
    make_tiny_model(
        out / "model", hidden=128, layers=3, heads=4, kv_heads=2, intermediate=384, seed=1, initializer_range=0.06
    )
    console.print(
        f"{paths.train}: 7000 training sums; {paths.heldout}: 256 held-out sums; {out / 'model'}: untrained model"
    )


def sft_arguments(out: Path, steps: int) -> list[str]:
    return [
        "strategy=reference",
        f"model.path={out}/model",
        f"data.train_files={out}/data/sft_train.parquet",
        "data.val_files=null",
        "data.max_length=32",
        "data.train_batch_size=64",
        "data.micro_batch_size_per_gpu=64",
        "optim.lr=2e-3",
        "optim.lr_scheduler_type=cosine",
        "optim.lr_warmup_steps_ratio=0.03",
        "optim.min_lr_ratio=0.1",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.total_epochs=100",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={out}/sft",
        "trainer.experiment_name=warm-up",
    ]


def ppo_arguments(out: Path, steps: int) -> list[str]:
    return [
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.kl_coef=0.002",
        f"data.train_files={out}/data/train.parquet",
        f"data.val_files={out}/data/heldout.parquet",
        "data.train_batch_size=128",
        "data.val_batch_size=256",
        "data.max_prompt_length=16",
        "data.max_response_length=6",
        f"actor_rollout_ref.model.path={out}/sft/huggingface",
        "actor_rollout_ref.actor.strategy=reference",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        "actor_rollout_ref.actor.entropy_coeff=0.0",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=128",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=256",
        "actor_rollout_ref.rollout.name=torch",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=256",
        "critic.strategy=reference",
        f"critic.model.path={out}/sft/huggingface",
        "critic.optim.lr=5e-4",
        "critic.ppo_micro_batch_size_per_gpu=128",
        "custom_reward_function.name=exact_match",
        "trainer.critic_warmup=0",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.save_freq=-1",
        "trainer.test_freq=10",
        "trainer.total_epochs=100",
        f"trainer.total_training_steps={steps}",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={out}/ppo",
        "trainer.experiment_name=carry",
    ]


def run(command: str, arguments: list[str]) -> None:
    console.print("camshaft " + shlex.join([command, *arguments]), style="dim", soft_wrap=True)
    status = subprocess.run([sys.executable, "-m", "camshaft", command, *arguments]).returncode
    if status:
        sys.exit(status)


def scores(metrics: list[dict[str, Any]]) -> list[float]:
    """Return the share of correct held-out sums at each validation."""
    return [line["val/reward/mean"] for line in metrics if "val/reward/mean" in line]


def show_transcripts(folder: Path, last: int, count: int = 8) -> None:
    """Print held-out sums that were wrong before PPO, with the responses before and after."""
    before, after = (
        [json.loads(line) for line in (folder / f"step_{step}.jsonl").read_text().splitlines()] for step in (0, last)
    )
    table = Table("held-out sum", "right", "before PPO", "after PPO")
    changed = [pair for pair in zip(before, after, strict=True) if pair[0]["score"] != 1]
    for old, new in changed[:count]:
        question = old["prompt"].removeprefix("u").removesuffix("a")
        mark = "green" if new["score"] == 1 else "red"
        table.add_row(question, str(old["ground_truth"]), f"[red]{old['response']}[/]", f"[{mark}]{new['response']}[/]")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
