"""Cost of controller calls: time of a call on two ranks by payload and backend, and its share of a step.

    python benchmarks/controller.py --out benchmarks/results/controller.md

The first table measures a call to a role that does nothing: rows are split, sent, received, sent back and merged. A
column has 4 bytes per token, so the same number of bytes is measured as few long columns and as many short ones. The
time is the minimum over the repetitions.

The second table uses real roles (a tiny policy and value function on two ranks of the sharded engine) and a batch of
1,000 sequences of 2,000 tokens. Each rank times its method. The time that the driver waits beyond the slower rank is
the controller's: splitting, pickling, moving, merging. Generation is not included and would make the share smaller.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from camshaft.config import PPOConfig, Topology, load_ppo
from camshaft.controller import Dispatch, PoolSpec, Worker, pools, register, spawn
from camshaft.controller.group import Options, Pool
from camshaft.data import write_arithmetic
from camshaft.dataproto import DataProto, Ragged
from camshaft.models.tiny import make_tiny_model
from camshaft.roles import ActorWorker, CriticWorker

PAYLOADS = [
    (64, 128, 4),
    (256, 512, 4),
    (1000, 2000, 1),
    (1000, 2000, 4),
    (1000, 500, 16),
    (4000, 500, 4),
    (1000, 2000, 8),
]
"""Sequences, tokens per sequence, columns."""
RANKS = 2
MEGABYTE = 2**20


class Mirror(Worker):
    """Role that returns its argument."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def same(self, batch: DataProto) -> DataProto:
        return batch


def timed(method: Callable[..., DataProto]) -> Callable[..., DataProto]:
    """Wrap a role's method to report its duration."""

    @functools.wraps(method)  # keeps the dispatch mode
    def clocked(self: Worker, *args: Any, **kwargs: Any) -> DataProto:
        start = time.perf_counter()
        return method(self, *args, **kwargs).with_meta(seconds=time.perf_counter() - start)

    return clocked


class TimedActor(ActorWorker):
    """Actor that reports the duration of each call per rank."""

    compute_log_prob = timed(ActorWorker.compute_log_prob)
    update_actor = timed(ActorWorker.update_actor)


class TimedCritic(CriticWorker):
    """Critic that reports the duration of each call per rank."""

    compute_values = timed(CriticWorker.compute_values)
    update_critic = timed(CriticWorker.update_critic)


def payload(sequences: int, tokens: int, columns: int) -> DataProto:
    lengths = torch.full((sequences,), tokens)
    values = torch.arange(sequences * tokens, dtype=torch.float32)
    return DataProto({f"column_{number}": Ragged(values + number, lengths) for number in range(columns)})


def lowest(work: Callable[[], Any], times: int) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def calls(pool: Pool, times: int) -> list[list[str]]:
    mirror = spawn(Mirror, pool=pool)
    rows = []
    for sequences, tokens, columns in PAYLOADS:
        batch = payload(sequences, tokens, columns)
        mirror.same(batch)
        call = lowest(lambda batch=batch: mirror.same(batch), times)
        size = 4 * sequences * tokens * columns / MEGABYTE
        rows.append([f"{sequences:,} x {tokens:,}", str(columns), f"{size:.1f}", f"{1000 * call:.1f}"])
        rows[-1].append(f"{1000 * call / size:.1f}")
    return rows


def step_config(folder: Path) -> PPOConfig:
    """Build a config with two ranks of the sharded engine for the batch of `step_batch`."""
    make_tiny_model(folder / "model", hidden=64, max_position_embeddings=2048)
    write_arithmetic(folder / "data", left=(0, 99), right=(0, 99), num_train=1000, num_heldout=16)
    actor = "actor_rollout_ref.actor"
    return load_ppo(
        [
            f"data.train_files={folder}/data/train.parquet",
            f"data.val_files={folder}/data/heldout.parquet",
            *(f"data.max_{part}_length={length}" for part, length in (("prompt", 200), ("response", 1800))),
            "data.train_batch_size=1000",
            f"actor_rollout_ref.model.path={folder}/model",
            f"critic.model.path={folder}/model",
            *(f"{role}.strategy=fsdp" for role in (actor, "critic")),
            *(f"{role}.ppo_mini_batch_size=500" for role in (actor, "critic")),
            *(f"{role}.use_dynamic_bsz=true" for role in (actor, "critic")),
            *(f"{role}.ppo_max_token_len_per_gpu=16000" for role in (actor, "critic")),
            "critic.forward_max_token_len_per_gpu=16000",
            "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
            "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=16000",
            "actor_rollout_ref.rollout.name=torch",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
            "trainer.device=cpu",
            f"trainer.n_gpus_per_node={RANKS}",
            f"trainer.default_local_dir={folder}/run",
        ]
    )


def step_batch() -> DataProto:
    """Build 1,000 sequences of 2,000 tokens with the columns that critic and actor updates read."""
    draw = torch.Generator().manual_seed(0)

    def column(length: int, values: Callable[[int], torch.Tensor]) -> Ragged:
        return Ragged(values(1000 * length), torch.full((1000,), length))

    def noise(count: int) -> torch.Tensor:
        return 0.1 * torch.randn(count, generator=draw)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(3, 30, (count,), generator=draw)

    columns = {"prompts": column(200, tokens), "responses": column(1800, tokens)}
    columns["response_mask"] = column(1800, lambda count: torch.ones(count, dtype=torch.bool))
    columns |= {name: column(1800, noise) for name in ("old_log_probs", "advantages", "values", "returns")}
    return DataProto(columns)


def step(pool: Pool, config: PPOConfig) -> list[list[str]]:
    actor = spawn(TimedActor, config, Topology(RANKS), 10, pool=pool, name="actor")
    critic = spawn(TimedCritic, config, Topology(RANKS), 10, pool=pool, name="critic")
    actor.init_model()
    critic.init_model()
    batch = step_batch()
    sequences = batch.select("prompts", "responses", "response_mask")
    work: dict[str, Callable[[], DataProto]] = {
        "old log-probs": lambda: actor.compute_log_prob(sequences),
        "values": lambda: critic.compute_values(sequences),
        "update of the critic": lambda: critic.update_critic(batch, presharded=True),
        "update of the actor": lambda: actor.update_actor(batch, presharded=True),
    }
    rows, sums = [], [0.0, 0.0]
    for name, call in work.items():
        start = time.perf_counter()
        out = call()
        waited = time.perf_counter() - start
        inside = max(meta["seconds"] for meta in out.meta_info["ranks"])
        sums = [sums[0] + waited, sums[1] + waited - inside]
        rows.append([name, f"{waited:.2f}", f"{waited - inside:.3f}", f"{100 * (waited - inside) / waited:.2f} %"])
    rows.append(["total", f"{sums[0]:.2f}", f"{sums[1]:.3f}", f"{100 * sums[1] / sums[0]:.2f} %"])
    return rows


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    parser.add_argument("--backends", default="local,ray")
    parser.add_argument("--times", type=int, default=9, help="repetitions of a call")
    parser.add_argument("--without-step", action="store_true", help="skip the second table, which takes minutes")
    arguments = parser.parse_args()
    page = [
        "# Cost of controller calls",
        "",
        "`python benchmarks/controller.py`; the docstring of the script describes the measurement.",
        "",
    ]
    page.append(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}.")
    with tempfile.TemporaryDirectory() as folder:
        config = step_config(Path(folder))
        for backend in arguments.backends.split(","):
            options = Options(ray_init={"include_dashboard": False}, preload=("camshaft.roles",))
            with pools([PoolSpec(ranks_per_node=RANKS, device="cpu")], backend, options) as (pool,):
                head = ["sequences x tokens", "columns", "MB", "ms", "ms / MB"]
                page += ["", f"## {backend}, {RANKS} ranks", "", table(head, calls(pool, arguments.times))]
                if not arguments.without_step:
                    head = ["call, 1,000 x 2,000 tokens", "s", "controller", "share"]
                    page += ["", table(head, step(pool, config))]
    text = "\n".join(page) + "\n"
    sys.stdout.write(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
