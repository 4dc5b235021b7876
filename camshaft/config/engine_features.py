"""Features of training engines, derived from their capabilities and options.

    find_support(FEATURES["tensor parallelism"], engine_capabilities("fsdp"))
    features_page()                                     # `camshaft engines docs` writes it to docs/engine-features.md
    explain("fsdp")                                     # `camshaft engines explain fsdp`

Each feature is a set of settings. An engine supports the feature if its capabilities accept these settings.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from camshaft.config.backends import ENGINES, engine_capabilities
from camshaft.config.engine import EngineCapabilities, EngineConfig, EngineModel, LoRAConfig, OptimConfig
from camshaft.config.families.support import Feature as FamilyFeature
from camshaft.config.families.support import unsupported
from camshaft.config.schema.fsdp import FSDPOptions
from camshaft.config.tree import format_value
from camshaft.errors import EngineError

Status = Literal["supported", "rejected", "not yet"]


@dataclass(frozen=True)
class Feature:
    """A feature, and the settings that enable it."""

    name: str
    group: str
    options: tuple[Mapping[str, Any], ...] = ({},)
    """Alternative `EngineConfig.options`. Engines have different names for the same option."""
    model: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of `EngineModel`."""
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further fields of `EngineConfig`."""
    ranks: int = 1
    """Minimum number of ranks."""
    family: str | None = None
    """Model type of transformers."""
    requires: FamilyFeature | None = None
    """What the model must support."""
    is_supported: Callable[[EngineCapabilities], bool] = lambda capabilities: True
    """Check of a feature that no setting of the engine enables."""

    def config(self, options: Mapping[str, Any], path: str = "models/tiny") -> EngineConfig:
        """Return the config of an engine with this feature, for the model in folder `path`."""
        model = EngineModel(path=path, **self.model)
        fields: dict[str, Any] = {"optim": OptimConfig(), **self.fields}
        return EngineConfig(model=model, options=dict(options), **fields)


@dataclass(frozen=True)
class Support:
    """Support of a feature by an engine."""

    status: Status
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options that enable the feature."""
    reason: str = ""
    """Error of a rejected setting."""

    def __str__(self) -> str:
        names = ", ".join(f"`{name}`" for name in self.options)
        return f"{self.status}: {names}" if self.status == "supported" and names else self.status


def _option(name: str, group: str, ranks: int = 1, **values: Any) -> Feature:
    """Return a feature that one of several options enables."""
    return Feature(name, group, tuple({option: value} for option, value in values.items()), ranks=ranks)


FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "mixtral", "qwen3_moe")
"""Model types in the table."""
MODELS, PRECISION, PARALLELISM = "Models", "Precision", "Parallelism"
MEMORY, SPEED, PLATFORMS = "Memory", "Speed and checkpoints", "Platforms"
CHECKPOINTING = {"enable_gradient_checkpointing": True}

ALL_FEATURES = (
    *(Feature(f"{family} models", MODELS, family=family) for family in FAMILIES),
    Feature("value head", MODELS, model={"head": "value"}),
    Feature("reward head", MODELS, model={"head": "reward"}),
    Feature("LoRA", MODELS, model={"lora": LoRAConfig(rank=8)}),
    Feature("LoRA on groups of layers", MODELS, model={"lora": LoRAConfig(rank=8, train_attn=False)}),
    Feature("router auxiliary loss", MODELS, model={"router_aux_loss_coef": 1e-3}),
    Feature("router replay", MODELS, is_supported=lambda capabilities: capabilities.supports_router_replay),
    Feature("train float32 weights", PRECISION),
    Feature("train float64 weights", PRECISION, fields={"dtype": "float64"}),
    Feature("train bfloat16 weights", PRECISION, fields={"dtype": "bfloat16"}),
    Feature(
        "LoRA on frozen bfloat16 weights", PRECISION, model={"lora": LoRAConfig(rank=8)}, fields={"dtype": "bfloat16"}
    ),
    Feature("bfloat16 weights, forward-only", PRECISION, fields={"dtype": "bfloat16", "optim": None}),
    _option("bfloat16 computation, float32 weights", PRECISION, mixed_precision={"param_dtype": "bfloat16"}),
    Feature("data parallelism", PARALLELISM, ranks=2),
    _option("sharded weights (FSDP)", PARALLELISM, 2, fsdp_size=2, data_parallel_shard_degree=2),
    _option("replicas of sharded weights (HSDP)", PARALLELISM, 2, fsdp_size=1, data_parallel_replicate_degree=2),
    _option(
        "sharded optimizer state", PARALLELISM, 2,
        fsdp_size=2, use_distributed_optimizer=True, data_parallel_shard_degree=2,
    ),
    _option("tensor parallelism", PARALLELISM, 2, tensor_parallel_size=2, tensor_model_parallel_size=2),
    Feature(
        "sequence parallelism between tensor-parallel layers", PARALLELISM,
        (
            {"enable_sequence_parallel": True, "tensor_parallel_size": 2},
            {"sequence_parallel": True, "tensor_model_parallel_size": 2},
        ),
        ranks=2,
    ),
    _option(
        "sequence parallelism (Ulysses)", PARALLELISM, 2, ulysses_sequence_parallel_size=2, context_parallel_size=2,
    ),
    _option("context parallelism (ring attention)", PARALLELISM, 2, context_parallel_degree=2),
    _option("pipeline parallelism", PARALLELISM, 2, pipeline_model_parallel_size=2, pipeline_parallel_degree=2),
    Feature(
        "interleaved pipeline stages", PARALLELISM,
        ({"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_size": 2},), ranks=2,
    ),
    _option(
        "expert parallelism", PARALLELISM, 2,
        expert_model_parallel_size=2, expert_parallel_degree=2, expert_parallel_size=2,
    ),
    _option("offload parameters between phases", MEMORY, param_offload=True),
    _option("offload gradients between phases", MEMORY, grad_offload=True),
    _option("offload optimizer state between phases", MEMORY, optimizer_offload=True),
    _option("keep all weights in host memory", MEMORY, offload_policy=True),
    _option("offload activations", MEMORY, activation_offload=True),
    Feature("activation checkpointing, full", MEMORY, model=CHECKPOINTING),
    Feature(
        "activation checkpointing, selective", MEMORY,
        model=CHECKPOINTING | {"gradient_checkpointing_mode": "selective"},
    ),
    Feature(
        "prefix sharing", SPEED, requires="prefix sharing",
        is_supported=lambda capabilities: capabilities.shares_prefixes,
    ),
    _option("torch.compile", SPEED, use_torch_compile=True),
    _option("write checkpoints in the background", SPEED, async_save=True),
    Feature("load checkpoints of another world size", SPEED),
    Feature(
        "log-probs of free targets", SPEED,
        is_supported=lambda capabilities: capabilities.supports_target_log_probs,
    ),
    Feature(
        "hyperparameters of a step", SPEED,
        is_supported=lambda capabilities: capabilities.supports_step_hyperparameters,
    ),
    Feature(
        "contract suite on CPUs (gloo)", PLATFORMS,
        is_supported=lambda capabilities: "cpu" in capabilities.tested_devices,
    ),
    Feature(
        "contract suite on CUDA devices (NCCL)", PLATFORMS,
        is_supported=lambda capabilities: "cuda" in capabilities.tested_devices,
    ),
)  # fmt: skip
FEATURES = {feature.name: feature for feature in ALL_FEATURES}
"""Features in the order of the page."""


def find_support(
    feature: Feature, capabilities: EngineCapabilities, values: Mapping[str, Any] | None = None
) -> Support:
    """Return the support of `feature` by an engine with these capabilities, for models with `values` in config.json."""
    if feature.family is not None and capabilities.families and feature.family not in capabilities.families:
        reason = f"supported model types are {', '.join(capabilities.families)}"
        return Support("rejected", reason=reason)
    if not feature.is_supported(capabilities):
        return Support("not yet")
    if feature.ranks > 1 and not capabilities.multiple_ranks:
        return Support("rejected", reason="the engine supports only one process")
    names = capabilities.options.model_fields
    options = next((options for options in feature.options if options.keys() <= names.keys()), None)
    if options is None:
        # A run can set the options of the FSDP engines for every engine.
        keys = FSDPOptions.model_fields.keys() - names.keys()
        missing = [name for options in feature.options for name in options if name in keys]
        return Support("rejected", reason=f"the engine has no option `{missing[0]}`") if missing else Support("not yet")
    try:
        parsed = capabilities.validate(feature.config(options))
        parsed.check_layout(feature.ranks)
        if values is not None:
            capabilities.check_family(parsed, values, feature.config(options).model)
    except EngineError as error:
        return Support("rejected", options, str(error).replace("\n", "; "))
    reasons = unsupported(feature.requires, values) if feature.requires is not None and values is not None else []
    return Support("rejected", options, " and ".join(reasons)) if reasons else Support("supported", options)


def explain(strategy: str, values: Mapping[str, Any] | None = None) -> str:
    """Describe the features and the other options of an engine, which can be a class of another package.

    With the `values` of a config.json, describe the features for models with these values.
    """
    capabilities = engine_capabilities(strategy)
    lines: list[str] = []
    for feature in FEATURES.values():
        if values is not None and feature.family is not None:
            continue
        support = find_support(feature, capabilities, values)
        lines.append(f"{feature.name}: {support}" + (f" ({support.reason})" if support.reason else ""))
    known = {name for feature in FEATURES.values() for options in feature.options for name in options}
    others = [_setting(name, info) for name, info in capabilities.options.model_fields.items() if name not in known]
    if others:
        lines.append(f"other options: {', '.join(others)}")
    return "\n".join(lines).replace("`", "")


def _setting(name: str, info: FieldInfo) -> str:
    """Return an option with its default."""
    if info.is_required():
        return f"{name} (required)"
    default = info.get_default(call_default_factory=True, validated_data={})
    return f"{name}={format_value(default.model_dump() if isinstance(default, BaseModel) else default)}"


INTRODUCTION = """# Features of the engines

This page shows which features each training engine supports. It is generated by `camshaft engines docs` from the
capabilities that the engine classes declare. `camshaft engines explain NAME` prints the same list for one engine, which
may be a class of another package. [Write an engine](engines.md) describes capabilities.

- **supported**: The engine accepts the settings of the feature. The options that enable it follow the colon.
- **rejected**: A config with these settings is an error. The reasons are listed [below](#rejected-settings).
- **not yet**: The engine does not implement the feature, or its tests have not run on the platform.

The rows list the tested model types. `reference`, `fsdp` and `fsdp1` accept every decoder of transformers that uses the
attention interface of transformers. Some combinations of supported features are rejected; the error
describes the problem and a fix.
"""


def features_page() -> str:
    """Return the page of the features of all built-in engines as Markdown."""
    columns: dict[str, list[str]] = {}
    for name, backend in ENGINES.items():
        columns.setdefault(backend.target, []).append(name)
    engines = {", ".join(f"`{name}`" for name in names): engine_capabilities(names[0]) for names in columns.values()}
    parts, rejected = [INTRODUCTION], ["| feature | engines | reason |", "|---|---|---|"]
    for group in dict.fromkeys(feature.group for feature in FEATURES.values()):
        lines = [f"| | {' | '.join(engines)} |", "|---" * (len(engines) + 1) + "|"]
        for feature in (feature for feature in FEATURES.values() if feature.group == group):
            cells = {name: find_support(feature, capabilities) for name, capabilities in engines.items()}
            lines.append(f"| {feature.name} | {' | '.join(str(cell) for cell in cells.values())} |")
            for reason in dict.fromkeys(cell.reason for cell in cells.values() if cell.reason):
                names = ", ".join(name for name, cell in cells.items() if cell.reason == reason)
                rejected.append(f"| {feature.name} | {names} | {reason} |")
        parts.append(f"## {group}\n\n" + "\n".join(lines) + "\n")
    parts.append("## Rejected settings\n\n" + "\n".join(rejected) + "\n")
    return "\n".join(parts)
