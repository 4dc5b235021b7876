"""camshaft as a side of the benchmarks: the actor's role alone, and whole steps of GRPO and of PPO with a critic.

ActorUpdate(folder).update(rows)        # of a folder with a model and train.parquet
Steps(folder, learning_rate=1e-7).step()
Steps(folder, learning_rate=1e-7, **with_critic(folder)).step()
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import workload

from camshaft.config import PPOConfig, Topology, load_ppo
from camshaft.dataproto import DataProto, Ragged
from camshaft.roles.actor import ActorWorker
from camshaft.trainer.parts import PPOParts
from camshaft.trainer.ppo import PPOTrainer


def config(folder: Path, **more: Any) -> PPOConfig:
    """GRPO on one CPU, with what `workload.py` states."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    settings = {
        "actor_rollout_ref.model.path": folder,
        f"{actor}.strategy": "reference",
        f"{actor}.ppo_mini_batch_size": workload.MINI_BATCH // workload.SAMPLES,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": workload.TOKEN_BUDGET,
        f"{actor}.clip_ratio": workload.CLIP,
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
    """`ActorWorker.update_actor`, as a run calls it."""

    def __init__(self, folder: Path):
        self.actor = ActorWorker(config(folder), Topology(), total_steps=1000)
        self.actor.init_model()

    def update(self, rows: workload.Rows) -> dict[str, float]:
        responses = Ragged.from_rows(rows.responses)
        data = DataProto.from_dict(
            {
                "prompts": Ragged.from_rows(rows.prompts),
                "responses": responses,
                "response_mask": responses.map(lambda ids: torch.ones_like(ids, dtype=torch.bool)),
                "old_log_probs": Ragged.from_rows(rows.old_log_probs),
                "advantages": Ragged.from_rows([a.contiguous() for a in rows.advantages]),
            }
        )
        metrics = self.actor.update_actor(data, dealt=True).meta_info["metrics"]
        return {"loss": metrics["actor/pg_loss"], "grad_norm": metrics["actor/grad_norm"]}


def with_critic(folder: Path) -> dict[str, Any]:
    """The settings of PPO with a critic of the actor's size, and the KL from a reference in the reward."""
    return {
        "algorithm.adv_estimator": "gae",
        "algorithm.lam": workload.LAMBDA,
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.kl_coef": workload.KL,
        "critic.model.path": folder,
        "critic.ppo_max_token_len_per_gpu": workload.TOKEN_BUDGET,
        "critic.cliprange_value": workload.CLIP_VALUE,
        "critic.grad_clip": workload.GRAD_CLIP,
        "critic.optim.weight_decay": 0.01,
    }


class Steps:
    """`PPOTrainer.step` in this process, on the prompts of train.parquet in their order."""

    def __init__(self, folder: Path, learning_rate: float, **more: Any):
        answer = {"data.max_response_length": workload.LONGEST_ANSWER}
        rates = {"actor_rollout_ref.actor.optim.lr": learning_rate, "critic.optim.lr": learning_rate}
        settings = config(folder, **answer, **rates, **more)
        self.parts = PPOParts(settings)
        self.trainer = PPOTrainer(settings, self.parts)
        self.trainer.prepare()
        self.batches: Iterator[DataProto] = iter(self.parts.loader)

    def step(self) -> dict[str, float]:
        self.trainer.global_step += 1
        told = self.trainer.step(next(self.batches))
        return {
            "tokens": told["rollout/response_tokens"],
            **{n: v for n, v in told.items() if n.startswith("timing_s")},
        }
