"""Sections that every trained model has: the model, its optimizer, its sharding, its checkpoints."""

from typing import Any, Literal

from pydantic import Field

from camshaft.config.schema.fields import Betas, Contents, DType, Modules, Names, OffOrPositive, Path, Section, Text

ComputeDType = Literal["float32", "bfloat16"]


class AnyModelConfig(Section):
    """Which Hugging Face model, and how it is built."""

    path: Path = Field(description="Folder in the Hugging Face layout: config.json, weights, tokenizer; or its URL.")
    external_lib: Modules | None = Field(description="Python modules to import first; they may register models.")
    override_config: dict[str, Any] = Field(description="Entries that replace those of config.json, dropout for one.")
    enable_gradient_checkpointing: bool = Field(description="Recompute activations on the way back: memory for time.")
    gradient_checkpointing_mode: Literal["full", "selective"] = Field(
        description="Recompute whole layers, or all but the results of matrix products and attention."
    )
    enable_activation_offload: bool = Field(description="Keep activations for the way back in host memory.")
    use_remove_padding: bool = Field(description="Compute on real tokens only; nothing is ever padded, so always on.")
    trust_remote_code: bool = Field(description="Let transformers run Python code from the model's folder.")
    lora_rank: int = Field(ge=0, description="Train adapters of this rank and freeze the model; 0: train the model.")
    lora_alpha: float = Field(gt=0, description="LoRA: the adapters' output is scaled by lora_alpha / lora_rank.")
    target_modules: Names = Field(
        description="LoRA: endings of names of linear layers, or all-linear: every one but the output head."
    )
    exclude_modules: Names = Field(description="LoRA: endings of names of layers that are left alone; null for none.")
    lora_adapter_path: Path | None = Field(
        description="LoRA: folder of an adapter in PEFT's layout to start from; null: one that changes nothing yet."
    )


class ResponsesModelConfig(AnyModelConfig):
    """A model that looks at many responses to one prompt."""

    use_prefix_grouper: bool = Field(
        description="Compute the prompt of several responses once in a micro-batch; on CPUs, with full attention."
    )


class ModelConfig(AnyModelConfig):
    """The language model."""

    random_init: bool = Field(description="Draw the weights from trainer.seed instead of reading them.")


class PolicyModelConfig(ModelConfig, ResponsesModelConfig):
    """The language model of actor, rollout and reference."""


class OptimSection(Section):
    """The optimizer and its learning-rate schedule. One step of the schedule is one iteration of the trainer."""

    optimizer: Text = Field(description="A name in torch.optim, or package.module:Class.")
    override_optimizer_config: dict[str, Any] = Field(
        description="More arguments of the optimizer, by its own names; they win over those below."
    )
    lr: float = Field(gt=0, description="Learning rate after warm-up.")
    betas: Betas = Field(description="Decay of the first and second moments.")
    weight_decay: float = Field(ge=0, description="Weight decay; AdamW's is decoupled.")
    lr_warmup_steps: int = Field(ge=-1, description="Iterations of linear warm-up; -1 uses lr_warmup_steps_ratio.")
    lr_warmup_steps_ratio: float = Field(ge=0, le=1, description="Warm-up as a share of the schedule's length.")
    min_lr_ratio: float | None = Field(
        ge=0, le=1, description="Cosine, linear: the lowest rate as a share of lr; null is 0."
    )
    num_cycles: float = Field(gt=0, description="Cosine: waves over the run; 0.5 falls once from lr to the minimum.")
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = Field(description="Shape of the rate after warm-up.")
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


class ForwardMixedPrecision(Section):
    """Numbers of the computation of a model that is not trained."""

    param_dtype: ComputeDType | None = Field(
        description="Number format of weights and activations while they are computed with; null: model_dtype."
    )


class MixedPrecision(ForwardMixedPrecision):
    """Numbers of the computation; the weights that the optimizer moves stay in model_dtype."""

    reduce_dtype: ComputeDType | None = Field(
        description="Number format of gradients while they are summed over ranks; null: param_dtype."
    )


class Sharding(Section):
    """Number format of weights and how they are shared out; what trained and frozen models have in common."""

    wrap_policy: WrapPolicy = Field(description="Units of sharding.")
    fsdp_size: OffOrPositive = Field(
        description="Ranks that share one copy of the weights; -1: all. Fewer: whole copies on groups of so many ranks."
    )
    reshard_after_forward: bool = Field(
        description="Let go of gathered weights after each unit's forward pass: memory for one more gathering."
    )
    forward_prefetch: bool = Field(description="Gather the next unit's weights while this one computes.")
    tensor_parallel_size: int = Field(ge=1, description="Ranks that share each matrix product.")
    param_offload: bool = Field(description="Keep parameters in host memory while they are not needed.")
    offload_policy: bool = Field(
        description="Keep everything in host memory at all times; each unit is brought to the device for its use."
    )
    model_dtype: DType = Field(description="Number format of the weights.")


class FSDPConfig(Sharding):
    """Number format of a trained model and how FSDP shards it."""

    grad_offload: bool = Field(description="Keep gradients in host memory while they are not needed.")
    optimizer_offload: bool = Field(description="Keep the optimizer's state in host memory while it is not needed.")
    mixed_precision: MixedPrecision = Field(description="Numbers of the computation.")

    def computes_in(self) -> str:
        """Number format of the computation, which can be less exact than that of the weights."""
        return self.mixed_precision.param_dtype or self.model_dtype


class ForwardFSDPConfig(Sharding):
    """The same for a model that is not trained."""

    mixed_precision: ForwardMixedPrecision = Field(description="Numbers of the computation.")


class CheckpointConfig(Section):
    """How checkpoints are written."""

    save_contents: Contents = Field(
        description="model, optimizer and extra (random states, schedule) are always there, since a run goes on from "
        "them; hf_model adds the weights as a Hugging Face folder."
    )
    async_save: bool = Field(description="Write in the background, from a copy in host memory, while training goes on.")

    def with_hf_model(self) -> bool:
        """Is a Hugging Face folder written with every checkpoint?"""
        return "hf_model" in self.save_contents
