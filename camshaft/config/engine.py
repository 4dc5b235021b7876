"""Config, options and capabilities of a training engine.

In a run, `config/derive.py` builds an `EngineConfig` for each role. A program that uses an engine without a run
constructs the config directly:

    EngineConfig(model=EngineModel(path="models/tiny"), optim=OptimConfig(lr=1e-3))

An engine class declares its features in `EngineCapabilities`, and its options in a subclass of `EngineOptions`.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from camshaft.config.guards import is_mapping
from camshaft.errors import EngineError

Head = Literal["causal_lm", "value", "reward"]
DType = Literal["float32", "bfloat16", "float64"]


class Frozen(BaseModel):
    """Base class of configs. Instances are immutable, and unknown keys are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class LoRAConfig(Frozen):
    """LoRA: trainable low-rank adapters on linear layers, with frozen base weights."""

    rank: int = Field(ge=1)
    alpha: float = Field(default=16, gt=0)
    """Scaling factor. The output of each adapter is multiplied by alpha / rank."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Name suffixes of the layers to add adapters to. "all-linear" selects all linear layers except the output head."""
    train_attn: bool = True
    """Adapt the selected layers of attention."""
    train_mlp: bool = True
    """Adapt the selected layers of MLPs and of experts."""
    train_unembed: bool = False
    """Also adapt the output head of a causal language model. It needs a weight of its own (`BaseEngine.notices`)."""
    seed: int | None = None
    """Seed of the initial adapter. None uses the seed of the engine."""
    exclude_modules: tuple[str, ...] = ()
    """Name suffixes of layers to exclude."""
    adapter_path: str | None = None
    """Folder of a PEFT adapter to start from. None initializes the adapters so that they do not change the outputs."""

    def group_fields(self) -> dict[str, Any]:
        """Return the fields that only engines with `supports_lora_groups` read, if they differ from the defaults."""
        values = {name: getattr(self, name) for name in ("train_attn", "train_mlp", "train_unembed", "seed")}
        return {name: value for name, value in values.items() if value != type(self).model_fields[name].default}


class EngineModel(Frozen):
    """Model folder, output head, gradient checkpointing and LoRA."""

    path: str
    """Hugging Face model folder with config.json, and with weights unless `random_init` is set."""
    head: Head = "causal_lm"
    """Output head. causal_lm computes log-probs and entropy; value computes one value per token; reward computes one
    score per sequence."""
    random_init: bool = False
    """Initialize weights randomly from the engine's seed instead of loading them."""
    new_head: bool = False
    """Initialize a missing reward head from the engine's seed. If False, a missing reward head is an error. A missing
    value head is always initialized."""
    override_config: dict[str, Any] = Field(default_factory=dict)
    """Overrides of entries in config.json, for example dropout probabilities."""
    external_lib: str | None = None
    """Comma-separated modules to import before the model is built."""
    trust_remote_code: bool = False
    enable_gradient_checkpointing: bool = False
    gradient_checkpointing_mode: Literal["full", "selective"] = "full"
    """full recomputes entire layers; selective stores the outputs of matrix multiplications and attention."""
    use_prefix_grouper: bool = True
    """Compute a prompt that several rows of a micro-batch share only once, if the device and the model support it."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the load-balancing loss of a mixture of experts, which is added to the loss of a training step.
    The value in config.json is not used."""
    lora: LoRAConfig | None = None
    """LoRA adapters. None trains all weights."""


OPTIMIZERS = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "SGD"),
)
"""Optimizers of torch.optim that engines support. The config must not import torch."""
UNSUPPORTED_OPTIMIZERS = {
    "LBFGS": "it evaluates the loss several times per step",
    "SparseAdam": "it requires sparse gradients",
}
"""Optimizers of torch.optim that engines do not support, with the reason."""


def optimizer_problem(name: str) -> str | None:
    """Return why engines have no optimizer of this name. An import path is checked when the optimizer is built."""
    if name in OPTIMIZERS or "." in name or ":" in name:
        return None
    if name in UNSUPPORTED_OPTIMIZERS:
        return f"optimizer={name} is not supported: {UNSUPPORTED_OPTIMIZERS[name]}. Set optimizer=AdamW"
    lowercase = {each.lower(): each for each in OPTIMIZERS}
    matches = difflib.get_close_matches(name.lower(), lowercase, n=1)
    hint = f" Did you mean '{lowercase[matches[0]]}'?" if matches else ""
    return (
        f"torch.optim has no optimizer '{name}'.{hint} Set optimizer to one of {', '.join(OPTIMIZERS)}, or to an "
        "import path package.module:Class"
    )


class OptimConfig(Frozen):
    """Optimizer and learning-rate schedule: a linear warm-up, then a constant rate, or a cosine or linear decay."""

    optimizer: str = "AdamW"
    """Optimizer: a class name in torch.optim, or an import path `package.module:Class`."""
    override_optimizer_config: dict[str, Any] = Field(default_factory=dict)
    """Additional keyword arguments of the optimizer. They take precedence over the fields below."""
    lr: float = Field(default=1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    lr_warmup_steps: int = Field(default=0, ge=0)
    total_training_steps: int = -1
    """Length of the schedule in steps. Required by the cosine and linear schedules."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    num_cycles: float = Field(default=0.5, gt=0)


class EngineConfig(Frozen):
    """Model, optimizer, micro-batch sizes and device of an engine."""

    model: EngineModel
    optim: OptimConfig | None = None
    """Optimizer. None builds an engine that supports forward passes only."""
    grad_clip: float = Field(default=1.0, gt=0)
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Maximum number of sequences per micro-batch on each rank. None sets no limit."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens per micro-batch on each rank. None sets no limit."""
    infer_micro_batch_size: int | None = Field(default=None, ge=1)
    """Like `micro_batch_size`, for forward passes without a backward pass."""
    infer_max_tokens: int | None = Field(default=None, ge=1)
    """Like `max_tokens`, for forward passes without a backward pass."""
    device: str = "cpu"
    dtype: DType = "float32"
    seed: int = 0
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the engine class, for example `fsdp_size`. `EngineCapabilities.options` validates them."""


@dataclass(frozen=True)
class Conflict:
    """A setting that a backend rejects because of another setting."""

    option: str
    """Dotted name of the option, `model.` and a field of `EngineModel`, or "" if the backend itself is unsuitable."""
    message: str
    """Problem and value, without a period at the end."""
    fixes: tuple[str, ...] = ()
    """Alternative settings that resolve the conflict, as `option=value`."""

    def __str__(self) -> str:
        return f"{self.message}. Set {', or '.join(self.fixes)}" if self.fixes else self.message


class EngineOptions(Frozen):
    """Options of a training engine. An engine with options declares them as fields of a subclass.

        class PipelineOptions(EngineOptions):
            pipeline_stages: int = Field(default=1, ge=1)

            def ranks_per_row(self) -> int:
                return self.pipeline_stages

    Every field must have a default. In a run, the values are read from `engine_kwargs` of the role, except for fields
    that have the name of a key of every role: the keys of `fsdp_config`, `ulysses_sequence_parallel_size`,
    `use_torch_compile`, `activation_offload` and `async_save`. These fields are read from that key. The config check
    rejects a run that sets such a key if the engine has no field of that name.
    """

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Validate `options` and return an instance; an `EngineError` lists all invalid options."""
        errors = invalid_options(cls, options)
        if errors:
            lines = [f"options.{error.option}={_value(options, error.option)!r}: {error.message}" for error in errors]
            raise EngineError("\n".join(lines))
        return cls.model_validate(options)

    def ranks_per_row(self) -> int:
        """Return the model-parallel size: the number of ranks that process the same rows.

        It is the product of the pipeline-, context-, sequence- and tensor-parallel sizes. The world size divided by it
        is the data-parallel size.
        """
        return 1

    def layout_conflicts(self, world_size: int) -> Iterator[Conflict]:
        """Yield options that are incompatible with `world_size` ranks."""
        ranks = self.ranks_per_row()
        if world_size % ranks:
            division = format_division(world_size, ranks)
            message = f"world_size={world_size} is not divisible by the model-parallel size {ranks}: {division}"
            yield Conflict("", message)

    def check_layout(self, world_size: int) -> None:
        """Raise an `EngineError` that lists all options that are incompatible with `world_size` ranks."""
        conflicts = [str(conflict) for conflict in self.layout_conflicts(world_size)]
        if conflicts:
            raise EngineError("\n".join(conflicts))

    def conflicts(self, model: EngineModel) -> Iterator[Conflict]:
        """Yield options that are incompatible with each other or with the model. Called before the engine is built."""
        return iter(())

    def family_conflicts(self, values: Mapping[str, Any], model: EngineModel) -> Iterator[Conflict]:
        """Yield why the engine, with these options, does not support models whose config.json has these values.

        A run calls it before it loads data or starts processes, if the folder of the model is on this machine.
        """
        return iter(())


@dataclass(frozen=True)
class EngineCapabilities:
    """Features of a training engine, declared in the class attribute `capabilities` of `BaseEngine`.

        class MyEngine(BaseEngine):
            capabilities = EngineCapabilities(options=PipelineOptions, supports_lora=False)

    The config checks read it on the driver before any process is started. The constructor of the engine repeats the
    checks.
    """

    options: type[EngineOptions] = EngineOptions
    """Schema of `EngineConfig.options`. The default accepts no options."""
    library: str | None = None
    """Optional library that the engine requires. A run without it is rejected before it loads anything."""
    multiple_ranks: bool = True
    """True if the engine supports more than one rank."""
    supports_lora: bool = True
    """True if the engine can train LoRA adapters (`EngineModel.lora`)."""
    supports_lora_groups: bool = False
    """True if the engine reads `seed`, `train_attn`, `train_mlp` and `train_unembed` of `LoRAConfig`."""
    supports_router_aux_loss: bool = False
    """True if the engine adds the auxiliary loss of a mixture of experts (`EngineModel.router_aux_loss_coef`), and
    returns the metrics of its routers."""
    supports_router_replay: bool = False
    """True if the engine can compare and replay the experts of another forward pass (`StepContext.routing`)."""
    supports_step_hyperparameters: bool = False
    """True if `optimizer_step` of the engine accepts the hyperparameters of a step (`StepHyperparameters`)."""
    supports_target_log_probs: bool = False
    """True if the engine computes log-probs of the column `targets` (`StepContext.outputs`)."""
    heads: tuple[Head, ...] = ("causal_lm", "value", "reward")
    """Supported output heads (`EngineModel.head`)."""
    families: tuple[str, ...] = ()
    """Supported model types of transformers. Empty: those that `EngineOptions.family_conflicts` does not reject."""
    dtypes: tuple[DType, ...] = ("float32", "bfloat16", "float64")
    """Supported dtypes of the weights (`EngineConfig.dtype`)."""
    training_dtypes: tuple[DType, ...] = ("float32", "float64")
    """Those of `dtypes` in which the engine can train. bfloat16 weights lose small updates to rounding."""
    frozen_dtypes: tuple[DType, ...] = ("float32", "float64")
    """Those of `dtypes` in which the engine can store the frozen weights under an adapter. The adapter and a head that
    is trained with it are float32 or wider."""
    shards_weights: bool = False
    """True if the engine shards the weights over the data-parallel ranks by default."""
    shares_prefixes: bool = True
    """True if the engine computes a prompt that several rows share only once (`EngineModel.use_prefix_grouper`)."""
    tested_devices: tuple[str, ...] = ("cpu",)
    """Device types on which the contract suite of the engine has run."""
    supports_forecast: bool = False
    """True if `camshaft plan` can run the engine as one rank of a fake process group."""
    load_formats: tuple[str, ...] = ("auto", "hf", "dtensor")
    """Values of `rollout.load_format`, without `dummy_`, that are supported with an actor on this engine."""

    def family_conflicts(
        self, options: EngineOptions, values: Mapping[str, Any], model: EngineModel
    ) -> Iterator[Conflict]:
        """Yield why the engine does not support models whose config.json has these values."""
        if self.families and values.get("model_type") not in self.families:
            message = f"this engine does not support {values.get('model_type')} models, only {', '.join(self.families)}"
            yield Conflict("", message, ("strategy=fsdp",))
        else:
            yield from options.family_conflicts(values, model)

    def check_family(self, options: EngineOptions, values: Mapping[str, Any], model: EngineModel) -> None:
        """Raise an `EngineError` with all reasons if the engine does not support models with these values."""
        conflicts = [str(conflict) for conflict in self.family_conflicts(options, values, model)]
        if conflicts:
            raise EngineError("\n".join(conflicts))

    def validate(self, config: EngineConfig) -> EngineOptions:
        """Return the validated options of `config`; an `EngineError` lists all unsupported settings."""
        options = self.options.from_dict(config.options)
        conflicts = [str(conflict) for conflict in options.conflicts(config.model)]
        if config.model.lora is not None and not self.supports_lora:
            conflicts.append(
                "LoRA is not supported by this engine. Set lora=None in EngineModel, or lora_rank=0 in a run"
            )
        elif config.model.lora is not None and not self.supports_lora_groups:
            for name, value in config.model.lora.group_fields().items():
                conflicts.append(f"this engine does not support lora.{name}={value}. Omit {name} in LoRAConfig")
        if config.model.router_aux_loss_coef and not self.supports_router_aux_loss:
            conflicts.append(
                f"router_aux_loss_coef={config.model.router_aux_loss_coef} is not supported by this engine. Set "
                "model.router_aux_loss_coef=0"
            )
        if config.model.head not in self.heads:
            conflicts.append(
                f"this engine does not support head={config.model.head}; set one of {', '.join(self.heads)}"
            )
        if config.dtype not in self.dtypes:
            conflicts.append(f"this engine does not support dtype={config.dtype}; set dtype={self.training_dtypes[0]}")
        elif config.optim is not None and config.model.lora is not None:
            if config.dtype not in self.frozen_dtypes:
                conflicts.append(
                    f"this engine does not support LoRA on frozen weights with dtype={config.dtype}; set "
                    f"dtype={self.frozen_dtypes[0]}"
                )
        elif config.optim is not None and config.dtype not in self.training_dtypes:
            conflicts.append(
                f"this engine does not support training with dtype={config.dtype}, because its weights lose small "
                f"updates to rounding; set dtype={self.training_dtypes[0]}, and mixed_precision.param_dtype=bfloat16 "
                "if the engine has this option. A forward-only engine may use this dtype"
            )
        if conflicts:
            raise EngineError("\n".join(conflicts))
        return options


def invalid_options(schema: type[BaseModel], options: Mapping[str, Any]) -> list[Conflict]:
    """Return one `Conflict` per invalid option. For an unknown option, the message lists the valid names."""
    try:
        schema.model_validate(options)
    except ValidationError as error:
        return [_conflict(schema, item["loc"], item["type"], item["msg"]) for item in error.errors()]
    return []


def _value(options: Mapping[str, Any], option: str) -> Any:
    value: Any = options
    for name in option.split("."):
        value = value[name] if is_mapping(value) and name in value else None
    return value


def _conflict(schema: type[BaseModel], location: tuple[Any, ...], kind: str, message: str) -> Conflict:
    name = ".".join(map(str, location))
    if kind != "extra_forbidden":
        return Conflict(name, message.removeprefix("Value error, "))
    for part in location[:-1]:
        section = schema.model_fields[part].annotation
        assert isinstance(section, type)
        assert issubclass(section, BaseModel)
        schema = section
    names = list(schema.model_fields)
    suggestions = difflib.get_close_matches(str(location[-1]), names, n=1)
    if not names:
        return Conflict(name, "unknown option; the backend accepts no options, so omit it")
    hint = f"did you mean '{suggestions[0]}'? The" if suggestions else "the"
    return Conflict(name, f"unknown option; {hint} options are {', '.join(names)}")


def format_division(dividend: int, divisor: int) -> str:
    """Format a division with remainder, for example '8 = 2 x 3 + 2'."""
    return f"{dividend} = {dividend // divisor} x {divisor} + {dividend % divisor}"


def largest_divisor(total: int, limit: int) -> int:
    """Return the largest divisor of `total` that is at most `limit` and at most 100,000."""
    return next(size for size in range(min(limit, 100_000), 0, -1) if total % size == 0)
