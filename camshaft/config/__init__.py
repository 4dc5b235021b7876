"""Config: from YAML files and the command line to the config of one engine.

    from camshaft.config import load_ppo
    config = load_ppo(["actor_rollout_ref.actor.strategy=reference", "trainer.device=cpu", ...])
    config.actor_rollout_ref.actor.optim.lr

    ppo_trainer.yaml sft_trainer.yaml rm_trainer.yaml generation.yaml evaluation.yaml
                        all defaults, with comments
    schema/             types, bounds and descriptions: one file per section; `fields.py` has the base class of sections
                        and shared value types, `fsdp.py` and `rollouts.py` the options of backends
    engine.py           config and capabilities of one training engine, independent of roles
    rollout.py          config and capabilities of one rollout
    backends.py         registry of engines and rollouts with their capabilities
    layout.py           resource pools, ranks and the controller
    load.py             composition with Hydra, aliases, interpolation, validation
    command.py          the same for the arguments of a command, including sweeps
    checks.py           combinations of keys
    backend_checks.py   engines and rollouts against their capabilities
    files.py            files and folders on disk
    derive.py           the config of each engine and rollout of a run
    render.py           descriptions of keys, reference page, table of batch sizes, values without secrets
    errors.py           problems of single keys, and the text of the error that lists them
    tree.py             dotted keys

To add a key, add a line to the YAML file and one to the schema. Nothing here imports torch.
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
from camshaft.config.layout import GLOBAL_POOL, PlacementConfig, Topology, micro_batch_per_rank, pool_sizes
from camshaft.config.load import from_container, load_eval, load_generate, load_ppo, load_rm, load_sft
from camshaft.config.render import (
    BatchRow,
    batch_table,
    explain,
    reference_page,
    render_batch_table,
    show,
    without_secrets,
)
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
    "PlacementConfig",
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
