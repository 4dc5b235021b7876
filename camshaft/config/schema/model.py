"""Sections that the trained roles share: model, optimizer and checkpoints."""

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from camshaft import hub
from camshaft.config.schema.fields import Betas, Contents, Fraction, Modules, Names, OffOrPositive, Path, Section, Text


class ModelSource(Section):
    """Path of a model, and permission to download it."""

    path: Path = Field(
        description="Hugging Face model folder (config.json, weights and tokenizer), the URL of one, or the name of a "
        "model in the local Hugging Face cache (owner/name)."
    )
    download: bool = Field(description="If path is a model name, download the files that the Hugging Face cache lacks.")

    def source(self, path: str | None = None) -> str:
        """Return the path of the model, or `path`; as a URL if it is a model name that may be downloaded."""
        return hub.source(path or self.path, self.download)


class LoadedModel(ModelSource):
    """Model that the run does not train."""

    external_lib: Modules | None = Field(
        description="Python modules to import before the model is loaded, for example to register a model class."
    )
    override_config: dict[str, Any] = Field(description="Overrides of entries in the model's config.json.")
    trust_remote_code: bool = Field(
        description="Allow transformers to execute custom Python code from the model folder."
    )


class AnyModelConfig(ModelSource):
    """Hugging Face model, gradient checkpointing and LoRA."""

    external_lib: Modules | None = Field(
        description="Python modules to import before the model is loaded, for example to register a model class."
    )
    override_config: dict[str, Any] = Field(
        description="Overrides of entries in the model's config.json, for example dropout probabilities."
    )
    enable_gradient_checkpointing: bool = Field(
        description="Recompute activations in the backward pass instead of storing them, to save memory."
    )
    gradient_checkpointing_mode: Literal["full", "selective"] = Field(
        description="full recomputes entire layers; selective stores the outputs of matrix multiplications and "
        "attention and recomputes the rest."
    )
    enable_activation_offload: bool = Field(
        description="Offload the activations that are saved for the backward pass to CPU memory."
    )
    router_aux_loss_coef: NonNegativeFloat = Field(
        description="Coefficient of the load-balancing loss that a mixture of experts adds to the loss. 0 disables it. "
        "The value in the model's config.json is not used. See moe.md.",
    )
    use_remove_padding: bool = Field(
        description="Has no effect and is accepted for compatibility only. Batches are never padded."
    )
    trust_remote_code: bool = Field(
        description="Allow transformers to execute custom Python code from the model folder."
    )
    lora_rank: NonNegativeInt = Field(
        description="Rank of the LoRA adapters. A positive rank freezes the base model; 0 trains all weights without "
        "adapters.",
    )
    lora_alpha: PositiveFloat = Field(
        description="LoRA scaling factor. The output of each adapter is multiplied by lora_alpha / lora_rank."
    )
    target_modules: Names = Field(
        description="Name suffixes of the linear layers to add LoRA adapters to. all-linear selects every linear "
        "layer except the output head."
    )
    exclude_modules: Names = Field(
        description="Name suffixes of linear layers to exclude from LoRA. null excludes none."
    )
    lora_adapter_path: Path | None = Field(
        description="Folder of a PEFT adapter to start from. null initializes the adapters so that they do not change "
        "the model's outputs."
    )


class ResponsesModelConfig(AnyModelConfig):
    """Model of a role that processes several responses per prompt."""

    use_prefix_grouper: bool = Field(
        description="Compute a prompt that several responses in a micro-batch share only once (prefix sharing). "
        "Applies only to models with full attention, on a CPU or in half precision on a GPU."
    )


class ModelConfig(AnyModelConfig):
    """Language model that can be initialized randomly."""

    random_init: bool = Field(description="Initialize the weights randomly from trainer.seed instead of loading them.")


class PolicyModelConfig(ModelConfig, ResponsesModelConfig):
    """Language model of actor, rollout and reference."""


class OptimSection(Section):
    """Optimizer and learning-rate schedule.

    The schedule advances once per iteration in RL runs, and once per optimizer step in supervised runs.
    """

    optimizer: Text = Field(
        description="Optimizer: a class name in torch.optim, or an import path package.module:Class."
    )
    override_optimizer_config: dict[str, Any] = Field(
        description="Additional keyword arguments of the optimizer. They take precedence over the other keys of this "
        "section."
    )
    lr: PositiveFloat = Field(description="Peak learning rate, reached at the end of the warm-up.")
    betas: Betas = Field(description="Decay rates of the first and second moment estimates of Adam.")
    weight_decay: NonNegativeFloat = Field(
        description="Weight decay coefficient. AdamW decouples the decay from the gradient update."
    )
    lr_warmup_steps: int = Field(ge=-1, description="Number of linear warm-up steps. -1 uses lr_warmup_steps_ratio.")
    lr_warmup_steps_ratio: Fraction = Field(description="Length of the warm-up as a fraction of the schedule length.")
    min_lr_ratio: Fraction | None = Field(
        description="Minimum learning rate of the cosine and linear schedules, as a fraction of lr. null decays to 0.",
    )
    num_cycles: PositiveFloat = Field(
        description="Number of periods of the cosine schedule. 0.5 decays once from lr to the minimum."
    )
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = Field(
        description="Learning-rate schedule after the warm-up."
    )
    total_training_steps: OffOrPositive = Field(
        description="Length of the learning-rate schedule in steps. -1 uses the length of the run."
    )

    def warmup_steps(self, total_steps: int) -> int:
        """Return the number of warm-up steps of a schedule with `total_steps` steps."""
        if self.lr_warmup_steps >= 0:
            return self.lr_warmup_steps
        return int(self.lr_warmup_steps_ratio * total_steps)


class CheckpointConfig(Section):
    save_contents: Contents = Field(
        description="Contents of a checkpoint. model, optimizer and extra (random states and learning-rate schedule) "
        "are required because resuming needs them; hf_model adds a Hugging Face model folder."
    )
    async_save: bool = Field(
        description="Write checkpoints in the background from a copy in CPU memory, while training continues."
    )

    def saves_hf_model(self) -> bool:
        """Return True if every checkpoint includes a Hugging Face model folder."""
        return "hf_model" in self.save_contents
