"""The config: what a run can be told, from the command line down to one engine.

    from camshaft.config import load_ppo
    config = load_ppo(["actor_rollout_ref.actor.strategy=reference", "trainer.device=cpu", ...])
    config.actor_rollout_ref.actor.optim.lr

    ppo_trainer.yaml, sft_trainer.yaml, rm_trainer.yaml, generation.yaml, evaluation.yaml    every default, with
                   comments; nowhere else are defaults
    schema/        one file per section: types, bounds and one line of description per key; `fields.py` has the base
                   class of sections and the kinds of value, `fsdp.py` and `rollouts.py` the options of backends
    loader.py      Hydra composes, then everything is checked; programs enter here
    command.py     the same for a command line; usage.py its --help
    aliases.py     older names of keys; not_yet.py values of features that are not implemented
    checks.py      combinations of keys; algorithm_checks.py, reward_checks.py, backend_checks.py and files.py of one
                   subject each: algorithm, scores, engines and rollouts, files on disk
    backends.py    registry of engines and rollouts, and what each supports
    engine.py rollout.py    config of one engine or rollout, free of roles, and how a backend declares what it supports
    place.py topology.py    processes, resource pools, ranks
    derive.py      the config of each engine; table.py the batch sizes of a run
    pages.py       the config as text: explain, show, reference_page
    tree.py problems.py    dotted keys; error messages
    secrets.py     the config without secrets, for trackers and checkpoints

To add a key: a line in the YAML, a line in the schema. Nothing here imports torch.
"""

from camshaft.config.backends import unread_by
from camshaft.config.command import compose
from camshaft.config.derive import (
    actor_engine,
    critic_engine,
    generate_engine,
    generate_model,
    generate_sampling,
    ref_engine,
    reward_engine,
    rm_engine,
    rollout_engine,
    sampling,
    sft_engine,
)
from camshaft.config.engine import EngineConfig, EngineModel, OptimConfig
from camshaft.config.loader import from_container, load_eval, load_generate, load_ppo, load_rm, load_sft
from camshaft.config.pages import explain, reference_page, show
from camshaft.config.place import GLOBAL_POOL, PlaceConfig, pool_sizes
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.config.schema.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from camshaft.config.schema.data import DataConfig
from camshaft.config.schema.evaluation import EvalConfig
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.model import ModelConfig, OptimSection
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.reward import CustomRewardConfig, RewardModelConfig
from camshaft.config.schema.roles import ActorConfig, ActorRolloutRefConfig, CriticConfig, RefConfig, RolloutConfig
from camshaft.config.schema.supervised import (
    RMConfig,
    RMDataConfig,
    SFTConfig,
    SFTDataConfig,
    SupervisedConfig,
    SupervisedDataConfig,
    SupervisedTrainerConfig,
)
from camshaft.config.schema.trainer import TrainerConfig
from camshaft.config.secrets import without_secrets
from camshaft.config.table import BatchRow, batch_table, render_batch_table
from camshaft.config.topology import Topology, micro_batch_per_rank

__all__ = [
    "GLOBAL_POOL",
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlgorithmConfig",
    "BatchRow",
    "CriticConfig",
    "CustomRewardConfig",
    "DataConfig",
    "EngineConfig",
    "EngineModel",
    "EvalConfig",
    "GenerateConfig",
    "ModelConfig",
    "OptimConfig",
    "OptimSection",
    "PPOConfig",
    "RMConfig",
    "RMDataConfig",
    "RefConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RolloutEngineConfig",
    "SFTConfig",
    "SFTDataConfig",
    "SupervisedConfig",
    "SupervisedDataConfig",
    "SupervisedTrainerConfig",
    "PlaceConfig",
    "Topology",
    "pool_sizes",
    "TrainerConfig",
    "actor_engine",
    "batch_table",
    "compose",
    "critic_engine",
    "explain",
    "from_container",
    "generate_engine",
    "generate_model",
    "generate_sampling",
    "load_eval",
    "load_generate",
    "load_ppo",
    "load_rm",
    "load_sft",
    "micro_batch_per_rank",
    "ref_engine",
    "reference_page",
    "render_batch_table",
    "reward_engine",
    "rm_engine",
    "rollout_engine",
    "sampling",
    "sft_engine",
    "show",
    "unread_by",
    "without_secrets",
]
