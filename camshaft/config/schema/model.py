"""Sections that the trained roles share: model, optimizer and checkpoints."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from camshaft import hub
from camshaft.config.engine import optimizer_problem
from camshaft.config.errors import Problem
from camshaft.config.schema.fields import (
    Betas,
    Contents,
    Fraction,
    Modules,
    Names,
    OffOrPositive,
    Path,
    Section,
    Text,
    Unread,
    key,
    unless,
)

_NEVER_PADDED = Unread(lambda model: True, "because batches are never padded", harmless=(True,))
_WITHOUT_LORA = Unread(
    lambda model: model.lora_rank == 0, "{lora_rank}", "set [lora_rank] to the rank of the adapters, or omit the key"
)


class ModelSource(Section):
    """Path of a model, and permission to download it."""

    path: Path = key(
        None,
        "Hugging Face model folder (config.json, weights and tokenizer), the URL of one, or the name of a model on the "
        "Hugging Face Hub (owner/name). Required if the default is null.",
        short=("model", "model folder, or name of a model on the Hugging Face Hub"),
    )
    download: bool = key(
        True,
        "If path is the name of a model on the Hugging Face Hub, download the files that the local cache lacks. The "
        "same applies to data sets of the hub. The variable HF_HUB_OFFLINE forbids it as well.",
        short=("download", "false: use only models and data sets in the local cache"),
    )

    def source(self, path: str | None = None) -> str:
        """Return the path of the model, or `path`; as a URL if it is a model name that may be downloaded."""
        return hub.source(path or self.path, self.download)


class LoadedModel(ModelSource):
    """Model that the run does not train."""

    external_lib: Modules | None = key(
        None,
        "Python modules to import before the model is loaded, for example to register a model class.",
        alias="external_libs",
    )
    override_config: dict[str, Any] = key({}, "Overrides of entries in the model's config.json.")
    trust_remote_code: bool = key(False, "Allow transformers to execute custom Python code from the model folder.")


class AnyModelConfig(ModelSource):
    """Hugging Face model, gradient checkpointing and LoRA."""

    external_lib: Modules | None = key(
        None,
        "Python modules to import before the model is loaded, for example to register a model class.",
        alias="external_libs",
    )
    override_config: dict[str, Any] = key(
        {}, "Overrides of entries in the model's config.json, for example dropout probabilities."
    )
    enable_gradient_checkpointing: bool = key(
        False, "Recompute activations in the backward pass instead of storing them, to save memory."
    )
    gradient_checkpointing_mode: Literal["full", "selective"] = key(
        "full",
        "full recomputes entire layers; selective stores the outputs of matrix multiplications and attention and "
        "recomputes the rest.",
        unread=unless("enable_gradient_checkpointing"),
    )
    enable_activation_offload: bool = key(
        False, "Offload the activations that are saved for the backward pass to CPU memory."
    )
    router_aux_loss_coef: NonNegativeFloat = key(
        0.0,
        "Coefficient of the load-balancing loss that a mixture of experts adds to the loss. 0 disables it; 1e-3 is a "
        "common value. The value in the model's config.json is not used. See moe.md.",
    )
    use_remove_padding: bool = key(
        True,
        "Has no effect and is accepted for compatibility only. Batches are never padded.",
        unread=_NEVER_PADDED,
    )
    trust_remote_code: bool = key(False, "Allow transformers to execute custom Python code from the model folder.")
    lora_rank: NonNegativeInt = key(
        0,
        "Rank of the LoRA adapters. A positive rank freezes the base model; 0 trains all weights without adapters.",
        short=("lora", "rank of LoRA adapters"),
    )
    lora_alpha: PositiveFloat = key(
        16,
        "LoRA scaling factor. The output of each adapter is multiplied by lora_alpha / lora_rank.",
        unread=_WITHOUT_LORA,
    )
    target_modules: Names = key(
        "all-linear",
        "Name suffixes of the linear layers to add LoRA adapters to, for example [q_proj, v_proj]. all-linear "
        "selects every linear layer except the output head.",
        unread=_WITHOUT_LORA,
    )
    exclude_modules: Names = key(
        None, "Name suffixes of linear layers to exclude from LoRA. null excludes none.", unread=_WITHOUT_LORA
    )
    lora_adapter_path: Path | None = key(
        None,
        "Folder of a PEFT adapter to start from. null initializes the adapters so that they do not change the "
        "model's outputs.",
    )


class ResponsesModelConfig(AnyModelConfig):
    """Model of a role that processes several responses per prompt."""

    use_prefix_grouper: bool = key(
        True,
        "Compute a prompt that several responses in a micro-batch share only once (prefix sharing). Applies only to "
        "models with full attention, on a CPU or in half precision on a GPU.",
    )


class ModelConfig(AnyModelConfig):
    """Language model that can be initialized randomly."""

    random_init: bool = key(
        False,
        "Initialize the weights randomly from trainer.seed instead of loading them, for tests without pretrained "
        "weights.",
    )


class PolicyModelConfig(ModelConfig, ResponsesModelConfig):
    """Language model of actor, rollout and reference."""


OPTIMIZERS_WITHOUT_BETAS = ("SGD", "Adagrad", "Adadelta", "ASGD", "RMSprop", "Rprop", "Adafactor", "Muon")
"""Optimizers of torch.optim without the argument `betas`. The config must not import torch."""
_WITHOUT_BETAS = Unread(lambda optim: optim.optimizer in OPTIMIZERS_WITHOUT_BETAS, "{optimizer}")
_RPROP = Unread(lambda optim: optim.optimizer == "Rprop", "{optimizer}")
_COSINE = "set [lr_scheduler_type]=cosine, or omit the key"
_CONSTANT = Unread(lambda optim: optim.lr_scheduler_type == "constant", "{lr_scheduler_type}", _COSINE)
_WITHOUT_CYCLES = Unread(lambda optim: optim.lr_scheduler_type != "cosine", "{lr_scheduler_type}", _COSINE)
_WARMUP_BY_STEPS = Unread(lambda optim: optim.lr_warmup_steps >= 0, "{lr_warmup_steps}")
_ANY_LENGTH = Unread(
    lambda optim: _CONSTANT.test(optim) and (_WARMUP_BY_STEPS.test(optim) or optim.lr_warmup_steps_ratio == 0),
    "{lr_scheduler_type}, because the learning rate does not depend on the length of the schedule",
    _COSINE,
    harmless=(-1,),
)


def _overridden(name: str) -> Unread:
    return Unread(lambda optim: name in optim.override_optimizer_config, "{override_optimizer_config}")


class OptimSection(Section):
    """Optimizer and learning-rate schedule.

    The schedule advances once per iteration in RL runs, and once per optimizer step in supervised runs.
    """

    optimizer: Text = key("AdamW", "Optimizer: a class name in torch.optim, or an import path package.module:Class.")
    override_optimizer_config: dict[str, Any] = key(
        {}, "Additional keyword arguments of the optimizer. They take precedence over the other keys of this section."
    )
    lr: PositiveFloat = key(
        1e-5,
        "Peak learning rate, reached at the end of the warm-up.",
        unread=_overridden("lr"),
        short=("lr", "learning rate"),
    )
    betas: Betas = key(
        [0.9, 0.999],
        "Decay rates of the first and second moment estimates of Adam.",
        unread=(_WITHOUT_BETAS, _overridden("betas")),
    )
    weight_decay: NonNegativeFloat = key(
        0.01,
        "Weight decay coefficient. AdamW decouples the decay from the gradient update.",
        unread=(_RPROP, _overridden("weight_decay")),
    )
    lr_warmup_steps: int = key(-1, "Number of linear warm-up steps. -1 uses lr_warmup_steps_ratio.", ge=-1)
    lr_warmup_steps_ratio: Fraction = key(
        0.0, "Length of the warm-up as a fraction of the schedule length.", unread=_WARMUP_BY_STEPS
    )
    min_lr_ratio: Fraction | None = key(
        None,
        "Minimum learning rate of the cosine and linear schedules, as a fraction of lr. null decays to 0.",
        unread=_CONSTANT,
    )
    num_cycles: PositiveFloat = key(
        0.5,
        "Number of periods of the cosine schedule. 0.5 decays once from lr to the minimum.",
        unread=_WITHOUT_CYCLES,
    )
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = key(
        "constant",
        "Learning-rate schedule after the warm-up.",
        alias="warmup_style",
    )
    total_training_steps: OffOrPositive = key(
        -1,
        "Length of the learning-rate schedule in steps. -1 uses the length of the run.",
        unread=_ANY_LENGTH,
    )

    def problems(self) -> Iterator[Problem]:
        if problem := optimizer_problem(self.optimizer):
            yield Problem("optimizer", self.optimizer, f"{problem}.")

    def warmup_steps(self, total_steps: int) -> int:
        """Return the number of warm-up steps of a schedule with `total_steps` steps."""
        if self.lr_warmup_steps >= 0:
            return self.lr_warmup_steps
        return int(self.lr_warmup_steps_ratio * total_steps)


class CheckpointConfig(Section):
    save_contents: Contents = key(
        ["model", "optimizer", "extra"],
        "Contents of a checkpoint. model, optimizer and extra (random states and learning-rate schedule) are "
        "required because resuming needs them; hf_model adds a Hugging Face model folder.",
    )
    async_save: bool = key(
        False, "Write checkpoints in the background from a copy in CPU memory, while training continues."
    )

    def saves_hf_model(self) -> bool:
        """Return True if every checkpoint includes a Hugging Face model folder."""
        return "hf_model" in self.save_contents
