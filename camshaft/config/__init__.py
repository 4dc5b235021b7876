"""Config of all commands: defaults, schema, loading, checks, and the config of each engine.

    from camshaft.config import load_ppo
    config = load_ppo(["actor_rollout_ref.actor.strategy=reference", "trainer.device=cpu", ...])
    config.actor_rollout_ref.actor.optim.lr

    schema/             types, bounds, defaults and descriptions of keys, one file per section. `fields.py` defines the
                        base class of sections and shared value types, `fsdp.py` and `rollouts.py` the options of
                        backends, `aliases.py` the aliases of keys and values
    defaults.py         the tree of the defaults of a command
    engine.py           config, options and capabilities of a training engine
    rollout.py          config, options and capabilities of a rollout
    backends.py         registry of engines and rollouts
    engine_features.py  features of the engines, and the page that lists them
    layout.py           resource pools, numbers of ranks, controller
    auto/               chooses the values of keys that are `auto`, and fits them to the data and the memory
    load.py             renames aliases, resolves `${...}` and validates
    composition.py      composes config files and overrides, in the syntax of Hydra
    config_files.py     reads config files and their defaults lists
    short_names.py      short names of common keys, and algorithm names that set several keys
    serve.py            config of `camshaft serve`
    command.py          loads configs from command-line arguments, including sweeps
    checks/             checks that involve several keys: engines and rollouts, models, scoring functions, and notices
                        about keys that nothing reads in a run
    files.py            checks of files and folders on disk
    model_settings.py   reads the config.json of a model
    derive.py           derives the config of each engine and rollout from the config of a run
    run_folder.py       names and folders of runs
    render.py           renders descriptions of keys, the reference page, batch sizes, and values without secrets
    errors.py           problems of keys, and the error message that lists them
    tree.py             access to nested dicts by dotted key

To add a key, add its field to the schema. This package does not import torch.
"""

from camshaft.config.backends import unread_keys
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
from camshaft.config.render import batch_table, explain, reference_page, render_batch_table, show, without_secrets
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.config.run_folder import resume_arguments, run_name
from camshaft.config.schema.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from camshaft.config.schema.evaluation import EvalConfig
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.reward import CustomRewardConfig
from camshaft.config.schema.supervised import RMConfig, SFTConfig, SupervisedConfig, SupervisedTrainerConfig
from camshaft.config.schema.trainer import TrainerConfig
from camshaft.config.short_names import expand_short_names

__all__ = [
    "GLOBAL_POOL", "AlgorithmConfig", "CustomRewardConfig", "EngineConfig", "EngineModel", "EvalConfig",
    "GenerateConfig", "OptimConfig", "PPOConfig", "RMConfig", "RolloutCorrectionConfig", "RolloutEngineConfig",
    "SFTConfig", "SupervisedConfig", "SupervisedTrainerConfig", "PlacementConfig", "Topology", "pool_sizes",
    "TrainerConfig", "actor_engine", "batch_table", "compose", "critic_engine", "expand_short_names", "explain",
    "from_container", "generate_engine", "generate_model", "generate_sampling", "load_eval", "load_generate",
    "load_ppo", "load_rm", "load_sft", "micro_batch_per_rank", "ref_engine", "reference_page", "render_batch_table",
    "reward_engine", "rm_engine", "rollout_engine", "sampling", "sft_engine", "resume_arguments", "run_name", "show",
    "unread_keys", "without_secrets",
]  # fmt: skip
