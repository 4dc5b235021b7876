"""Options of the Megatron engine, under the names that Megatron-LM uses.

    options = MegatronOptions.from_dict({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2})
    options.ranks_per_row()                  # 4
    list(options.layout_conflicts(6))        # 6 ranks are not divisible by 4

This module imports neither torch nor Megatron.
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from camshaft.config.engine import Conflict, EngineModel, EngineOptions, format_division
from camshaft.config.schema.fsdp import MixedPrecision


class MegatronOptions(EngineOptions):
    """Options of `MegatronEngine`."""

    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """Number of ranks over which each weight matrix is split."""
    sequence_parallel: bool = True
    """With tensor parallelism, also split the activations between the matrices over these ranks, by tokens."""
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    """Number of pipeline stages. Layers are distributed evenly over the stages that set no number of layers."""
    num_layers_in_first_pipeline_stage: int | None = Field(default=None, ge=1)
    """Number of layers of the first pipeline stage, which also embeds the tokens."""
    num_layers_in_last_pipeline_stage: int | None = Field(default=None, ge=1)
    """Number of layers of the last pipeline stage, which also computes the outputs."""
    virtual_pipeline_model_parallel_size: int | None = Field(default=None, ge=2)
    """Number of stages on each pipeline rank, for the interleaved schedule. null uses one stage and plain 1F1B."""
    context_parallel_size: int = Field(default=1, ge=1)
    """Number of ranks over which the tokens of a micro-batch, and during attention the heads, are split (Ulysses)."""
    expert_model_parallel_size: int = Field(default=1, ge=1)
    """Number of ranks of a pipeline stage over which the experts of a mixture-of-experts model are split."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Dtype in which the routers of a mixture of experts compute. null computes in the dtype of the layers."""
    moe_aux_loss_coeff: float = Field(default=0.0, ge=0)
    """Coefficient of the load-balancing loss of each layer of a mixture of experts, summed over the layers. The config
    key `router_aux_loss_coef` is that of one loss over all layers."""
    moe_z_loss_coeff: float = Field(default=0.0, ge=0)
    """Coefficient of the z-loss of each router of a mixture of experts, summed over the layers."""
    use_distributed_optimizer: bool = False
    """Split the optimizer state over the data-parallel ranks."""
    mixed_precision: MixedPrecision = MixedPrecision()
    """With `param_dtype=bfloat16` the model computes in bfloat16 and the optimizer updates float32 master weights.
    Gradients are then accumulated and reduced in float32."""
    param_offload: bool = False
    optimizer_offload: bool = False
    activation_offload: bool = False
    """Offload the activations that are saved for the backward pass to CPU memory."""
    async_save: bool = False
    """Write checkpoints in the background from a copy in CPU memory, while training continues."""

    def ranks_per_row(self) -> int:
        return self.tensor_model_parallel_size * self.context_parallel_size * self.pipeline_model_parallel_size

    def set_stages(self) -> dict[str, int]:
        """Return the options that set the number of layers of a pipeline stage."""
        sizes = {
            "num_layers_in_first_pipeline_stage": self.num_layers_in_first_pipeline_stage,
            "num_layers_in_last_pipeline_stage": self.num_layers_in_last_pipeline_stage,
        }
        return {name: size for name, size in sizes.items() if size is not None}

    def layout_conflicts(self, world_size: int) -> Iterator[Conflict]:
        ranks = self.ranks_per_row()
        if world_size % ranks:
            yield Conflict(
                "tensor_model_parallel_size",
                f"world_size={world_size} is not divisible by tensor_model_parallel_size="
                f"{self.tensor_model_parallel_size} x context_parallel_size={self.context_parallel_size} x "
                f"pipeline_model_parallel_size={self.pipeline_model_parallel_size} = {ranks}: "
                f"{format_division(world_size, ranks)}",
            )

        elif (world_size // self.pipeline_model_parallel_size) % self.expert_model_parallel_size:
            yield Conflict(
                "expert_model_parallel_size",
                f"the {world_size // self.pipeline_model_parallel_size} ranks of a pipeline stage are not divisible by "
                f"expert_model_parallel_size={self.expert_model_parallel_size}",
            )

    def conflicts(self, model: EngineModel) -> Iterator[Conflict]:
        virtual = self.virtual_pipeline_model_parallel_size
        if virtual is not None and self.pipeline_model_parallel_size == 1:
            yield Conflict(
                "virtual_pipeline_model_parallel_size",
                f"virtual_pipeline_model_parallel_size={virtual} has no effect with pipeline_model_parallel_size=1",
                ("virtual_pipeline_model_parallel_size=null", "pipeline_model_parallel_size=2"),
            )
        for name, layers in self.set_stages().items():
            if self.pipeline_model_parallel_size == 1:
                message = f"{name}={layers} has no effect with pipeline_model_parallel_size=1"
                yield Conflict(name, message, (f"{name}=null", "pipeline_model_parallel_size=2"))
        param_dtype, reduce_dtype = self.mixed_precision.param_dtype, self.mixed_precision.reduce_dtype
        if (reduce_dtype or param_dtype) == "bfloat16":
            yield Conflict(
                "mixed_precision.reduce_dtype",
                f"reduce_dtype={reduce_dtype or 'null'} with param_dtype={param_dtype or 'null'} is not supported by "
                "strategy=megatron, because it accumulates the gradients of micro-batches in the type of the reduction",
                ("mixed_precision.reduce_dtype=float32",),
            )
        if self.param_offload and self.use_distributed_optimizer:
            yield Conflict(
                "param_offload",
                "param_offload is not supported with use_distributed_optimizer, whose buffers of the weights stay on "
                "the device",
                ("param_offload=false", "use_distributed_optimizer=false"),
            )
        if model.enable_gradient_checkpointing and model.gradient_checkpointing_mode == "selective":
            yield Conflict(
                "model.gradient_checkpointing_mode",
                "gradient_checkpointing_mode=selective is not supported by strategy=megatron, which recomputes whole "
                "layers",
                ("model.gradient_checkpointing_mode=full",),
            )
