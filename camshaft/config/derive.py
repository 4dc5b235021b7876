"""Pure functions that derive the config of each engine and rollout from the config of a run.

    topology = Topology(config.trainer.world_size)
    engine = build_engine(config.actor_rollout_ref.actor.strategy, actor_engine(config, topology, total_steps))

`total_steps` is the length of the learning-rate schedule. It counts iterations in RL runs (an iteration can have
several optimizer steps), and optimizer steps in supervised runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from camshaft.config.backends import engine_capabilities, select_options
from camshaft.config.engine import EngineConfig, EngineModel, LoRAConfig, OptimConfig
from camshaft.config.layout import Topology, micro_batch_per_rank
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.config.schema.engine import EngineSection
from camshaft.config.schema.fields import DType
from camshaft.config.schema.generate import GenerateConfig, GenerateTrainerConfig
from camshaft.config.schema.model import AnyModelConfig, LoadedModel, OptimSection, ResponsesModelConfig
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.roles import ActorConfig, CriticConfig, GeneratorConfig, RefConfig, RolloutConfig, ValKwargs
from camshaft.config.schema.supervised import RMConfig, SFTConfig, SupervisedConfig
from camshaft.config.schema.trainer import TrainerConfig

ALL_LINEAR = "all-linear"
"""Value of `target_modules` that selects every linear layer except the output head."""


@dataclass(frozen=True)
class MicroBatch:
    """Size limit of a micro-batch on each rank, either in sequences or in tokens."""

    sequences: int | None = None
    tokens: int | None = None


Pass = Literal["actor", "old_log_prob", "ref", "critic", "values", "reward"]
"""Kind of pass with a separate micro-batch size: updates of actor and critic, and forward passes for the others."""


class PassLimit(NamedTuple):
    """Keys that limit the micro-batches of a kind of pass, and their values."""

    key: str
    """Key of the deprecated count of sequences over all ranks. The key of the count per rank ends with `_per_gpu`."""
    count_global: int | None
    per_gpu: int | None
    tokens_key: str
    tokens: int
    is_dynamic: bool
    """Limit micro-batches by tokens instead of by sequences."""
    dp_size: Callable[[Topology], int]


def pass_limits(config: PPOConfig) -> dict[Pass, PassLimit]:
    """Return the limits of all kinds of passes. Those of a role that the run does not have may be invalid."""
    section, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
    return {
        "actor": _update_limit("actor_rollout_ref.actor", section.actor, config.actor_dp_size),
        "old_log_prob": _log_prob_limit("actor_rollout_ref.rollout", section.rollout, config.actor_dp_size),
        "ref": _log_prob_limit("actor_rollout_ref.ref", section.ref, config.ref_dp_size),
        "critic": _update_limit("critic", critic, config.critic_dp_size),
        "values": PassLimit(
            "critic.forward_micro_batch_size", critic.forward_micro_batch_size, critic.forward_micro_batch_size_per_gpu,
            "critic.forward_max_token_len_per_gpu", critic.forward_max_token_len_per_gpu, critic.use_dynamic_bsz,
            config.critic_dp_size,
        ),
        "reward": PassLimit(
            "reward_model.micro_batch_size", reward.micro_batch_size, reward.micro_batch_size_per_gpu,
            "reward_model.forward_max_token_len_per_gpu", reward.forward_max_token_len_per_gpu, reward.use_dynamic_bsz,
            config.reward_dp_size,
        ),
    }  # fmt: skip


def _update_limit(key: str, section: ActorConfig | CriticConfig, dp_size: Callable[[Topology], int]) -> PassLimit:
    return PassLimit(
        f"{key}.ppo_micro_batch_size", section.ppo_micro_batch_size, section.ppo_micro_batch_size_per_gpu,
        f"{key}.ppo_max_token_len_per_gpu", section.ppo_max_token_len_per_gpu, section.use_dynamic_bsz, dp_size,
    )  # fmt: skip


def _log_prob_limit(key: str, section: RolloutConfig | RefConfig, dp_size: Callable[[Topology], int]) -> PassLimit:
    return PassLimit(
        f"{key}.log_prob_micro_batch_size", section.log_prob_micro_batch_size,
        section.log_prob_micro_batch_size_per_gpu, f"{key}.log_prob_max_token_len_per_gpu",
        section.log_prob_max_token_len_per_gpu, section.log_prob_use_dynamic_bsz, dp_size,
    )  # fmt: skip


def micro_batch(config: PPOConfig, topology: Topology, kind: Pass) -> MicroBatch:
    """Return the micro-batch size of a kind of pass.

    If the actor computes no log-probs outside of updates, the size of its updates also limits other forward passes.
    """
    limits = pass_limits(config)
    limit = limits["actor" if kind == "old_log_prob" and not config.needs_log_prob_passes() else kind]
    if limit.is_dynamic:
        return MicroBatch(tokens=limit.tokens)
    return MicroBatch(micro_batch_per_rank(limit.per_gpu, limit.count_global, limit.dp_size(topology)))


def actor_engine(config: PPOConfig, topology: Topology, total_steps: int) -> EngineConfig:
    """Return the engine config of the actor. Its learning-rate schedule starts after the critic warm-up."""
    section = config.actor_rollout_ref
    optim = _optim(section.actor.optim, max(1, total_steps - config.trainer.critic_warmup))
    train, infer = micro_batch(config, topology, "actor"), micro_batch(config, topology, "old_log_prob")
    options = _options(section.actor.strategy, actor_engine_keys(config), section.actor)
    model, dtype = engine_model(section.model, section.model.random_init), section.actor.fsdp_config.model_dtype
    return _engine(config, model, dtype, options, infer, train, optim, section.actor.grad_clip)


def actor_engine_keys(config: PPOConfig) -> dict[str, Any]:
    """Return `engine_keys` of the actor, and `activation_offload`, which is in the section `model`."""
    section = config.actor_rollout_ref
    return section.actor.engine_keys() | {"activation_offload": section.model.enable_activation_offload}


def ref_engine(config: PPOConfig, topology: Topology) -> EngineConfig:
    """Return the engine config of the reference model: the model config of the actor, without an optimizer."""
    section = config.actor_rollout_ref
    options = _options(section.actor.strategy, section.ref.engine_keys(), section.ref)
    model, dtype = engine_model(section.model, section.model.random_init), section.ref.fsdp_config.model_dtype
    return _engine(config, model, dtype, options, micro_batch(config, topology, "ref"))


def critic_engine(config: PPOConfig, topology: Topology, total_steps: int) -> EngineConfig:
    """Return the engine config of the critic."""
    critic, dtype = config.critic, config.critic.model.fsdp_config.model_dtype
    train, infer = micro_batch(config, topology, "critic"), micro_batch(config, topology, "values")
    options = _options(critic.strategy, critic.engine_keys(), critic)
    model, optim = engine_model(critic.model, head="value"), _optim(critic.optim, total_steps)
    return _engine(config, model, dtype, options, infer, train, optim, critic.grad_clip)


def reward_engine(config: PPOConfig, topology: Topology) -> EngineConfig:
    """Return the engine config of the reward model, without an optimizer."""
    reward, dtype = config.reward_model, config.reward_model.model.fsdp_config.model_dtype
    options = _options(reward.strategy, reward.engine_keys(), reward)
    return _engine(config, reward_engine_model(config), dtype, options, micro_batch(config, topology, "reward"))


def reward_engine_model(config: PPOConfig) -> EngineModel:
    """Return the model of the engine that runs the reward model."""
    return EngineModel(head="reward", **_model_source(config.reward_model.model))


def rollout_engine(config: PPOConfig) -> RolloutEngineConfig:
    """Return the config of the rollout of a training run."""
    section = config.actor_rollout_ref
    changes: dict[str, Any] = {"enable_return_routed_experts": config.routing_mode() is not None}
    if not section.hybrid_engine:
        changes["free_cache_engine"] = False  # the rollout never sleeps
    generator = _rollout_engine_config(section.model, section.rollout, config.trainer).model_copy(update=changes)
    if section.rollout.lora_weights == "merged":
        return generator
    return generator.model_copy(update={"lora": _lora(section.model)})


def generate_engine(config: GenerateConfig) -> RolloutEngineConfig:
    """Return the config of the rollout of `camshaft generate`."""
    return _rollout_engine_config(config.model, config.rollout, config.trainer)


def _rollout_engine_config(
    model: AnyModelConfig | LoadedModel, rollout: GeneratorConfig, trainer: TrainerConfig | GenerateTrainerConfig
) -> RolloutEngineConfig:
    """Return the config of a rollout. Its limits apply to each rank."""
    return RolloutEngineConfig(
        model_path=model.source(),
        dtype=rollout.dtype,
        device=trainer.device,
        max_model_len=rollout.prompt_length + rollout.response_length,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        free_cache_engine=rollout.free_cache_engine,
        tensor_model_parallel_size=rollout.tensor_model_parallel_size,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        load_format=rollout.load_format,
        enable_prefix_caching=rollout.enable_prefix_caching,
        update_weights_bucket_megabytes=rollout.update_weights_bucket_megabytes,
        seed=trainer.seed,
        trust_remote_code=model.trust_remote_code,
        external_lib=model.external_lib,
        override_config=model.override_config,
        engine_kwargs=rollout.engine_kwargs,
    )


def sampling(config: PPOConfig, validate: bool = False, greedy: bool = False) -> dict[str, Any]:
    """Return the arguments of `SamplingParams` for training or validation. `greedy` selects greedy decoding."""
    rollout = config.actor_rollout_ref.rollout
    arguments = _sampling(rollout, rollout.val_kwargs if validate else rollout)
    return arguments | {"do_sample": False} if greedy else arguments


def generate_sampling(config: GenerateConfig) -> dict[str, Any]:
    """Return the arguments of `SamplingParams` for `camshaft generate`."""
    return _sampling(config.rollout, config.rollout)


def _sampling(rollout: GeneratorConfig, section: GeneratorConfig | ValKwargs) -> dict[str, Any]:
    return {
        "max_tokens": rollout.response_length,
        "temperature": section.temperature,
        "top_k": section.top_k,
        "top_p": section.top_p,
        "min_p": section.min_p,
        "repetition_penalty": section.repetition_penalty,
        "presence_penalty": section.presence_penalty,
        "frequency_penalty": section.frequency_penalty,
        "stop": section.stop,
        "stop_token_ids": section.stop_token_ids,
        "do_sample": section.do_sample,
        "ignore_eos": rollout.ignore_eos,
    }


def generate_model(config: GenerateConfig) -> EngineModel:
    """Return the model whose weights `camshaft generate` syncs to its rollout."""
    return EngineModel(**_model_source(config.model))


def sft_engine(config: SFTConfig, total_steps: int) -> EngineConfig:
    """Return the engine config of `camshaft sft`."""
    return _supervised_engine(config, engine_model(config.model, config.model.random_init), total_steps)


def rm_engine(config: RMConfig, total_steps: int) -> EngineConfig:
    """Return the engine config of `camshaft rm`.

    The model folder contains a reward model, or a causal language model, which gets a new reward head.
    """
    model = engine_model(config.model, config.model.random_init, "reward").model_copy(update={"new_head": True})
    return _supervised_engine(config, model, total_steps)


def _supervised_engine(config: SupervisedConfig, model: EngineModel, total_steps: int) -> EngineConfig:
    """Return the engine config of a supervised run. Its batch sizes apply to each rank."""
    data, dtype, optim = config.data, config.fsdp_config.model_dtype, _optim(config.optim, total_steps)
    train = MicroBatch(data.micro_batch_size_per_gpu)
    if data.use_dynamic_bsz:
        train = MicroBatch(tokens=data.max_token_len_per_gpu)
    options = _options(config.strategy, config.engine_keys(), config)
    return _engine(config, model, dtype, options, train, train, optim, config.grad_clip)


def _engine(
    config: PPOConfig | SupervisedConfig,
    model: EngineModel,
    dtype: DType,
    options: dict[str, Any],
    infer: MicroBatch,
    train: MicroBatch = MicroBatch(),
    optim: OptimConfig | None = None,
    grad_clip: float = 1.0,
) -> EngineConfig:
    """Return an engine config. Without `optim` the engine supports forward passes only."""
    return EngineConfig(
        model=model,
        optim=optim,
        grad_clip=grad_clip,
        micro_batch_size=train.sequences,
        max_tokens=train.tokens,
        infer_micro_batch_size=infer.sequences,
        infer_max_tokens=infer.tokens,
        device=config.trainer.device,
        dtype=dtype,
        seed=config.trainer.seed,
        options=options,
    )


def _options(strategy: str, keys: dict[str, Any], section: EngineSection) -> dict[str, Any]:
    """Return `EngineConfig.options` of a role: the keys that are options of the engine, and `engine_kwargs`."""
    return select_options(engine_capabilities(strategy).options, keys, section.engine_kwargs)


def shares_prompts(config: PPOConfig, section: ActorConfig | CriticConfig) -> bool:
    """Return True if the engine of a role can compute a prompt that several responses share only once."""
    fsdp = section.fsdp_config if isinstance(section, ActorConfig) else section.model.fsdp_config
    on_cpu, in_half = config.trainer.device.partition(":")[0] == "cpu", fsdp.compute_dtype() in ("bfloat16", "float16")
    is_split = section.ulysses_sequence_parallel_size > 1
    return engine_capabilities(section.strategy).shares_prefixes and (on_cpu or in_half) and not is_split


def engine_model(
    model: AnyModelConfig, random_init: bool = False, head: Literal["causal_lm", "value", "reward"] = "causal_lm"
) -> EngineModel:
    """Return the engine model of a trained role or of the reference model."""
    return EngineModel(
        head=head,
        random_init=random_init,
        enable_gradient_checkpointing=model.enable_gradient_checkpointing,
        gradient_checkpointing_mode=model.gradient_checkpointing_mode,
        use_prefix_grouper=model.use_prefix_grouper if isinstance(model, ResponsesModelConfig) else True,
        router_aux_loss_coef=model.router_aux_loss_coef,
        lora=_lora(model),
        **_model_source(model),
    )


def _model_source(model: AnyModelConfig | LoadedModel) -> dict[str, Any]:
    """Return the fields of `EngineModel` that the models of all commands have."""
    return {
        "path": model.source(),
        "override_config": model.override_config,
        "external_lib": model.external_lib,
        "trust_remote_code": model.trust_remote_code,
    }


def _lora(model: AnyModelConfig) -> LoRAConfig | None:
    if not model.lora_rank:
        return None
    return LoRAConfig(
        rank=model.lora_rank,
        alpha=model.lora_alpha,
        target_modules=ALL_LINEAR if model.target_modules == (ALL_LINEAR,) else model.target_modules,
        exclude_modules=model.exclude_modules,
        adapter_path=model.lora_adapter_path,
    )


def _optim(optim: OptimSection, total_steps: int) -> OptimConfig:
    total = total_steps if optim.total_training_steps == -1 else optim.total_training_steps
    return OptimConfig(
        optimizer=optim.optimizer,
        override_optimizer_config=optim.override_optimizer_config,
        lr=optim.lr,
        betas=optim.betas,
        weight_decay=optim.weight_decay,
        lr_scheduler_type=optim.lr_scheduler_type,
        lr_warmup_steps=optim.warmup_steps(total),
        total_training_steps=total,
        min_lr_ratio=0.0 if optim.min_lr_ratio is None else optim.min_lr_ratio,
        num_cycles=optim.num_cycles,
    )
