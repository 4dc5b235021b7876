"""Sections shared by all models: model, optimizer, sharding and checkpoints."""

from typing import Any, Literal

from pydantic import Field

from camshaft.config.schema.fields import Betas, Contents, Modules, Names, OffOrPositive, Path, Section, Text


class AnyModelConfig(Section):
    """Hugging Face model, and how it is built."""

    path: Path = Field(description="Hugging Face model folder (config.json, weights, tokenizer) or its URL.")
    external_lib: Modules | None = Field(description="Python modules to import first, for example to register models.")
    override_config: dict[str, Any] = Field(description="Overrides of entries in config.json, for example dropout.")
    enable_gradient_checkpointing: bool = Field(
        description="Recompute activations in the backward pass to save memory."
    )
    gradient_checkpointing_mode: Literal["full", "selective"] = Field(
        description="full recomputes whole layers; selective keeps the outputs of matmuls and attention."
    )
    enable_activation_offload: bool = Field(
        description="Offload saved activations to CPU memory until the backward pass."
    )
    use_remove_padding: bool = Field(
        description="Accepted for compatibility; batches are never padded, so it has no effect."
    )
    trust_remote_code: bool = Field(description="Allow transformers to run Python code from the model folder.")
    lora_rank: int = Field(ge=0, description="Rank of LoRA adapters; the base model is frozen. 0 trains all weights.")
    lora_alpha: float = Field(gt=0, description="LoRA: scale the adapter output by lora_alpha / lora_rank.")
    target_modules: Names = Field(
        description="LoRA: suffixes of linear layer names, or all-linear for every linear layer except the output head."
    )
    exclude_modules: Names = Field(description="LoRA: suffixes of layer names without an adapter; null for none.")
    lora_adapter_path: Path | None = Field(
        description="LoRA: PEFT adapter folder to start from; null starts from a zero adapter."
    )


class ResponsesModelConfig(AnyModelConfig):
    """A model that reads several responses per prompt."""

    use_prefix_grouper: bool = Field(
        description="Prefix sharing: compute a prompt once for all of its responses in a micro-batch. Only on CPUs "
        "with full attention."
    )


class ModelConfig(AnyModelConfig):
    """A language model."""

    random_init: bool = Field(description="Initialize weights randomly from trainer.seed instead of loading them.")


class PolicyModelConfig(ModelConfig, ResponsesModelConfig):
    """The language model of actor, rollout and reference."""


class OptimSection(Section):
    """Optimizer and learning-rate schedule. One schedule step is one trainer iteration."""

    optimizer: Text = Field(description="Class name in torch.optim, or package.module:Class.")
    override_optimizer_config: dict[str, Any] = Field(
        description="Further keyword arguments of the optimizer; they override the keys below."
    )
    lr: float = Field(gt=0, description="Peak learning rate, reached after warm-up.")
    betas: Betas = Field(description="Adam betas: decay of the first and second moments.")
    weight_decay: float = Field(ge=0, description="Weight decay (decoupled in AdamW).")
    lr_warmup_steps: int = Field(ge=-1, description="Iterations of linear warm-up; -1 uses lr_warmup_steps_ratio.")
    lr_warmup_steps_ratio: float = Field(ge=0, le=1, description="Warm-up as a fraction of the schedule length.")
    min_lr_ratio: float | None = Field(
        ge=0, le=1, description="Cosine, linear: minimum learning rate as a fraction of lr; null is 0."
    )
    num_cycles: float = Field(
        gt=0, description="Cosine: number of cosine cycles; 0.5 decays once from lr to the minimum."
    )
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = Field(
        description="Learning-rate schedule after warm-up."
    )
    total_training_steps: OffOrPositive = Field(
        description="Schedule length in iterations; -1 uses the length of the run."
    )

    def warmup_steps(self, total_steps: int) -> int:
        """Return the number of warm-up iterations in a schedule of `total_steps`."""
        if self.lr_warmup_steps >= 0:
            return self.lr_warmup_steps
        return int(self.lr_warmup_steps_ratio * total_steps)


class CheckpointConfig(Section):
    """Checkpoint contents and writing mode."""

    save_contents: Contents = Field(
        description="model, optimizer and extra (random states, schedule) are always saved, because resuming requires "
        "them; hf_model also saves a Hugging Face model folder."
    )
    async_save: bool = Field(description="Write checkpoints in the background from a copy in CPU memory.")

    def with_hf_model(self) -> bool:
        """Return True if every checkpoint contains a Hugging Face model folder."""
        return "hf_model" in self.save_contents
