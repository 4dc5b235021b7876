"""Registry of training engines and rollouts, and of their capabilities. It imports neither backends nor torch.

    engine_capabilities("fsdp").options                     # FSDPOptions
    rollout_capabilities("my_pkg.my_rollout:MyRollout")     # imports the class and reads its `capabilities`

To add a built-in backend, write its class and add it to `ENGINES` or `ROLLOUTS`. A backend in another package is not
registered here. The config selects it by import path (`package.module:Class`), or by the name of an entry point in the
group `camshaft.engines` or `camshaft.rollouts`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

from camshaft.config.engine import EngineCapabilities, EngineOptions
from camshaft.config.rollout import OPTIONAL_KEYS, OPTIONAL_SAMPLING, RolloutCapabilities
from camshaft.config.schema.fsdp import FSDP1Options, FSDPOptions
from camshaft.config.schema.megatron import MegatronOptions
from camshaft.config.schema.rollouts import OneDeviceOptions, ServerOptions, SGLangOptions, VLLMOptions
from camshaft.config.schema.single import SingleDeviceOptions
from camshaft.config.schema.torchtitan import TorchtitanOptions
from camshaft.errors import ConfigError
from camshaft.plugins import import_attribute, install_command, list_entry_points, resolve_target

Capabilities = TypeVar("Capabilities")


@dataclass(frozen=True)
class Backend(Generic[Capabilities]):
    """A built-in backend."""

    target: str
    """Import path `module:Class`."""
    capabilities: Capabilities
    """The `capabilities` of the class."""
    description: str


SINGLE_DEVICE = EngineCapabilities(
    SingleDeviceOptions,
    multiple_ranks=False,
    supports_router_aux_loss=True,
    supports_router_replay=True,
    supports_lora_groups=True,
    supports_step_hyperparameters=True,
    supports_target_log_probs=True,
    supports_forecast=True,
    frozen_dtypes=("float32", "bfloat16", "float64"),
    tested_devices=("cpu", "cuda"),
)
FSDP = EngineCapabilities(
    FSDPOptions,
    shards_weights=True,
    supports_router_aux_loss=True,
    supports_router_replay=True,
    supports_lora_groups=True,
    supports_step_hyperparameters=True,
    supports_target_log_probs=True,
    supports_forecast=True,
    frozen_dtypes=("float32", "bfloat16", "float64"),
    tested_devices=("cpu", "cuda"),
)
FSDP1 = EngineCapabilities(
    FSDP1Options,
    shards_weights=True,
    supports_router_aux_loss=True,
    supports_router_replay=True,
    supports_step_hyperparameters=True,
    supports_target_log_probs=True,
)
MEGATRON = EngineCapabilities(
    MegatronOptions,
    library="megatron",
    supports_lora=False,
    supports_router_aux_loss=True,
    supports_router_replay=True,
    families=("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"),
    shares_prefixes=False,
    load_formats=("auto", "hf", "dtensor", "megatron"),
)
TORCHTITAN = EngineCapabilities(
    TorchtitanOptions,
    library="torchtitan",
    supports_lora=False,
    families=("llama", "qwen2", "qwen3"),
    dtypes=("float32", "bfloat16"),
    training_dtypes=("float32",),
    shards_weights=True,
)

ENGINES = {
    "reference": Backend(
        "camshaft.engine.single:SingleDeviceEngine", SINGLE_DEVICE, "one process, with models of transformers"
    ),
    "fsdp": Backend("camshaft.engine.fsdp:FSDPEngine", FSDP, "FSDP2 of PyTorch, with models of transformers"),
    "fsdp2": Backend("camshaft.engine.fsdp:FSDPEngine", FSDP, "the same as fsdp"),
    "fsdp1": Backend(
        "camshaft.engine.fsdp:FSDP1Engine", FSDP1, "the older FSDP of PyTorch, with models of transformers"
    ),
    "megatron": Backend("camshaft.engine.megatron:MegatronEngine", MEGATRON, "Megatron-Core, with its own models"),
    "torchtitan": Backend("camshaft.engine.torchtitan:TorchtitanEngine", TORCHTITAN, "torchtitan, with its own models"),
}

_LIBRARY_KEYS = frozenset(OPTIONAL_KEYS) - {"update_weights_bucket_megabytes"}

_ALL_SAMPLING = frozenset(OPTIONAL_SAMPLING)

HF = RolloutCapabilities(
    OneDeviceOptions,
    reads=frozenset(),
    sampling=_ALL_SAMPLING,
    continues_rows=True,
    scores_prompts=True,
    scores_sampling=True,
    scores_candidates=True,
)
PROCESS = RolloutCapabilities(
    reads=frozenset({"update_weights_bucket_megabytes"}),
    wraps="torch",
    continues_rows=True,
    scores_prompts=True,
    scores_sampling=True,
    scores_candidates=True,
)
_GPU_MEMORY = frozenset({"gpu_memory_utilization"})
SERVER = RolloutCapabilities(ServerOptions, library="vllm", accelerator_keys=_GPU_MEMORY, sampling=_ALL_SAMPLING)
SGLANG = RolloutCapabilities(
    SGLangOptions, library="sglang", accelerator_keys=_GPU_MEMORY | {"free_cache_engine"}, continues_rows=True
)
TORCH = RolloutCapabilities(
    OneDeviceOptions,
    reads=frozenset({"enforce_eager", "free_cache_engine", "gpu_memory_utilization"}),
    accelerator_keys=frozenset({"enforce_eager", "gpu_memory_utilization"}),
    sampling=_ALL_SAMPLING,
    continues_rows=True,
    keeps_rows=True,
    scores_prompts=True,
    scores_sampling=True,
    scores_candidates=True,
    generates_packed=True,
    supports_routed_experts=True,
)
VLLM = RolloutCapabilities(
    VLLMOptions,
    library="vllm",
    reads=_LIBRARY_KEYS,
    accelerator_keys=_GPU_MEMORY,
    sampling=_ALL_SAMPLING,
    scores_prompts=True,
    supports_adapter=True,
)

ROLLOUTS = {
    "hf": Backend("camshaft.rollout.hf:HFRollout", HF, "generate() of transformers, for comparison"),
    "process": Backend(
        "camshaft.rollout.process.rollout:ProcessRollout", PROCESS, "another rollout in a child process"
    ),
    "server": Backend(
        "camshaft.rollout.server:ServerRollout", SERVER, "vLLM's server over HTTP, which may run elsewhere"
    ),
    "sglang": Backend("camshaft.rollout.sglang:SGLangRollout", SGLANG, "SGLang in child processes of the ranks"),
    "torch": Backend(
        "camshaft.rollout.builtin.rollout:TorchRollout", TORCH, "continuous batching with the model of transformers"
    ),
    "vllm": Backend("camshaft.rollout.vllm:VLLMRollout", VLLM, "vLLM in the processes of the ranks"),
}

SINGLE_PROCESS_ENGINE, SHARDED_ENGINE = "reference", "fsdp"
"""Engines that `strategy=auto` selects for one process on a CPU, and for accelerators or several processes."""
ACCELERATOR_ROLLOUTS = ("vllm",)
"""Rollouts that `rollout.name=auto` prefers on accelerators, if their library is installed."""
BUILT_IN_ROLLOUT, TRANSFORMERS_ROLLOUT = "torch", "hf"
"""Rollouts that `rollout.name=auto` selects otherwise, the second one for models that cannot run on packed rows."""


def targets(backends: Mapping[str, Backend[Any]]) -> dict[str, str]:
    """Map names of backends to import paths, as `camshaft.plugins` expects."""
    return {name: backend.target for name, backend in backends.items()}


def list_backends(
    backends: Mapping[str, Backend[Any]], group: str, features: Mapping[str, Callable[[str], bool]] | None = None
) -> str:
    """Return a table of the built-in backends and the entry points of a group. Nothing is imported.

    `features` maps the titles of further columns to functions of the name of a built-in backend.
    """
    features = features or {}
    rows = [("name", "installed", *features, "class", "description")]
    for name, backend in backends.items():
        library = backend.capabilities.library
        is_installed = library is None or find_spec(library) is not None
        hint = "" if is_installed or library is None else f" ({install_command(library)})"
        values = ["yes" if has(name) else "no" for has in features.values()]
        rows.append((name, "yes" if is_installed else "no", *values, backend.target, backend.description + hint))
    unknown = ["-"] * len(features)
    rows += [(name, "yes", *unknown, *rest) for name, *rest in list_entry_points(group) if name not in backends]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    lines = ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]
    return "\n".join(lines)


def engine_capabilities(strategy: str) -> EngineCapabilities:
    """Return the capabilities of an engine; raise a `ConfigError` if the name is unknown or cannot be imported."""
    return _capabilities(strategy, ENGINES, "camshaft.engines", EngineCapabilities())


def rollout_capabilities(name: str) -> RolloutCapabilities:
    """Return the capabilities of a rollout; raise a `ConfigError` if the name is unknown or cannot be imported."""
    return _capabilities(name, ROLLOUTS, "camshaft.rollouts", RolloutCapabilities())


def _capabilities(
    name: str, backends: Mapping[str, Backend[Capabilities]], group: str, default: Capabilities
) -> Capabilities:
    if name in backends:
        return backends[name].capabilities
    target = resolve_target(name, targets(backends), group)
    capabilities = getattr(import_attribute(target), "capabilities", default)
    if not isinstance(capabilities, type(default)):
        raise ConfigError(
            f"{target}.capabilities must be a {type(default).__name__}, got {type(capabilities).__name__}"
        )
    return capabilities


def select_options(
    schema: type[EngineOptions], keys: Mapping[str, Any], engine_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `EngineConfig.options`: `engine_kwargs`, and those keys of the role that are fields of the schema."""
    return {name: value for name, value in keys.items() if name in schema.model_fields} | dict(engine_kwargs)


def ranks_per_row(strategy: str, keys: Mapping[str, Any], engine_kwargs: Mapping[str, Any]) -> int:
    """Return the model-parallel size of an engine: the number of ranks that process the same rows."""
    schema = engine_capabilities(strategy).options
    return schema.from_dict(select_options(schema, keys, engine_kwargs)).ranks_per_row()


def supports_mixed_precision(strategy: str) -> bool:
    """Return True if an engine can compute in a lower precision than its weights. False if the engine is unknown."""
    try:
        options = engine_capabilities(strategy).options
    except ConfigError:
        return False
    return "mixed_precision" in options.model_fields


def freezes_bfloat16(strategy: str) -> bool:
    """Return True if an engine can train an adapter on bfloat16 weights. False if the engine is unknown."""
    try:
        capabilities = engine_capabilities(strategy)
    except ConfigError:
        return False
    return capabilities.supports_lora and "bfloat16" in capabilities.frozen_dtypes


def used_capabilities(rollout: str, engine_kwargs: Mapping[str, Any]) -> RolloutCapabilities:
    """Return the capabilities of a rollout with its options. Raise a `ConfigError` if it is unknown."""
    capabilities = rollout_capabilities(rollout)
    inner = capabilities.inner_rollout(engine_kwargs)
    return capabilities.with_options(engine_kwargs) if inner is None else capabilities.around(used_capabilities(*inner))


def unread_keys(rollout: str, engine_kwargs: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys of the section `rollout` that the given rollout ignores."""
    return frozenset(OPTIONAL_KEYS) - used_capabilities(rollout, engine_kwargs).reads


def can_score(rollout: str, engine_kwargs: Mapping[str, Any], temperature: float = 1.0) -> bool:
    """Return True if the given rollout can compute the log-probs of given tokens at a temperature."""
    capabilities = used_capabilities(rollout, engine_kwargs)
    return capabilities.scores_prompts and (temperature == 1 or capabilities.scores_sampling)


def generates_packed(rollout: str, engine_kwargs: Mapping[str, Any]) -> bool:
    """Return True if the given rollout computes prompts as packed rows. False if it is unknown."""
    try:
        return used_capabilities(rollout, engine_kwargs).generates_packed
    except ConfigError:
        return False


def rollouts_that_read(key: str) -> tuple[str, ...]:
    """Return the built-in rollouts that read a key of `OPTIONAL_KEYS`."""
    return tuple(name for name in ROLLOUTS if key not in unread_keys(name, {}))
