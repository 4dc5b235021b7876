"""Checks of engines and rollouts against their capabilities (`backends.py`).

    problems = [*check_ppo_engines(config)]        # or check_supervised_engines, check_rollout

The checks report settings that the backend does not support, options that are incompatible with each other, and
parallel layouts that are incompatible with the number of ranks. The options class of the backend defines the last two
kinds.
"""

import importlib.util
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from camshaft.config.backends import (
    ENGINES,
    ROLLOUTS,
    Backend,
    Capabilities,
    engine_capabilities,
    rollout_capabilities,
    select_options,
    targets,
    unread_keys,
    used_capabilities,
)
from camshaft.config.derive import actor_engine_keys, engine_model, reward_engine_model
from camshaft.config.engine import Conflict, EngineCapabilities, EngineModel, invalid_options
from camshaft.config.errors import ABSENT, Problem, group_problems, unknown_name
from camshaft.config.foreign.topics import topic_of_key
from camshaft.config.guards import is_mapping
from camshaft.config.layout import PlacementConfig
from camshaft.config.rollout import OPTIONAL_SAMPLING
from camshaft.config.schema.fsdp import FSDPConfig, FSDPOptions
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.model import AnyModelConfig
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.roles import GeneratorConfig, RolloutConfig, ValKwargs
from camshaft.config.schema.supervised import RMConfig, SupervisedConfig
from camshaft.config.schema.trainer import pool_key
from camshaft.config.tree import flatten, format_value
from camshaft.errors import ConfigError
from camshaft.plugins import install_command, list_names

ACTOR, REF, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
WORLD = ("trainer.nnodes", "trainer.n_gpus_per_node")


@dataclass(frozen=True)
class Role:
    """The engine of a role: its settings, and the config keys of these settings."""

    strategy: str
    strategy_key: str
    key: str
    """Prefix of the keys of its section, including the dot. Empty if the section is the entire config."""
    fsdp_key: str
    settings: Mapping[str, Any]
    """Settings of the section that map to engine options (`engine_keys`), by option name."""
    engine_kwargs: Mapping[str, Any]
    model: EngineModel
    model_key: str = ""
    section: AnyModelConfig | None = None
    """Section `model` of a trained engine. None for an engine that is not trained."""

    def config_key(self, option: str) -> str:
        """Return the config key of `Conflict.option`."""
        if not option:
            return self.strategy_key
        if option.startswith("model."):
            return f"{self.model_key}.{option.removeprefix('model.')}"
        name = option.partition(".")[0]
        return f"{self.key}engine_kwargs.{option}" if name in self.engine_kwargs else self.setting_key(option)

    def setting_key(self, option: str) -> str:
        """Return the config key of a dotted option in `settings`."""
        keys = {
            "activation_offload": f"{self.model_key}.enable_activation_offload",
            "async_save": f"{self.key}checkpoint.async_save",
        }
        if option in keys:
            return keys[option]
        in_fsdp_config = option.partition(".")[0] in FSDPConfig.model_fields
        return f"{self.fsdp_key}.{option}" if in_fsdp_config else f"{self.key}{option}"

    def option_value(self, option: str) -> Any:
        """Return the value of a dotted option, or ABSENT if it is not set."""
        if not option:
            return self.strategy
        if option.startswith("model."):
            return getattr(self.section or self.model, option.removeprefix("model."), ABSENT)
        value: Any = {**self.settings, **self.engine_kwargs}
        for name in option.split("."):
            if not is_mapping(value) or name not in value:
                return ABSENT
            value = value[name]
        return value


def check_ppo_engines(config: PPOConfig) -> Iterator[Problem]:
    """Check the engines of all roles of an RL run."""
    yield from _check_engines(ppo_roles(config), config.trainer)
    if config.kl_plan().is_used:
        yield from _check_reference_layout(config)


def check_supervised_engines(config: SupervisedConfig) -> Iterator[Problem]:
    """Check the engine of a supervised run."""
    yield from _check_engines([([supervised_role(config)], config.trainer.world_size)], config.trainer)


def supervised_role(config: SupervisedConfig) -> Role:
    """Return the role of a supervised run."""
    model = engine_model(config.model, head="reward" if isinstance(config, RMConfig) else "causal_lm")
    return Role(
        config.strategy, "strategy", "", "fsdp_config", config.engine_keys(), config.engine_kwargs, model, "model",
        config.model,
    )  # fmt: skip


def ppo_roles(config: PPOConfig) -> list[tuple[list[Role], int]]:
    """Return the roles with an engine, and their number of ranks. Actor and reference form one group."""
    roles, critic, topology = config.actor_rollout_ref, config.critic, config.topology()
    strategy, model = roles.actor.strategy, engine_model(roles.model)
    policy = [
        Role(
            strategy, f"{ACTOR}.strategy", f"{ACTOR}.", f"{ACTOR}.fsdp_config", actor_engine_keys(config),
            roles.actor.engine_kwargs, model, MODEL, roles.model,
        )
    ]  # fmt: skip
    if config.kl_plan().needs_model:
        policy.append(
            Role(
                strategy, f"{ACTOR}.strategy", f"{REF}.", f"{REF}.fsdp_config", roles.ref.engine_keys(),
                roles.ref.engine_kwargs, model, MODEL, roles.model,
            )
        )  # fmt: skip
    groups = [(policy, topology.world_size)]
    if config.needs_critic():
        role = Role(
            critic.strategy, "critic.strategy", "critic.", "critic.model.fsdp_config", critic.engine_keys(),
            critic.engine_kwargs, engine_model(critic.model, head="value"), "critic.model", critic.model,
        )  # fmt: skip
        groups.append(([role], topology.critic_topology().world_size))
    if config.needs_reward_engine():
        reward = config.reward_model
        role = Role(
            reward.strategy, "reward_model.strategy", "reward_model.", "reward_model.model.fsdp_config",
            reward.engine_keys(), reward.engine_kwargs, reward_engine_model(config), "reward_model.model",
        )  # fmt: skip
        groups.append(([role], topology.reward_model_topology().world_size))
    return groups


def layouts_are_valid(config: PPOConfig | SupervisedConfig) -> bool:
    """Return True if the options of every engine are valid, so that `ranks_per_row` can be computed."""
    if isinstance(config, SupervisedConfig):
        roles = [supervised_role(config)]
    else:
        roles = [role for group, _ in ppo_roles(config) for role in group]
    for role in roles:
        try:
            schema = engine_capabilities(role.strategy).options
        except ConfigError:
            return False
        if invalid_options(schema, select_options(schema, role.settings, role.engine_kwargs)):
            return False
    return True


# -- engines --------------------------------------------------------------------------------------


def _check_engines(groups: list[tuple[list[Role], int]], trainer: PlacementConfig) -> Iterator[Problem]:
    """Check the engines of all groups. An unknown strategy that several groups use is reported once."""
    capabilities: dict[str, EngineCapabilities] = {}
    first_roles: dict[str, Role] = {}
    for group, _ in groups:
        first_roles.setdefault(group[0].strategy, group[0])
    for role in first_roles.values():
        try:
            capabilities[role.strategy] = engine_capabilities(role.strategy)
        except ConfigError as error:
            yield _unknown_backend(role.strategy_key, role.strategy, ENGINES, "camshaft.engines", error)
    groups = [(group, ranks) for group, ranks in groups if group[0].strategy in capabilities]
    yield from _check_single_process([group[0] for group, ranks in groups if ranks > 1], capabilities, trainer)
    yield from _check_trained_dtypes([group[0] for group, _ in groups], capabilities)
    for group, ranks in groups:
        yield from _check_group(group, capabilities[group[0].strategy], ranks)


def _unknown_backend(key: str, name: str, backends: Mapping[str, Any], group: str, error: ConfigError) -> Problem:
    """Return the problem of a name that is not registered, or of a class that cannot be imported."""
    if ":" in name:
        return Problem(key, name, f"{error}.")
    if (topic := topic_of_key(name)) is not None:
        return Problem(key, name, topic.message())
    return unknown_name(key, name, list_names(targets(backends), group))


def _check_single_process(
    roles: list[Role], capabilities: Mapping[str, EngineCapabilities], trainer: PlacementConfig
) -> Iterator[Problem]:
    """Report engines that support only one rank in a run with several ranks."""
    keys = [role.strategy_key for role in roles if not capabilities[role.strategy].multiple_ranks]
    if not keys:
        return
    replacement = _supporting_name(ENGINES, lambda capabilities: capabilities.multiple_ranks)
    fix = " ".join(f"{key}={replacement}" for key in keys)
    sizes = {"trainer.nnodes": trainer.nnodes, "trainer.n_gpus_per_node": trainer.n_gpus_per_node}
    larger = [key for key, size in sizes.items() if size > 1]
    strategies = dict.fromkeys(role.strategy for role in roles if role.strategy_key in keys)
    alternative = " ".join(f"{key}=1" for key in larger) or "place the role in a resource pool with one rank"
    message = f"strategy={', '.join(strategies)} supports only one process. Set {fix}, or {alternative}."
    key = (larger or keys)[0]
    yield Problem(key, sizes.get(key, roles[0].strategy), message, tuple(keys))


def _check_trained_dtypes(roles: list[Role], capabilities: Mapping[str, EngineCapabilities]) -> Iterator[Problem]:
    """Report trained weights of a dtype in which their engine can only compute. The same dtype is one problem."""
    rejected: dict[str, list[Role]] = {}
    for role in roles:
        dtype, supported = role.settings["model_dtype"], capabilities[role.strategy]
        is_trained = role.section is not None and role.model.lora is None
        if is_trained and dtype in supported.dtypes and dtype not in supported.training_dtypes:
            rejected.setdefault(dtype, []).append(role)
    for dtype, same in rejected.items():
        keys, compute_key = [role.setting_key("model_dtype") for role in same], "mixed_precision.param_dtype"
        message = (
            f"training {dtype} weights is not implemented, because optimizer updates that are smaller than the "
            f"rounding error of {dtype} are lost. Keep float32 weights and compute in {dtype}, or train an adapter "
            f"({same[0].model_key}.lora_rank). Set {keys[0]}=float32 {same[0].setting_key(compute_key)}={dtype}."
        )
        yield group_problems(keys, dtype, message)


def _check_group(group: list[Role], capabilities: EngineCapabilities, world_size: int) -> Iterator[Problem]:
    """Check the engines of roles with the same strategy. A problem that several roles have is reported once."""
    yield from _check_lora(group[0], capabilities)
    yield from _check_router_aux_loss(group[0], capabilities)
    yield from _check_dtypes(group, capabilities)
    yield from _check_unsupported(group, capabilities, world_size)
    reported: set[str] = set()
    for role in group:
        for problem in _check_options(role, capabilities, world_size):
            if problem.message not in reported:
                yield problem
            reported.add(problem.message)


def _check_unsupported(group: list[Role], capabilities: EngineCapabilities, world_size: int) -> Iterator[Problem]:
    """Report settings that the engine does not support. The same setting in several roles is one problem."""
    options = capabilities.options.model_fields
    settings: dict[str, list[tuple[str, Any]]] = {}
    for role in group:
        for option, value in _requested_settings(role, capabilities.shards_weights and world_size > 1).items():
            if option.partition(".")[0] not in options:
                settings.setdefault(option, []).append((role.setting_key(option), value))
    for option, uses in settings.items():
        name = option.partition(".")[0]
        supporting = (other for other, backend in ENGINES.items() if name in backend.capabilities.options.model_fields)
        message = (
            f"strategy={group[0].strategy} does not support this key. Set {group[0].strategy_key}={next(supporting)}, "
            "or omit the key."
        )
        yield group_problems([key for key, _ in uses], uses[0][1], message)


def _requested_settings(role: Role, shards_weights: bool) -> dict[str, Any]:
    """Return the settings that require support by the engine, by dotted option.

    Settings that equal their default, or that describe what the engine does, are omitted.
    """
    default, settings = flatten(FSDPOptions().model_dump(), ()), flatten(role.settings, ())
    requested = {option: value for option, value in settings.items() if option in default and value != default[option]}
    if requested.get("fsdp_size") == 1 and not shards_weights:
        del requested["fsdp_size"]
    if requested.get("mixed_precision.param_dtype") == settings["model_dtype"]:
        del requested["mixed_precision.param_dtype"]
    if "mixed_precision.reduce_dtype" in requested and requested["mixed_precision.reduce_dtype"] is None:
        del requested["mixed_precision.reduce_dtype"]
    return requested


def _check_options(role: Role, capabilities: EngineCapabilities, world_size: int) -> Iterator[Problem]:
    """Check the engine options of a role: their values, their combination, and the parallel layout."""
    schema = capabilities.options
    misplaced = [name for name in role.engine_kwargs if name in role.settings and name in schema.model_fields]
    for name in misplaced:
        message = f"duplicates {role.setting_key(name)}. Set that key instead."
        yield Problem(role.config_key(name), role.engine_kwargs[name], message)
    values = select_options(schema, role.settings, role.engine_kwargs)
    errors = invalid_options(schema, values)
    for error in errors:
        yield Problem(role.config_key(error.option), role.option_value(error.option), f"{error.message}.")
    if errors or misplaced:
        return
    options = schema.from_dict(values)
    for conflict in options.layout_conflicts(world_size):
        yield to_problem(role, conflict, WORLD)
    for conflict in options.conflicts(role.model):
        yield to_problem(role, conflict, ())


def to_problem(role: Role, conflict: Conflict, related: tuple[str, ...]) -> Problem:
    """Return the problem of a role that a conflict describes, with config keys in place of options."""
    fixes: list[str] = []
    for fix in conflict.fixes:
        option, _, value = fix.partition("=")
        fixes.append(f"{role.strategy_key if option == 'strategy' else role.config_key(option)}={value}")
    message = f"{conflict.message}. Set {', or '.join(fixes)}." if fixes else f"{conflict.message}."
    return Problem(role.config_key(conflict.option), role.option_value(conflict.option), message, related)


def _check_lora(role: Role, capabilities: EngineCapabilities) -> Iterator[Problem]:
    """Check the LoRA settings of a role, and that the engine supports LoRA."""
    model, key = role.section, role.model_key
    if model is None:
        return
    if model.lora_adapter_path is not None and not model.lora_rank:
        message = f"has no effect with {key}.lora_rank=0. Set {key}.lora_rank to the rank of the adapter."
        yield Problem(f"{key}.lora_adapter_path", model.lora_adapter_path, message, (f"{key}.lora_rank",))
    if model.lora_rank and not model.target_modules:
        message = f"no layer is selected for LoRA adapters. Set {key}.target_modules=all-linear."
        yield Problem(f"{key}.target_modules", None, message, (f"{key}.lora_rank",))
    if model.lora_rank and not capabilities.supports_lora:
        message = f"strategy={role.strategy} does not support LoRA. Set {key}.lora_rank=0."
        yield Problem(f"{key}.lora_rank", model.lora_rank, message, (role.strategy_key,))
    dtype, dtypes = role.settings["model_dtype"], capabilities.frozen_dtypes
    if model.lora_rank and dtype in capabilities.dtypes and dtype not in dtypes:
        message = (
            f"strategy={role.strategy} does not support {key}.lora_rank={model.lora_rank} on weights of this dtype. "
            f"Set one of {', '.join(dtypes)}."
        )
        yield Problem(role.setting_key("model_dtype"), dtype, message, (role.strategy_key, f"{key}.lora_rank"))


def _supporting_name(registry: Mapping[str, Backend[Capabilities]], supports: Callable[[Capabilities], bool]) -> str:
    """Return the name of the first backend whose capabilities support a setting, for error messages."""
    return next(name for name, backend in registry.items() if supports(backend.capabilities))


def _check_router_aux_loss(role: Role, capabilities: EngineCapabilities) -> Iterator[Problem]:
    """Check that the engine of a trained role supports the auxiliary loss of a mixture of experts."""
    if role.section is None or not role.section.router_aux_loss_coef or capabilities.supports_router_aux_loss:
        return
    key = f"{role.model_key}.router_aux_loss_coef"
    supporting = _supporting_name(ENGINES, lambda capabilities: capabilities.supports_router_aux_loss)
    message = (
        f"strategy={role.strategy} does not support the router auxiliary loss. Set {key}=0, or "
        f"{role.strategy_key}={supporting}."
    )
    yield Problem(key, role.section.router_aux_loss_coef, message, (role.strategy_key,))


def _check_dtypes(group: list[Role], capabilities: EngineCapabilities) -> Iterator[Problem]:
    """Check that the engine supports the dtype of the weights of each role."""
    for role in group:
        dtype = role.settings["model_dtype"]
        if dtype not in capabilities.dtypes:
            message = (
                f"strategy={role.strategy} does not support this dtype. Set one of {', '.join(capabilities.dtypes)}."
            )
            yield Problem(role.setting_key("model_dtype"), dtype, message, (role.strategy_key,))


def _check_reference_layout(config: PPOConfig) -> Iterator[Problem]:
    """Check that the reference has the same parallel layout as the actor, if the run requires it.

    With LoRA, both use the same engine. With an exact KL divergence, each rank compares the distributions of both.
    """
    actor, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    kl = config.kl_plan()
    if not kl.needs_model:
        cause = f"{MODEL}.lora_rank"
        reason = (
            f"has no effect with {cause}={config.actor_rollout_ref.model.lora_rank}, because the reference is the "
            "actor's engine with its adapter disabled."
        )
    elif "full" in (kl.in_reward, kl.in_loss):
        cause = "algorithm.kl_penalty" if kl.in_reward == "full" else f"{ACTOR}.kl_loss_type"
        reason = (
            f"differs from the value of the actor, but {cause}=full requires the same layout, because it compares both "
            "distributions on the same ranks."
        )
    else:
        return
    settings = {
        "ulysses_sequence_parallel_size": (ref.ulysses_sequence_parallel_size, actor.ulysses_sequence_parallel_size),
        "fsdp_config.tensor_parallel_size": (
            ref.fsdp_config.tensor_parallel_size,
            actor.fsdp_config.tensor_parallel_size,
        ),
        "engine_kwargs": (ref.engine_kwargs, actor.engine_kwargs),
    }
    for name, (ref_value, actor_value) in settings.items():
        if ref_value != actor_value:
            message = f"{reason} Omit the key, or set {ACTOR}.{name}={format_value(ref_value)}."
            yield Problem(f"{REF}.{name}", ref_value, message, (cause, f"{ACTOR}.{name}"))


# -- libraries ------------------------------------------------------------------------------------


def required_libraries(config: PPOConfig | SupervisedConfig | GenerateConfig) -> Iterator[tuple[str, str, str]]:
    """Yield each setting that requires an optional library, the name of its module, and an alternative setting.

    With Ray, the libraries of engines and rollouts may be installed on other machines only.
    """
    if config.trainer.backend() == "ray":
        yield "trainer.controller=ray", "ray", "trainer.controller=local"
        return
    roles: list[Role] = []
    rollouts: dict[str, GeneratorConfig] = {}
    if isinstance(config, SupervisedConfig):
        roles = [supervised_role(config)]
    elif isinstance(config, GenerateConfig):
        rollouts = {"rollout": config.rollout}
    elif config.actor_rollout_ref.worker_cls is None:
        roles, rollouts = [group[0] for group, _ in ppo_roles(config)], {ROLLOUT: config.actor_rollout_ref.rollout}
    else:
        roles = [group[0] for group, _ in ppo_roles(config)[1:]]
    for role in roles:
        library = engine_capabilities(role.strategy).library
        if library is not None:
            yield f"{role.strategy_key}={role.strategy}", library, f"{role.strategy_key}=fsdp"
        if role.model.lora is not None:
            key = f"{role.model_key}.lora_rank"
            yield f"{key}={role.model.lora.rank}", "peft", f"{key}=0"
    for section, generator in rollouts.items():
        library = used_capabilities(generator.name, generator.engine_kwargs).library
        if library is not None:
            yield f"{section}.name={generator.name}", library, f"{section}.name=torch, which is built in"


def check_libraries(config: PPOConfig | SupervisedConfig | GenerateConfig) -> None:
    """Raise ConfigError if an engine, the rollout or the controller requires a library that is not installed."""
    for setting, library, alternative in required_libraries(config):
        if importlib.util.find_spec(library) is None:
            raise ConfigError(
                f"{setting} requires '{library}', which is not installed: {install_command(library)}, or use "
                f"{alternative}"
            )


# -- rollouts -------------------------------------------------------------------------------------


def check_rollout(
    section: str, rollout: GeneratorConfig, world_size: int, pool: str | None = None
) -> Iterator[Problem]:
    """Check the name, the sampling, the options and the tensor-parallel size of a rollout in `section`.

    `pool` is the resource pool of a rollout on devices of its own, which has `world_size` ranks.
    """
    key = f"{section}.name"
    ranks = WORLD if pool is None else (pool_key(pool),)
    owner = "" if pool is None else f"; {ranks[0]} sets the number of ranks"
    try:
        capabilities = rollout_capabilities(rollout.name)
    except ConfigError as error:
        yield _unknown_backend(key, rollout.name, ROLLOUTS, "camshaft.rollouts", error)
        return
    engine_kwargs = rollout.engine_kwargs
    if inner := capabilities.inner_rollout(engine_kwargs):
        try:
            capabilities = used_capabilities(rollout.name, engine_kwargs)
        except ConfigError as error:
            yield _unknown_backend(f"{section}.engine_kwargs.rollout", inner[0], ROLLOUTS, "camshaft.rollouts", error)
            return
        engine_kwargs = inner[1]
    yield from _check_sampling(section, rollout, capabilities.sampling)
    try:
        options = capabilities.options.from_dict(engine_kwargs, world_size)
    except ValueError as error:
        yield Problem(f"{section}.engine_kwargs", rollout.engine_kwargs, f"{error}{owner}.", (*ranks, key))
        return
    for conflict in options.conflicts(rollout.tensor_model_parallel_size, world_size):
        name = f"{section}.{conflict.option}"
        message = f"{conflict.message}{owner}. Set {', or '.join(f'{section}.{fix}' for fix in conflict.fixes)}."
        yield Problem(name, getattr(rollout, conflict.option), message, (*ranks, key))


def check_load_format(section: str, rollout: GeneratorConfig, strategy: str | None) -> Iterator[Problem]:
    """Check that the actor's engine supports `load_format`; `strategy` is None for a run without an actor."""
    key, strategy_key = f"{section}.load_format", f"{ACTOR}.strategy"
    loader = rollout.load_format.removeprefix("dummy_")
    try:
        unread = unread_keys(rollout.name, rollout.engine_kwargs)
        engine = EngineCapabilities() if strategy is None else engine_capabilities(strategy)
    except ConfigError:
        return
    if loader in engine.load_formats or "load_format" in unread:
        return
    supporting = _supporting_name(ENGINES, lambda capabilities: loader in capabilities.load_formats)
    if strategy is None:
        replacement = rollout.load_format.replace(loader, "hf")
        problem = f"requires an actor with strategy={supporting}, but this command has no actor"
        yield Problem(key, rollout.load_format, f"{problem}. Set {key}={replacement}.")
    else:
        replacement = rollout.load_format.replace(loader, "dtensor")
        problem = f"requires {strategy_key}={supporting}, but {strategy_key}={strategy}"
        fix = f"Set {key}={replacement}, or {strategy_key}={supporting}."
        yield Problem(key, rollout.load_format, f"{problem}. {fix}", (strategy_key,))


def _check_sampling(prefix: str, rollout: GeneratorConfig, supported: Collection[str]) -> Iterator[Problem]:
    """Check that the rollout supports all sampling parameters that have an effect."""
    sections: dict[str, GeneratorConfig | ValKwargs] = {prefix: rollout}
    if isinstance(rollout, RolloutConfig):
        sections[f"{prefix}.val_kwargs"] = rollout.val_kwargs
    for section, values in sections.items():
        for name, off in OPTIONAL_SAMPLING.items():
            value, key, name_key = getattr(values, name), f"{section}.{name}", f"{prefix}.name"
            if value != off and name not in supported:
                supporting = ", ".join(n for n, rollout in ROLLOUTS.items() if name in rollout.capabilities.sampling)
                problem = f"is not supported by {name_key}={rollout.name}"
                message = f"{problem}. Set {key}={off}, or {name_key} to one of {supporting}."
                yield Problem(key, value, message, (name_key,))


def check_rollout_adapter(config: PPOConfig) -> Iterator[Problem]:
    """Check `lora_weights=adapter`, with which a weight sync sends only the LoRA adapter."""
    model, rollout, key = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout, f"{ROLLOUT}.lora_weights"
    if rollout.lora_weights == "merged":
        return
    if not model.lora_rank:
        message = f"has no effect with {MODEL}.lora_rank=0, because there is no adapter. Set {key}=merged."
        yield Problem(key, rollout.lora_weights, message, (f"{MODEL}.lora_rank",))
    try:
        supports_adapter = rollout_capabilities(rollout.name).supports_adapter
    except ConfigError:
        return
    if not supports_adapter:
        supporting = _supporting_name(ROLLOUTS, lambda capabilities: capabilities.supports_adapter)
        message = (
            f"{ROLLOUT}.name={rollout.name} does not support separate LoRA adapters. Set {key}=merged, or"
            f" {ROLLOUT}.name={supporting}."
        )
        yield Problem(key, rollout.lora_weights, message, (f"{ROLLOUT}.name",))


def check_routed_experts(config: PPOConfig) -> Iterator[Problem]:
    """Check the keys that return, compare or replay the expert choices of the rollout."""
    mode, rollout, actor = config.routing_mode(), config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    if mode is None:
        return
    replay, returned = f"{ACTOR}.router_replay.mode", f"{ROLLOUT}.enable_return_routed_experts"
    key, value, off = (replay, "R3", "disabled") if mode == "replay" else (returned, True, "false")
    if config.plays_episodes():
        message = f"does not work with episodes, which are several generations. Set {key}={off}."
        yield Problem(key, value, message, (f"{ROLLOUT}.{rollout.multi_turn.player_key()}",))
    try:
        returns_experts = rollout_capabilities(rollout.name).supports_routed_experts
        supports_replay = engine_capabilities(actor.strategy).supports_router_replay
    except ConfigError:
        return
    if not returns_experts:
        supporting = _supporting_name(ROLLOUTS, lambda capabilities: capabilities.supports_routed_experts)
        message = (
            f"{ROLLOUT}.name={rollout.name} does not return expert choices. Set {key}={off}, or "
            f"{ROLLOUT}.name={supporting}."
        )
        yield Problem(key, value, message, (f"{ROLLOUT}.name",))
    if not supports_replay:
        supporting = _supporting_name(ENGINES, lambda capabilities: capabilities.supports_router_replay)
        message = (
            f"strategy={actor.strategy} cannot read the expert choices of the rollout. Set {key}={off}, or "
            f"{ACTOR}.strategy={supporting}."
        )
        yield Problem(key, value, message, (f"{ACTOR}.strategy",))
    if mode == "compare" and config.old_log_prob_source() == "rollout":
        bypass = "algorithm.rollout_correction.bypass_mode"
        message = (
            f"has no effect with {bypass}=true, because the actor does not compute old log-probs. Set {key}=false."
        )
        yield Problem(key, value, message, (bypass,))
