"""Options of the Megatron engine, under the names that Megatron-LM uses.

    options = MegatronOptions.from_dict({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2})
    options.ranks_per_row()                  # 4
    list(options.layout_conflicts(6))        # 6 ranks are not divisible by 4

This module imports neither torch nor Megatron.
"""

from collections.abc import Iterator

from pydantic import Field

from camshaft.config.engine import Conflict, EngineModel, EngineOptions, format_division


class MegatronOptions(EngineOptions):
    """Options of `MegatronEngine`."""

    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """Number of ranks over which each weight matrix is split."""
    sequence_parallel: bool = True
    """With tensor parallelism, also split the activations between the matrices over these ranks, by tokens."""
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    """Number of pipeline stages, each with an equal number of layers."""
    virtual_pipeline_model_parallel_size: int | None = Field(default=None, ge=2)
    """Number of stages on each pipeline rank, for the interleaved schedule. null uses one stage and plain 1F1B."""
    context_parallel_size: int = Field(default=1, ge=1)
    """Number of ranks over which the tokens of a micro-batch, and during attention the heads, are split (Ulysses)."""
    expert_model_parallel_size: int = Field(default=1, ge=1)
    """Number of data- and context-parallel ranks over which the experts of a mixture-of-experts model are split."""
    use_distributed_optimizer: bool = False
    """Split the optimizer state over the data-parallel ranks."""
    activation_offload: bool = False
    """Offload the activations that are saved for the backward pass to CPU memory."""
    async_save: bool = False
    """Write checkpoints in the background from a copy in CPU memory, while training continues."""

    def ranks_per_row(self) -> int:
        return self.tensor_model_parallel_size * self.context_parallel_size * self.pipeline_model_parallel_size

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
        expert = self.expert_model_parallel_size
        if expert > 1 and self.use_distributed_optimizer:
            yield Conflict(
                "use_distributed_optimizer",
                f"use_distributed_optimizer is not supported with expert_model_parallel_size={expert}",
                ("use_distributed_optimizer=false", "expert_model_parallel_size=1"),
            )
        if expert > 1 and self.tensor_model_parallel_size > 1:
            yield Conflict(
                "expert_model_parallel_size",
                f"expert_model_parallel_size={expert} is not supported with "
                f"tensor_model_parallel_size={self.tensor_model_parallel_size}",
                ("expert_model_parallel_size=1", "tensor_model_parallel_size=1"),
            )
        if model.enable_gradient_checkpointing and model.gradient_checkpointing_mode == "selective":
            yield Conflict(
                "model.gradient_checkpointing_mode",
                "gradient_checkpointing_mode=selective is not supported by strategy=megatron, which recomputes whole "
                "layers",
                ("model.gradient_checkpointing_mode=full",),
            )
