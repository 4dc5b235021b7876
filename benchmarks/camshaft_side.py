"""camshaft as a side of the benchmarks: actor and critic updates, GRPO steps, and PPO steps with a critic.

ActorUpdate(folder).update(rows)        # the folder contains a model and train.parquet
ActorUpdateOnRanks(folder, 2).update(rows)
CriticUpdate(folder).update(rows)
Steps(folder, learning_rate=1e-7).step()
Steps(folder, learning_rate=1e-7, **with_critic(folder)).step()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import workload

from camshaft.config import PPOConfig, Topology, load_ppo
from camshaft.controller import PoolSpec, pools, spawn
from camshaft.controller.group import Options
from camshaft.dataproto import DataProto, Ragged
from camshaft.roles.actor import ActorWorker
from camshaft.roles.critic import CriticWorker
from camshaft.trainer.build import PPOParts
from camshaft.trainer.metrics import StepMetrics
from camshaft.trainer.mini_batches import shard_rows
from camshaft.trainer.ppo import PPOTrainer


def config(folder: Path, **more: Any) -> PPOConfig:
    """Build a GRPO config for one CPU with the values of `workload.py`."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    settings = {
        "actor_rollout_ref.model.path": folder,
        f"{actor}.strategy": "reference",
        f"{actor}.ppo_mini_batch_size": workload.MINI_BATCH // workload.SAMPLES,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": workload.TOKEN_BUDGET,
        f"{actor}.clip_ratio": workload.CLIP,
        f"{actor}.clip_ratio_c": 1e9,  # the other loops have no dual clip
        f"{actor}.entropy_coeff": 0,
        f"{actor}.grad_clip": workload.GRAD_CLIP,
        f"{actor}.optim.lr": workload.LEARNING_RATE,
        f"{actor}.optim.weight_decay": 0.01,
        f"{rollout}.name": "torch",
        f"{rollout}.n": workload.SAMPLES,
        f"{rollout}.dtype": "float32",
        f"{rollout}.tensor_model_parallel_size": 1,
        "algorithm.adv_estimator": "grpo",
        "custom_reward_function.path": Path(__file__).parent / "even_letters.py",
        "custom_reward_function.num_workers": 1,
        "data.train_files": folder / "train.parquet",
        "data.val_files": "null",
        "data.shuffle": False,
        "data.train_batch_size": workload.PROMPTS,
        "data.max_prompt_length": workload.LONGEST_PROMPT,
        "data.max_response_length": workload.LONGEST_RESPONSE,
        "trainer.device": "cpu",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": folder / "run",
    }
    return load_ppo([f"{key}={value}" for key, value in (settings | more).items()])


class ActorUpdate:
    """Actor update through `ActorWorker.update_actor`, as in a run."""

    def __init__(self, folder: Path, **more: Any):
        self.actor = ActorWorker(config(folder, **more), Topology(), total_steps=1000)
        self.actor.init_model()

    def update(self, rows: workload.Rows) -> dict[str, float]:
        data = batch(rows, old_log_probs=rows.old_log_probs, advantages=rows.advantages)
        return update_metrics(self.actor.update_actor(data, presharded=True), "actor/pg_loss", "actor/grad_norm")


class ActorUpdateOnRanks(contextlib.ExitStack):
    """Actor update on ranks of the sharded engine: one process with one thread per rank."""

    def __init__(self, folder: Path, ranks: int):
        super().__init__()
        sharded = {"actor_rollout_ref.actor.strategy": "fsdp", "trainer.n_gpus_per_node": ranks}
        self.config = config(folder, **sharded)
        options = Options(preload=("camshaft.roles",))
        (pool,) = self.enter_context(pools([PoolSpec(ranks_per_node=ranks, device="cpu")], "local", options))
        self.actor = spawn(ActorWorker, self.config, Topology(ranks), 1000, pool=pool, name="actor")
        self.actor.init_model()

    def update(self, rows: workload.Rows) -> dict[str, float]:
        data = batch(rows, old_log_probs=rows.old_log_probs, advantages=rows.advantages)
        order = shard_rows(len(data), self.config.actor_mini_batch(), 1, None, self.config.trainer.world_size)
        return update_metrics(
            self.actor.update_actor(data.reorder(order), presharded=True), "actor/pg_loss", "actor/grad_norm"
        )


class CriticUpdate:
    """Critic update through `CriticWorker.update_critic`, as in a run."""

    def __init__(self, folder: Path):
        self.critic = CriticWorker(config(folder, **with_critic(folder)), Topology(), total_steps=1000)
        self.critic.init_model()

    def update(self, rows: workload.Rows) -> dict[str, float]:
        data = batch(rows, values=rows.old_values, returns=rows.returns)
        return update_metrics(self.critic.update_critic(data, presharded=True), "critic/vf_loss", "critic/grad_norm")


def update_metrics(output: DataProto, loss: str, norm: str) -> dict[str, float]:
    """Return the metrics that all sides of an update report."""
    metrics = output.meta_info["metrics"]
    return {"loss": metrics[loss], "grad_norm": metrics[norm]}


def batch(rows: workload.Rows, **columns: list[torch.Tensor]) -> DataProto:
    """Convert rows to a batch with these per-token columns."""
    responses = Ragged.from_rows(rows.responses)
    mask = responses.map(lambda ids: torch.ones_like(ids, dtype=torch.bool))
    numbers = {name: Ragged.from_rows([row.contiguous() for row in column]) for name, column in columns.items()}
    prompts = Ragged.from_rows(rows.prompts)
    return DataProto.from_dict({"prompts": prompts, "responses": responses, "response_mask": mask, **numbers})


def with_critic(folder: Path) -> dict[str, Any]:
    """Return the settings of PPO with a critic of the actor's size and KL to a reference in the reward."""
    return {
        "algorithm.adv_estimator": "gae",
        "algorithm.lam": workload.LAMBDA,
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.kl_coef": workload.KL,
        "critic.strategy": "reference",
        "critic.model.path": folder,
        "critic.ppo_mini_batch_size": workload.MINI_BATCH // workload.SAMPLES,
        "critic.use_dynamic_bsz": True,
        "critic.ppo_max_token_len_per_gpu": workload.TOKEN_BUDGET,
        "critic.cliprange_value": workload.CLIP_VALUE,
        "critic.grad_clip": workload.GRAD_CLIP,
        "critic.optim.lr": workload.LEARNING_RATE,
        "critic.optim.weight_decay": 0.01,
    }


class Steps:
    """`collect` and `step` of `PPOTrainer` in this process on the prompts of train.parquet, in file order."""

    def __init__(self, folder: Path, learning_rate: float, **more: Any):
        answer = {"data.max_response_length": workload.LONGEST_ANSWER}
        rates = {"actor_rollout_ref.actor.optim.lr": learning_rate, "critic.optim.lr": learning_rate}
        settings = config(folder, **(answer | more | rates))
        self.parts = PPOParts(settings)
        self.trainer = PPOTrainer(self.parts)
        self.trainer.prepare()
        self.batches: Iterator[DataProto] = iter(self.parts.loader)

    def step(self, collector: StepMetrics | None = None) -> dict[str, Any]:
        self.trainer.global_step += 1
        collector = collector or StepMetrics(self.trainer.status)
        metrics = self.trainer.step(self.trainer.collect(next(self.batches), collector), collector)
        return {
            "lengths": self.trainer.batch.ragged("responses").lengths.tolist(),
            **{n: v for n, v in metrics.items() if n.startswith("timing_s")},
        }
