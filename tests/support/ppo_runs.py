"""Small PPO runs of the real trainer in this process: a tiny model, addition problems, a few steps per second.

    steps = run_ppo(tmp_path, {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4}, steps=3)
    steps[-1].metrics["actor/pg_loss"]
    steps[0].batch["responses"]              # as passed to the reward function
    steps[-1].actor["model.norm.weight"]     # after the step

Overrides may set any config key; `SMALL` contains the defaults. The first run in a folder writes the model, the critic
and the data to it, and later runs reuse them.
"""

import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from transformers import AutoModelForTokenClassification

from camshaft.config import PPOConfig, load_ppo
from camshaft.data import write_arithmetic
from camshaft.dataproto import DataProto
from camshaft.models.loader import quiet_transformers
from camshaft.models.tiny import make_tiny_model
from camshaft.rewards.combined import CombinedRewards
from camshaft.rewards.manager import PendingScores, RewardManager, RewardResult
from camshaft.roles import ActorRolloutRefWorker, CriticWorker
from camshaft.trainer import ppo_trainer
from camshaft.trainer.build import PPOParts
from camshaft.trainer.ppo import PPOTrainer
from support import even_digits

SMALL: dict[str, Any] = {
    "data.max_prompt_length": 16,
    "data.max_response_length": 8,
    "data.train_batch_size": 8,
    "actor_rollout_ref.actor.strategy": "reference",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2,
    "actor_rollout_ref.actor.optim.lr": 1e-3,
    "actor_rollout_ref.rollout.name": "torch",
    "actor_rollout_ref.rollout.dtype": "float32",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "critic.ppo_micro_batch_size_per_gpu": 2,
    "critic.optim.lr": 1e-3,
    "custom_reward_function.path": even_digits.__file__,
    "custom_reward_function.num_workers": 1,
    "custom_reward_function.on_error": "raise",
    "trainer.device": "cpu",
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 1,
    "trainer.logger": "[]",
    "trainer.sample_interval": "null",
    "trainer.log_val_generations": 0,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": False,
    "trainer.default_hdfs_dir": "null",
    "trainer.resume_mode": "disable",
}

SPREAD = 0.1
"""Standard deviation of initial weights, wide enough for a non-uniform policy and for clipping to take effect."""


@dataclass(frozen=True)
class Step:
    """One step of a run."""

    metrics: dict[str, float]
    batch: DataProto
    """Prompts, the other columns of the data, and responses with log-probs from generation."""
    actor: dict[str, Tensor]
    """Weights after the step."""
    critic: dict[str, Tensor]
    """Weights after the step; empty without a critic."""
    samples: Sequence[Mapping[str, Any]] = ()
    """Training responses that trackers received."""


def ppo_args(folder: Path, overrides: Mapping[str, Any] | None = None) -> list[str]:
    """Return the command-line arguments of a run on this machine, and write the files that they name to `folder`."""
    actor, critic, data = folder / "actor", folder / "critic", folder / "data"
    if not actor.is_dir():
        shutil.copytree(_tiny_files(), folder, dirs_exist_ok=True)
    paths = {
        "data.train_files": data / "train.parquet",
        "data.val_files": data / "heldout.parquet",
        "actor_rollout_ref.model.path": actor,
        "critic.model.path": critic,
        "trainer.default_local_dir": folder / "run",
    }
    return [f"{key}={value}" for key, value in {**SMALL, **paths, **(overrides or {})}.items()]


def ppo_config(folder: Path, overrides: Mapping[str, Any] | None = None) -> PPOConfig:
    """Return the config of the arguments of `ppo_args`."""
    return load_ppo(ppo_args(folder, overrides))


def run_ppo(
    folder: Path,
    overrides: Mapping[str, Any] | None = None,
    steps: int = 3,
    trainer_class: type[PPOTrainer] | None = None,
) -> list[Step]:
    """Train for `steps` steps and return them. A validation before training is the first entry.

    By default, the config selects the trainer.
    """
    lengths = {"trainer.total_training_steps": steps, "trainer.total_epochs": steps}
    config = ppo_config(folder, {**lengths, **(overrides or {})})
    with (trainer_class or ppo_trainer(config)).open(config) as trainer:
        trainer.rewards = watched = _WatchedRewards(trainer.rewards)  # pyright: ignore
        trainer.prepare()
        recorder = _Recorder(trainer.parts, watched)
        trainer.fit(recorder)  # pyright: ignore[reportArgumentType]
    return recorder.steps


HOME = tempfile.TemporaryDirectory(prefix="camshaft-runs-")


@cache
def _tiny_files() -> Path:
    """Write the model, the critic and the data once in this process."""
    folder = Path(HOME.name)
    make_tiny_model(folder / "actor", hidden=32, initializer_range=SPREAD)
    _make_tiny_critic(folder / "critic")
    write_arithmetic(folder / "data", left=(0, 20), right=(0, 20), num_train=64, num_heldout=16)
    return folder


def _make_tiny_critic(folder: Path) -> None:
    """Write a critic with its value head, so that another program can start from the same weights."""
    make_tiny_model(folder, hidden=32, seed=1, initializer_range=SPREAD)
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        AutoModelForTokenClassification.from_pretrained(folder, num_labels=1).save_pretrained(folder)


class _WatchedRewards:
    """Record the batch that was scored last."""

    def __init__(self, rewards: RewardManager | CombinedRewards):
        self.rewards = rewards
        self.batch = DataProto()

    def score(
        self, batch: DataProto, decode: Callable[[list[list[int]]], list[str]], begun: PendingScores | None = None
    ) -> RewardResult:
        self.batch = batch
        return self.rewards.score(batch, decode, begun)


class _Recorder:
    """A tracker that records every step with its batch and weights."""

    def __init__(self, parts: PPOParts, rewards: _WatchedRewards):
        self.parts, self.rewards = parts, rewards
        self.steps: list[Step] = []
        self.generations: dict[int, Sequence[Mapping[str, Any]]] = {}
        self._samples: Sequence[Mapping[str, Any]] = ()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        actor, critic = self.parts.actor, self.parts.critic
        weights = weights_of(actor), weights_of(critic) if critic else {}
        self.steps.append(Step(dict(metrics), self.rewards.batch, *weights, self._samples))
        self._samples = ()

    def log_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        self.generations[step] = rows

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        self._samples = rows


def weights_of(role: ActorRolloutRefWorker | CriticWorker) -> dict[str, Tensor]:
    """Return a role's weights, read from a checkpoint because the driver has no access to them."""
    with tempfile.TemporaryDirectory() as folder:
        role.save_checkpoint(f"{folder}/weights")
        role.wait_for_checkpoint()
        return saved_weights(Path(folder) / "weights")


def saved_weights(folder: Path, part: str = "model") -> dict[str, Tensor]:
    """Return the weights of an engine's checkpoint, or its `optimizer` state, from any number of files."""
    reader = HuggingFaceStorageReader(str(folder / part))
    metadata: dict[str, Any] = reader.read_metadata().state_dict_metadata
    weights = {name: torch.empty(tensor.size, dtype=tensor.properties.dtype) for name, tensor in metadata.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns when one process reads the files of several
        state_dict_loader.load(weights, storage_reader=reader, no_dist=True)
    return weights
