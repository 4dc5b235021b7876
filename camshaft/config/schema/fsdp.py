"""Section `fsdp_config` of every role, and the options of the FSDP engines that it is part of.

    options = FSDPOptions.of({"fsdp_size": 2, "mixed_precision": {"param_dtype": "bfloat16"}})
    options.ranks_per_row()

The fields have defaults for programs that build an engine without a config file; the YAML files repeat them.
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from camshaft.config.engine import Conflict, EngineModel, EngineOptions, count_of_ranks, sum_of
from camshaft.config.schema.fields import DType, OffOrPositive, Section, Text

ComputeDType = Literal["float32", "bfloat16"]


class WrapPolicy(Section):
    """Modules that FSDP shards as one unit; by default the model's decoder layers."""

    transformer_layer_cls_to_wrap: Text | None = Field(
        default=None,
        description="Comma-separated class names of the layers that are sharded as one unit each. null uses the "
        "decoder layer class of the model.",
    )
    min_num_params: int = Field(
        default=0,
        ge=0,
        description="Shard each module with at least this many parameters as one unit, instead of selecting layers by "
        "class. 0 selects layers by class.",
    )


class ForwardMixedPrecision(Section):
    """Compute dtype of a frozen model."""

    param_dtype: ComputeDType | None = Field(
        default=None, description="Dtype of the weights and activations during computation. null uses model_dtype."
    )


class MixedPrecision(ForwardMixedPrecision):
    """Compute dtypes; the optimizer updates weights in model_dtype."""

    reduce_dtype: ComputeDType | None = Field(
        default="float32", description="Dtype in which gradients are reduced across ranks. null uses param_dtype."
    )


class Sharding(Section):
    """Sharding and memory, common to trained and frozen models."""

    wrap_policy: WrapPolicy = Field(
        default=WrapPolicy(), description="Selection of the modules that are sharded as one unit each."
    )
    fsdp_size: OffOrPositive = Field(
        default=-1,
        description="Number of ranks in a shard group. -1 shards the model over all ranks; a smaller group replicates "
        "the model across groups (HSDP).",
    )
    reshard_after_forward: bool = Field(
        default=True,
        description="Free the gathered weights of each unit after its forward pass. This saves memory and costs one "
        "more all-gather in the backward pass.",
    )
    forward_prefetch: bool = Field(
        default=False, description="Gather the weights of the next unit while the current unit runs its forward pass."
    )
    tensor_parallel_size: int = Field(
        default=1, ge=1, description="Tensor-parallel size: number of ranks over which each weight matrix is split."
    )
    param_offload: bool = Field(
        default=False, description="Offload the parameters to CPU memory while the engine is idle."
    )
    offload_policy: bool = Field(
        default=False,
        description="Keep parameters, gradients and optimizer state in CPU memory at all times. Each unit is copied "
        "to the device when it is computed.",
    )
    mixed_precision: ForwardMixedPrecision = Field(
        default=ForwardMixedPrecision(), description="Dtypes used during computation."
    )


class TrainedSharding(Sharding):
    """Sharding and memory of a trained model."""

    mixed_precision: MixedPrecision = Field(default=MixedPrecision(), description="Dtypes used during computation.")
    grad_offload: bool = Field(
        default=False, description="Offload the gradients to CPU memory while the engine is idle."
    )
    optimizer_offload: bool = Field(
        default=False, description="Offload the optimizer state to CPU memory while the engine is idle."
    )


class ForwardFSDPConfig(Sharding):
    """Weight dtype and FSDP sharding of a frozen model."""

    model_dtype: DType = Field(description="Dtype in which the weights are stored.")


class FSDPConfig(TrainedSharding):
    """Weight dtype and FSDP sharding of a trained model."""

    model_dtype: DType = Field(description="Dtype in which the weights are stored.")

    def computes_in(self) -> str:
        """Return the compute dtype, which can have a lower precision than the weights."""
        return self.mixed_precision.param_dtype or self.model_dtype


class FSDPOptions(TrainedSharding, EngineOptions):
    """Options of `FSDPEngine`: `fsdp_config`, and keys of the role that the engine reads."""

    ulysses_sequence_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share the tokens of one micro-batch."""
    use_torch_compile: bool = False
    """Compile each unit with torch.compile."""
    activation_offload: bool = False
    """Keep the activations that the backward pass needs in host memory."""
    async_save: bool = False
    """Write checkpoints in the background, from a copy in host memory."""

    def ranks_per_row(self) -> int:
        return self.ulysses_sequence_parallel_size * self.tensor_parallel_size

    def layout_conflicts(self, world_size: int) -> Iterator[Conflict]:
        sequence, tensor = self.ulysses_sequence_parallel_size, self.tensor_parallel_size
        if world_size % (sequence * tensor):
            option = "tensor_parallel_size" if sequence == 1 else "ulysses_sequence_parallel_size"
            yield Conflict(
                option,
                f"{count_of_ranks(world_size)} not split into groups of ulysses_sequence_parallel_size={sequence} x "
                f"tensor_parallel_size={tensor} = {sequence * tensor}: {sum_of(world_size, sequence * tensor)}",
            )
            return
        ranks = world_size // tensor
        shards = self.shards(world_size)
        if ranks % shards:
            per_tensor = f" / tensor_parallel_size={tensor} = {ranks} ranks" if tensor > 1 else ""
            message = f"{world_size} ranks{per_tensor} do not split into groups of {shards}: {sum_of(ranks, shards)}"
            yield Conflict("fsdp_size", message)

    def shards(self, world_size: int) -> int:
        """Ranks that share one copy of the weights, or of this rank's part under tensor parallelism."""
        ranks = world_size // self.tensor_parallel_size
        return ranks if self.fsdp_size == -1 else min(self.fsdp_size, ranks)

    def conflicts(self, model: EngineModel) -> Iterator[Conflict]:
        sequence, tensor = self.ulysses_sequence_parallel_size, self.tensor_parallel_size
        if self.offload_policy and (self.param_offload or self.grad_offload or self.optimizer_offload):
            yield Conflict(
                "offload_policy",
                "offload_policy keeps everything in host memory at all times; param_offload, grad_offload and "
                "optimizer_offload move it between phases. Choose one of the two",
            )
        if sequence > 1 and tensor > 1:
            yield Conflict(
                "ulysses_sequence_parallel_size",
                f"ulysses_sequence_parallel_size={sequence} with tensor_parallel_size={tensor}: both shard the "
                "attention heads, and the combination is not supported",
                ("ulysses_sequence_parallel_size=1", "tensor_parallel_size=1"),
            )
        if self.use_torch_compile and tensor > 1:
            yield Conflict(
                "use_torch_compile",
                f"use_torch_compile with tensor_parallel_size={tensor}: torch does not compile the backward pass of "
                "tensor-parallel matrices",
                ("use_torch_compile=false", "tensor_parallel_size=1"),
            )
        if tensor > 1 and model.lora is not None:
            yield Conflict(
                "tensor_parallel_size",
                f"LoRA with tensor_parallel_size={tensor}: adapters of tensor-parallel matrices are not supported; "
                "weights are sharded over all ranks anyway",
                ("tensor_parallel_size=1",),
            )
        if model.enable_gradient_checkpointing and model.gradient_checkpointing_mode == "selective":
            yield from self._selective_checkpointing()

    def _selective_checkpointing(self) -> Iterator[Conflict]:
        option, fixes = "model.gradient_checkpointing_mode", ("model.gradient_checkpointing_mode=full",)
        if self.use_torch_compile:
            reason = "a compiled layer has no single operators whose results could be kept"
            message = f"use_torch_compile with gradient_checkpointing_mode=selective: {reason}"
            yield Conflict(option, message, (*fixes, "use_torch_compile=false"))
        if self.wrap_policy.min_num_params:
            setting = f"wrap_policy.min_num_params={self.wrap_policy.min_num_params}"
            reason = "units inside a layer are gathered while the layer is recomputed, which selective does not support"
            message = f"{setting} with gradient_checkpointing_mode=selective: {reason}"
            yield Conflict(option, message, (*fixes, "wrap_policy.min_num_params=0"))


class FSDP1Options(FSDPOptions):
    """Options of `FSDP1Engine`, the older wrapper, which supports fewer of them."""

    def conflicts(self, model: EngineModel) -> Iterator[Conflict]:
        yield from super().conflicts(model)
        settings = {
            "tensor_parallel_size": self.tensor_parallel_size > 1,
            "param_offload": self.param_offload,
            "grad_offload": self.grad_offload,
            "offload_policy": self.offload_policy,
            "use_torch_compile": self.use_torch_compile,
            "lora": model.lora is not None,
        }
        unsupported = [name for name, is_set in settings.items() if is_set]
        if unsupported:
            yield Conflict("", f"strategy=fsdp1 does not support {', '.join(unsupported)}", ("strategy=fsdp2",))
