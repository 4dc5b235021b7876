"""What one engine needs to know, free of roles: no `ppo_*`, no rollout, no batch columns.

Roles derive it from their section of the config (see `config/derive.py`); a program that uses an
engine alone writes it by hand:

    EngineConfig(model=EngineModel(path="models/tiny"), optim=OptimConfig(lr=1e-3))
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Frozen(BaseModel):
    """Immutable, and closed to keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class LoRAConfig(Frozen):
    """Low-rank adapters on linear layers; the base weights are frozen."""

    rank: int = Field(ge=1)
    alpha: float = Field(default=16, gt=0)
    """The adapter's output is scaled by alpha / rank."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Endings of layer names, or "all-linear": every linear layer but the output head."""
    exclude_modules: tuple[str, ...] = ()
    """Endings of layer names that are left alone."""
    adapter_path: str | None = None
    """Folder of an adapter in PEFT's layout to start from; None: a fresh one, which changes nothing at first."""


class EngineModel(Frozen):
    """Which model, with which head."""

    path: str
    """Folder with config.json and, unless `random_init`, weights."""
    head: Literal["causal_lm", "value", "reward"] = "causal_lm"
    """causal_lm gives log_probs and entropy; value one number per token; reward one per sequence."""
    random_init: bool = False
    """Draw weights from the engine's seed instead of reading them."""
    new_head: bool = False
    """Draw a reward head from the seed where the folder has none, to train it; a value head is drawn anyway."""
    override_config: dict[str, Any] = Field(default_factory=dict)
    """Changes to the model's own config, dropout for instance."""
    external_lib: str | None = None
    """Comma-separated modules to import before the model is built."""
    trust_remote_code: bool = False
    enable_gradient_checkpointing: bool = False
    gradient_checkpointing_mode: Literal["full", "selective"] = "full"
    """full recomputes whole layers; selective keeps the results of matrix products and attention."""
    use_prefix_grouper: bool = True
    """Compute the prompt of several rows once in a micro-batch, where the device and the model allow it."""
    lora: LoRAConfig | None = None
    """None: all weights are trained."""


class OptimConfig(Frozen):
    """The optimizer, and its rate: linear warm-up, then constant, cosine or linear."""

    optimizer: str = "AdamW"
    """A name in torch.optim, or `package.module:Class`."""
    override_optimizer_config: dict[str, Any] = Field(default_factory=dict)
    """More arguments of the optimizer, by its own names; they win over those below."""
    lr: float = Field(default=1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    lr_warmup_steps: int = Field(default=0, ge=0)
    total_training_steps: int = -1
    """Steps of the schedule in the whole run; the cosine and linear shapes need it."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    num_cycles: float = Field(default=0.5, gt=0)


class EngineConfig(Frozen):
    """Model, optimizer, micro-batches and place of one engine."""

    model: EngineModel
    optim: OptimConfig | None = None
    """None: forward only, no optimizer is built."""
    grad_clip: float = Field(default=1.0, gt=0)
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Sequences per micro-batch on this rank; None: no such limit."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Hard limit of tokens per micro-batch on this rank; None: no such limit."""
    infer_micro_batch_size: int | None = Field(default=None, ge=1)
    """`micro_batch_size` for forward-only calls."""
    infer_max_tokens: int | None = Field(default=None, ge=1)
    """`max_tokens` for forward-only calls."""
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    seed: int = 0
    options: dict[str, Any] = Field(default_factory=dict)
    """The backend's own section (fsdp_config, ...), validated by the backend."""
