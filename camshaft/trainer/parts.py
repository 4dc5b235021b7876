"""What a PPO run is made of, built from its config. Everything that can fail early fails here.

    with PPOParts(config) as parts:
        trainer = PPOTrainer(config, parts)

In this order: tokenizer and data (a bad row ends the run before a model is loaded), the reward function
(loaded in a worker process), then the roles. One worker process per rank
holds actor, rollout and reference together, a second one the critic; a single rank lives in this process. Leaving the
context waits for checkpoints that are still being written and ends every process that was started.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from camshaft.checkpoint import CheckpointManager
from camshaft.config import CustomRewardConfig, PPOConfig, Topology
from camshaft.controller import shutdown, spawn
from camshaft.data import PromptOptions, StatefulLoader, load_prompts
from camshaft.dataproto import DataProto
from camshaft.errors import RewardError
from camshaft.models.loader import load_tokenizer
from camshaft.rewards.auto import SOURCES
from camshaft.rewards.manager import RewardManager
from camshaft.roles import ActorRolloutRefWorker, CriticWorker
from camshaft.trainer.session import finish_saving, run_length


class PPOParts(contextlib.AbstractContextManager["PPOParts"]):
    """Tokenizer, data, rewards, roles and checkpoints of one run."""

    def __init__(self, config: PPOConfig):
        self._exit = contextlib.ExitStack()
        self.tokenizer: Any = load_tokenizer(config.tokenizer_path(), config.data.trust_remote_code)
        self.loader = StatefulLoader(
            self._prompts(config, train=True),
            config.data.train_batch_size,
            total_epochs=config.trainer.total_epochs,
            shuffle=config.data.shuffle,
            seed=config.data_seed(),
        )
        self.val_prompts = self._prompts(config, train=False) if config.data.val_files else DataProto()
        for prompts in (self.loader.data, self.val_prompts):
            check_scorable(prompts, config.custom_reward_function)
        self.total_steps = run_length(config.trainer, self.loader)
        self.checkpoints = CheckpointManager(config.trainer.default_local_dir, config.trainer.default_hdfs_dir)
        topology, ranks = Topology(config.trainer.world_size), config.trainer.world_size
        self.actor_dp_size = config.actor_dp_size(topology)
        """Ranks, or groups of ranks, that split what the actor's worker is given."""
        self.critic_dp_size = config.critic_dp_size(topology)
        with self._exit as undo:  # if a later part fails, the earlier ones are ended
            self.rewards = build_rewards(config.custom_reward_function)
            undo.callback(self.rewards.close)
            arguments = (config, topology, self.total_steps)
            self.actor = spawn(ActorRolloutRefWorker, *arguments, world_size=ranks, name="actor_rollout_ref")
            undo.callback(shutdown, self.actor)
            self.critic: CriticWorker | None = None
            if config.needs_critic():
                self.critic = spawn(CriticWorker, *arguments, world_size=ranks, name="critic")
                undo.callback(shutdown, self.critic)
            self._exit = undo.pop_all()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._exit:
            finish_saving([self.actor, *([] if self.critic is None else [self.critic])], failed=kind is not None)

    def decode(self, ids: list[list[int]]) -> list[str]:
        """Texts of token ids, without special tokens."""
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def _prompts(self, config: PPOConfig, train: bool) -> DataProto:
        data = config.data
        options = PromptOptions(
            max_prompt_length=data.max_prompt_length,
            truncation=data.truncation,
            filter_overlong=data.filter_overlong_prompts,
            prompt_key=data.prompt_key,
            reward_fn_key=data.reward_fn_key,
        )
        paths, most = (data.train_files, data.train_max_samples) if train else (data.val_files, data.val_max_samples)
        return load_prompts([Path(path) for path in paths], self.tokenizer, options, None if most == -1 else most).batch


def build_rewards(custom: CustomRewardConfig) -> RewardManager:
    """The scoring function of the config, loaded in a process of its own."""
    return RewardManager(
        custom.path,
        custom.function_name(),
        custom.reward_kwargs,
        timeout=custom.timeout,
        num_workers=custom.num_workers,
        on_error=custom.on_error,
    )


def check_scorable(prompts: DataProto, custom: CustomRewardConfig) -> None:
    """Can a scoring function of ours score these rows? One of the user's own is not second-guessed."""
    if custom.path is not None or not len(prompts):
        return
    own = "custom_reward_function.path=my_reward.py for a function of your own"
    unknown = sorted({str(source) for source in prompts["data_source"] if source not in SOURCES})
    if custom.function_name() == "auto" and unknown:
        raise RewardError(
            f"no scoring function goes with data_source {', '.join(unknown[:5])} (known: {', '.join(SOURCES)}). Type "
            f"custom_reward_function.name=exact_match to compare with the ground truth, or {own}"
        )
    without = [uid for uid, truth in zip(prompts["uid"], prompts["ground_truth"], strict=True) if truth is None]
    if without:
        raise RewardError(
            f"{len(without)} of {len(prompts)} rows have nothing to compare a response with, first row "
            f"{without[0]}: give the files a struct 'reward_model' with 'ground_truth', or a column 'ground_truth'; or "
            f"type {own}"
        )
