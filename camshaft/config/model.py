"""Sections that every trained model has: the model, its optimizer, its sharding."""

from typing import Any, Literal

from pydantic import Field

from camshaft.config.fields import Betas, DType, Modules, OffOrPositive, Path, Section, Text


class AnyModelConfig(Section):
    """Which Hugging Face model, and how it is built."""

    path: Path = Field(description="Local folder in the Hugging Face layout: config.json, weights, tokenizer.")
    external_lib: Modules | None = Field(description="Python modules to import first; they may register models.")
    override_config: dict[str, Any] = Field(description="Entries that replace those of config.json, dropout for one.")
    enable_gradient_checkpointing: bool = Field(description="Recompute activations on the way back: memory for time.")
    use_remove_padding: bool = Field(description="Compute on real tokens only; nothing is ever padded, so always on.")
    trust_remote_code: bool = Field(description="Let transformers run Python code from the model's folder.")


class ModelConfig(AnyModelConfig):
    """The language model."""

    random_init: bool = Field(description="Draw the weights from trainer.seed instead of reading them.")


class OptimSection(Section):
    """AdamW and its learning-rate schedule. One step of the schedule is one iteration of the trainer."""

    lr: float = Field(gt=0, description="Learning rate after warm-up.")
    betas: Betas = Field(description="AdamW's decay of the first and second moments.")
    weight_decay: float = Field(ge=0, description="AdamW's decoupled weight decay.")
    lr_warmup_steps: int = Field(ge=-1, description="Iterations of linear warm-up; -1 uses lr_warmup_steps_ratio.")
    lr_warmup_steps_ratio: float = Field(ge=0, le=1, description="Warm-up as a share of the schedule's length.")
    min_lr_ratio: float | None = Field(ge=0, le=1, description="Cosine: the lowest rate as a share of lr; null is 0.")
    num_cycles: float = Field(gt=0, description="Cosine: waves over the run; 0.5 falls once from lr to the minimum.")
    lr_scheduler_type: Literal["constant", "cosine"] = Field(description="Shape of the rate after warm-up.")
    total_training_steps: OffOrPositive = Field(
        description="Length of the schedule in iterations; -1: the trainer fills in the length of the run."
    )

    def warmup_steps(self, total_steps: int) -> int:
        """Iterations of warm-up in a schedule of `total_steps`."""
        if self.lr_warmup_steps >= 0:
            return self.lr_warmup_steps
        return int(self.lr_warmup_steps_ratio * total_steps)


class WrapPolicy(Section):
    """Which modules FSDP makes into one unit; by default the model's decoder layers."""

    transformer_layer_cls_to_wrap: Text | None = Field(description="Class names of the layers, with commas between.")
    min_num_params: int = Field(ge=0, description="Wrap modules with so many parameters instead; 0: by layer class.")


class FSDPConfig(Section):
    """Number format of a trained model and how FSDP shards it."""

    wrap_policy: WrapPolicy = Field(description="Units of sharding.")
    param_offload: bool = Field(description="Keep parameters in host memory while they are not needed.")
    grad_offload: bool = Field(description="Keep gradients in host memory while they are not needed.")
    optimizer_offload: bool = Field(description="Keep the optimizer's state in host memory while it is not needed.")
    model_dtype: DType = Field(description="Number format of the trained weights.")


class ForwardFSDPConfig(Section):
    """The same for a model that is not trained."""

    wrap_policy: WrapPolicy = Field(description="Units of sharding.")
    param_offload: bool = Field(description="Keep parameters in host memory while they are not needed.")
    model_dtype: DType = Field(description="Number format of the weights.")
