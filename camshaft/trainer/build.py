"""What a PPO run is made of, built from its config. Everything that can fail early fails here.

    with PPOParts(config) as parts:
        trainer = PPOTrainer(config, parts)

In this order: tokenizer and data (a bad row ends the run before a model is loaded), the reward function
(loaded in a worker process), then the pools of processes and the roles in them. One worker process per device holds
actor, rollout and reference together, and the critic and the reward model unless they have pools of their own; a
single rank lives in this process. Leaving the context waits for checkpoints that are still being written and ends every
process that was started.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from camshaft.checkpoint import CheckpointManager
from camshaft.config import PPOConfig
from camshaft.controller import spawn, submit
from camshaft.data import PromptOptions, StatefulLoader, data_files, load_prompts
from camshaft.dataproto import DataProto
from camshaft.models.loader import load_tokenizer
from camshaft.rewards.failed import FailedSamples
from camshaft.rewards.manager import Begun
from camshaft.roles import ActorRolloutRefWorker, CriticWorker, RewardModelWorker, reward_worker
from camshaft.trainer.advantages import load_estimator
from camshaft.trainer.pools import pool_specs, run_pools
from camshaft.trainer.scoring import check_scorable, model_scores, run_rewards
from camshaft.trainer.session import finish_saving, run_length


class PPOParts(contextlib.AbstractContextManager["PPOParts"]):
    """Tokenizer, data, rewards, roles and checkpoints of one run."""

    def __init__(self, config: PPOConfig):
        self._exit = contextlib.ExitStack()
        self.tokenizer: Any = load_tokenizer(config.tokenizer_path(), config.data.trust_remote_code)
        self.loader = StatefulLoader(
            self._prompts(config, train=True),
            config.generated_together(),
            total_epochs=config.trainer.total_epochs,
            shuffle=config.data.shuffle,
            seed=config.data_seed(),
            rows_per_step=config.data.train_batch_size,
        )
        load_estimator(config.algorithm)  # one of the user's own may not be there
        self.val_prompts = self._prompts(config, train=False) if config.data.val_files else DataProto()
        if config.needs_function():
            for prompts in (self.loader.data, self.val_prompts):
                check_scorable(prompts, config.custom_reward_function, beside_model=config.reward_model.enable)
        self.total_steps = run_length(config.trainer, self.loader)
        self.checkpoints = CheckpointManager(config.trainer.default_local_dir, config.trainer.default_hdfs_dir)
        self.failed = FailedSamples(Path(config.trainer.default_local_dir) / "rewards" / "failed.jsonl")
        topology = config.topology()
        self.actor_dp_size = config.actor_dp_size(topology)
        """Ranks, or groups of ranks, that split what the actor's worker is given."""
        self.critic_dp_size = config.critic_dp_size(topology)
        with self._exit as undo:  # if a later part fails, the earlier ones are ended
            self.rewards = run_rewards(config)
            undo.callback(self.rewards.close)
            logs = Path(config.trainer.default_local_dir) / "logs"
            places = run_pools(config.trainer, pool_specs(config), config.ray_kwargs.ray_init, logs)
            pools = undo.enter_context(places)
            home = {role: pools[name] for role, name in config.pools().items()}
            arguments = (config, topology, self.total_steps)
            first = home["actor_rollout_ref"]
            self.actor = spawn(ActorRolloutRefWorker, *arguments, pool=first, name="actor_rollout_ref")
            self.critic: CriticWorker | None = None
            if config.needs_critic():
                self.critic = spawn(CriticWorker, *arguments, pool=home["critic"], name="critic")
            self.reward_model: RewardModelWorker | None = None
            self.reward_model_ranks = topology.of_reward_model().world_size
            if config.reward_model.enable:
                scorer = reward_worker(config.reward_model)
                self.reward_model = spawn(scorer, config, topology, pool=home["reward_model"], name="reward_model")
            self._exit = undo.pop_all()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._exit:
            self.finish_saving(failed=kind is not None)

    def finish_saving(self, failed: bool = False) -> None:
        """Wait for what is written in the background."""
        finish_saving([self.actor, *([] if self.critic is None else [self.critic])], failed)

    def roles(self) -> list[ActorRolloutRefWorker | CriticWorker | RewardModelWorker]:
        """All that the run has."""
        return [role for role in (self.actor, self.critic, self.reward_model) if role is not None]

    def generate(
        self, batch: DataProto, *, validate: bool = False, greedy: bool = False
    ) -> tuple[DataProto, Begun | None]:
        """A response to each row, and what has begun to score them: a rank's responses as soon as it has answered.

        Rows are added so that every rank gets as many, and taken away again.
        """
        asked = batch.select(*(name for name in ("prompts", "sampling_seed") if name in batch))
        padded, added = asked.pad_to_divisor(self.actor_dp_size)
        generate = self.actor.generate_sequences
        answering = submit(generate, padded, validate=validate, recompute_log_prob=False, greedy=greedy)
        begun = self.rewards.begin(batch)
        if begun is not None:
            for dp_rank, part in answering.parts():
                first = dp_rank * len(part)
                own = part.ragged("responses").rows()[: max(0, len(batch) - first)]
                begun.add(first, self.decode([row.tolist() for row in own]))
        return answering.result().unpad(added), begun

    def model_scored(self, batch: DataProto) -> DataProto:
        """`batch` with the reward model's scores, if the run has one."""
        return model_scores(batch, self.reward_model, self.reward_model_ranks)

    def decode(self, ids: list[list[int]]) -> list[str]:
        """Texts of token ids, without special tokens."""
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def _prompts(self, config: PPOConfig, train: bool) -> DataProto:
        paths, most = prompt_files(config, train)
        return load_prompts(data_files(paths), self.tokenizer, prompt_options(config), most).batch


def prompt_files(config: PPOConfig, train: bool) -> tuple[tuple[str, ...], int]:
    """The files of a run, and how many of their rows it reads."""
    data = config.data
    return (data.train_files, data.train_max_samples) if train else (data.val_files, data.val_max_samples)


def prompt_options(config: PPOConfig) -> PromptOptions:
    """How a run reads its prompts."""
    data = config.data
    return PromptOptions(
        max_prompt_length=data.max_prompt_length,
        truncation=data.truncation,
        filter_overlong=data.filter_overlong_prompts,
        workers=data.filter_overlong_prompts_workers,
        prompt_key=data.prompt_key,
        prompt_id_key=data.prompt_id_key,
        max_prompt_id_length=data.max_prompt_id_length,
        reward_fn_key=data.reward_fn_key,
        return_raw_chat=config.needs_raw_chat(),
        return_raw_input_ids=data.return_raw_input_ids,
    )
