"""Config and capabilities of one training engine, independent of roles, rollouts and batch columns.

`config/derive.py` builds an `EngineConfig` from the section of a role. Programs without a run
construct it directly:

    EngineConfig(model=EngineModel(path="models/tiny"), optim=OptimConfig(lr=1e-3))

An engine declares what it supports in `EngineCapabilities` and its options in a subclass of `EngineOptions`.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from camshaft.errors import EngineError


class Frozen(BaseModel):
    """Base class of configs: immutable, rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class LoRAConfig(Frozen):
    """Low-rank adapters on linear layers; the base weights are frozen."""

    rank: int = Field(ge=1)
    alpha: float = Field(default=16, gt=0)
    """Scale of the adapter's output, as alpha / rank."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Suffixes of layer names, or "all-linear": every linear layer except the output head."""
    exclude_modules: tuple[str, ...] = ()
    """Suffixes of layer names without an adapter."""
    adapter_path: str | None = None
    """PEFT adapter folder to start from; None starts from a zero adapter."""


class EngineModel(Frozen):
    """Model folder, head, and options of the model."""

    path: str
    """Folder with config.json, and weights unless `random_init` is set."""
    head: Literal["causal_lm", "value", "reward"] = "causal_lm"
    """causal_lm computes log_probs and entropy, value one number per token, reward one per sequence."""
    random_init: bool = False
    """Initialize weights randomly from the engine's seed instead of loading them."""
    new_head: bool = False
    """Initialize a reward head from the seed if the folder has none; a missing value head is always initialized."""
    override_config: dict[str, Any] = Field(default_factory=dict)
    """Overrides of entries in config.json, for example dropout."""
    external_lib: str | None = None
    """Comma-separated modules to import before the model is built."""
    trust_remote_code: bool = False
    enable_gradient_checkpointing: bool = False
    gradient_checkpointing_mode: Literal["full", "selective"] = "full"
    """full recomputes whole layers; selective keeps the outputs of matmuls and attention."""
    use_prefix_grouper: bool = True
    """Prefix sharing: compute a shared prompt once per micro-batch, if device and model support it."""
    lora: LoRAConfig | None = None
    """None trains all weights."""


class OptimConfig(Frozen):
    """Optimizer and learning-rate schedule: linear warm-up, then constant, cosine or linear."""

    optimizer: str = "AdamW"
    """Class name in torch.optim, or `package.module:Class`."""
    override_optimizer_config: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the optimizer; they override the fields below."""
    lr: float = Field(default=1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    lr_warmup_steps: int = Field(default=0, ge=0)
    total_training_steps: int = -1
    """Schedule length in steps; required by the cosine and linear schedules."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    num_cycles: float = Field(default=0.5, gt=0)


class EngineConfig(Frozen):
    """Model, optimizer, micro-batch sizes and device of one engine."""

    model: EngineModel
    optim: OptimConfig | None = None
    """None: forward only, without an optimizer."""
    grad_clip: float = Field(default=1.0, gt=0)
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Sequences per micro-batch on this rank; None: no limit."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Hard limit of tokens per micro-batch on this rank; None: no limit."""
    infer_micro_batch_size: int | None = Field(default=None, ge=1)
    """`micro_batch_size` for forward-only calls."""
    infer_max_tokens: int | None = Field(default=None, ge=1)
    """`max_tokens` for forward-only calls."""
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    seed: int = 0
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the backend (`fsdp_config`, ...), validated by the backend's schema."""


@dataclass(frozen=True)
class Conflict:
    """A setting that a backend rejects in combination with another one."""

    option: str
    """Dotted name of the option, `model.` and a field of `EngineModel`, or "" for the backend as a whole."""
    message: str
    """Problem and value, without a full stop."""
    fixes: tuple[str, ...] = ()
    """Settings that remove the conflict, as `option=value`."""

    def __str__(self) -> str:
        return f"{self.message}. Set {', or '.join(self.fixes)}" if self.fixes else self.message


class EngineOptions(Frozen):
    """Options of a training engine. A backend with options declares them as the fields of a subclass.

        class PipelineOptions(EngineOptions):
            pipeline_stages: int = Field(default=1, ge=1)

            def ranks_per_row(self) -> int:
                return self.pipeline_stages

    Every field has a default. In a run the values come from `engine_kwargs` of the role. A field with the name of a key
    that every role has takes its value from that key instead: the keys of `fsdp_config`, and
    `ulysses_sequence_parallel_size`, `use_torch_compile`, `activation_offload` and `async_save`. A run that sets such a
    key for an engine without a field of that name is rejected.
    """

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Validate `options`; an `EngineError` lists every error with the value and the nearest or allowed names."""
        errors = invalid_options(cls, options)
        if errors:
            lines = [f"options.{error.option}={_value(options, error.option)!r}: {error.message}" for error in errors]
            raise EngineError("\n".join(lines))
        return cls.model_validate(options)

    def ranks_per_row(self) -> int:
        """Return the ranks that compute the same rows: the product of pipeline, context, sequence and tensor sizes.

        Groups of `ranks_per_row` ranks are data-parallel: each computes different rows.
        """
        return 1

    def layout_conflicts(self, world_size: int) -> Iterator[Conflict]:
        """Yield options that do not fit `world_size` ranks."""
        ranks = self.ranks_per_row()
        if world_size % ranks:
            quotient = sum_of(world_size, ranks)
            yield Conflict("", f"{count_of_ranks(world_size)} not split into groups of {ranks} per row: {quotient}")

    def check_layout(self, world_size: int) -> None:
        """Raise an `EngineError` that lists the conflicts of the options with `world_size` ranks."""
        conflicts = [str(conflict) for conflict in self.layout_conflicts(world_size)]
        if conflicts:
            raise EngineError("\n".join(conflicts))

    def conflicts(self, model: EngineModel) -> Iterator[Conflict]:
        """Yield options that exclude each other or a setting of the model. Called before the engine is built."""
        return iter(())


@dataclass(frozen=True)
class EngineCapabilities:
    """Capabilities of a training engine: the class attribute `capabilities` of `BaseEngine`.

        class MyEngine(BaseEngine):
            capabilities = EngineCapabilities(options=PipelineOptions, supports_lora=False)

    The config checks read it before a process is started, and the engine's constructor applies the same checks.
    """

    options: type[EngineOptions] = EngineOptions
    """Schema of `EngineConfig.options`; the default has no options."""
    multiple_ranks: bool = True
    """Supports more than one rank."""
    supports_lora: bool = True
    """Supports training of adapters (`EngineModel.lora`)."""

    def validate(self, config: EngineConfig) -> EngineOptions:
        """Return the validated options; an `EngineError` lists every setting that the engine does not support."""
        options = self.options.of(config.options)
        conflicts = [str(conflict) for conflict in options.conflicts(config.model)]
        if config.model.lora is not None and not self.supports_lora:
            conflicts.append("the engine does not support LoRA. Set model.lora=None")
        if conflicts:
            raise EngineError("\n".join(conflicts))
        return options


def invalid_options(schema: type[BaseModel], options: Mapping[str, Any]) -> list[Conflict]:
    """Return the errors of `options`; an unknown option is reported with the nearest name and all names."""
    try:
        schema.model_validate(options)
    except ValidationError as error:
        return [_conflict(schema, item["loc"], item["type"], item["msg"]) for item in error.errors()]
    return []


def _value(options: Mapping[str, Any], option: str) -> Any:
    value: Any = options
    for name in option.split("."):
        value = value[name] if isinstance(value, Mapping) and name in value else None
    return value


def _conflict(schema: type[BaseModel], location: tuple[Any, ...], kind: str, message: str) -> Conflict:
    name = ".".join(map(str, location))
    if kind != "extra_forbidden":
        return Conflict(name, message.removeprefix("Value error, "))
    for part in location[:-1]:
        inner = schema.model_fields[part].annotation
        assert isinstance(inner, type)
        assert issubclass(inner, BaseModel)
        schema = inner
    names = list(schema.model_fields)
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    if not names:
        return Conflict(name, "unknown option; the backend has no options")
    hint = f"did you mean '{close[0]}'? The" if close else "the"
    return Conflict(name, f"unknown option; {hint} options are {', '.join(names)}")


def count_of_ranks(world_size: int) -> str:
    """Format '1 rank does' or '8 ranks do'."""
    return "1 rank does" if world_size == 1 else f"{world_size} ranks do"


def sum_of(total: int, part: int) -> str:
    """Format a division with remainder: '8 = 2 x 3 + 2'."""
    return f"{total} = {total // part} x {part} + {total % part}"


def divisor(total: int, limit: int) -> int:
    """Return the largest divisor of `total` up to `limit`, which is reduced to 100,000."""
    return next(size for size in range(min(limit, 100_000), 0, -1) if total % size == 0)
