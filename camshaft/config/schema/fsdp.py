"""Section `fsdp_config` of every role, and the options of the FSDP engines, which include it.

    options = FSDPOptions.from_dict({"fsdp_size": 2, "mixed_precision": {"param_dtype": "bfloat16"}})
    options.ranks_per_row()

Programs that build an engine without a config file read these defaults too. Therefore `param_dtype` is None by default,
and only a config file has `auto`, which is chosen when the file is loaded.
"""

# Sections are immutable, so a subclass can narrow the type of a key.
# pyright: reportIncompatibleVariableOverride=false

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from camshaft.config.engine import Conflict, EngineModel, EngineOptions, format_division, largest_divisor
from camshaft.config.families.conflicts import packed_conflicts, sequence_conflicts, size_conflicts
from camshaft.config.families.known import missing_feature
from camshaft.config.schema.fields import Auto, DType, OffOrPositive, Section, Text, Unread, key, section

ComputeDType = Literal["float32", "bfloat16"]


_BY_SIZE = Unread(lambda policy: policy.min_num_params > 0, "{min_num_params}")


class WrapPolicy(Section):
    """Selection of the modules that FSDP shards as one unit each. By default these are the decoder layers."""

    transformer_layer_cls_to_wrap: Text | None = key(
        None,
        "Comma-separated class names of the layers that are sharded as one unit each. null uses the decoder layer "
        "class of the model.",
        unread=_BY_SIZE,
    )
    min_num_params: int = key(
        0,
        "Shard each module with at least this many parameters as one unit, instead of selecting layers by class. 0 "
        "selects layers by class.",
        ge=0,
    )


class ForwardMixedPrecision(Section):
    """Dtype in which a frozen model computes."""

    param_dtype: Annotated[ComputeDType | None, Auto()] = key(
        None,
        "Dtype of the weights and activations during computation. Master weights have model_dtype. null uses "
        "model_dtype. auto is bfloat16 for float32 weights on an accelerator, if the engine supports it, and null "
        "otherwise.",
    )


class MixedPrecision(ForwardMixedPrecision):
    """Dtypes in which a trained model computes. The optimizer updates the weights in `model_dtype`."""

    reduce_dtype: ComputeDType | None = key(
        "float32", "Dtype in which gradients are reduced across ranks. null uses param_dtype."
    )


class Sharding(Section):
    """Sharding and offloading keys that trained and frozen models share."""

    wrap_policy: WrapPolicy = section(
        "Selection of the modules that are sharded as one unit each.", default=WrapPolicy()
    )
    fsdp_size: OffOrPositive = key(
        -1,
        "Number of ranks in a shard group. -1 shards the model over all ranks; a smaller group replicates the model "
        "across groups (HSDP).",
    )
    reshard_after_forward: bool = key(
        True,
        "Free the gathered weights of each unit after its forward pass. This saves memory and costs one more "
        "all-gather in the backward pass.",
    )
    forward_prefetch: bool = key(
        False, "Gather the weights of the next unit while the current unit runs its forward pass."
    )
    tensor_parallel_size: int = key(
        1, "Tensor-parallel size: number of ranks over which each weight matrix is split.", ge=1
    )
    param_offload: bool = key(
        False,
        "Offload the parameters to CPU memory while the engine is idle. Recommended for a reference model with more "
        "than 7B parameters.",
    )
    offload_policy: bool = key(
        False,
        "Keep parameters, gradients and optimizer state in CPU memory at all times. This replaces the other offload "
        "keys. Each unit is copied to the device when it is computed.",
    )
    mixed_precision: ForwardMixedPrecision = section(
        "Dtypes used during computation.", {"param_dtype": "auto"}, default=ForwardMixedPrecision()
    )


class TrainedSharding(Sharding):
    """Sharding and offloading keys of a trained model."""

    mixed_precision: MixedPrecision = section(
        "Dtypes used during computation.", {"param_dtype": "auto"}, default=MixedPrecision()
    )
    grad_offload: bool = key(False, "Offload the gradients to CPU memory while the engine is idle.")
    optimizer_offload: bool = key(False, "Offload the optimizer state to CPU memory while the engine is idle.")


class ForwardFSDPConfig(Sharding):
    """Weight dtype and FSDP sharding of a frozen model."""

    model_dtype: Annotated[DType, Auto()] = key(
        "${actor_rollout_ref.actor.fsdp_config.model_dtype}",
        "Dtype in which the weights are stored. auto is that of the actor.",
    )


class FSDPConfig(TrainedSharding):
    """Weight dtype and FSDP sharding of a trained model."""

    model_dtype: Annotated[DType, Auto()] = key(
        "auto",
        "Dtype in which the weights are stored. With lora_rank, that of the frozen weights; trained weights are "
        "float32 or wider. bfloat16 requires lora_rank. auto is bfloat16 with lora_rank on an accelerator, if "
        "config.json of the model has this dtype and the engine supports it, and float32 otherwise.",
    )

    def compute_dtype(self) -> str:
        """Return the dtype in which the model computes. It can have a lower precision than the weights."""
        return self.mixed_precision.param_dtype or self.model_dtype


def head_conflicts(sequence: int, tensor: int) -> Iterator[Conflict]:
    """Yield the conflict of Ulysses sequence parallelism and tensor parallelism."""
    if sequence > 1 and tensor > 1:
        yield Conflict(
            "ulysses_sequence_parallel_size",
            f"ulysses_sequence_parallel_size={sequence} cannot be combined with tensor_parallel_size={tensor}, because "
            "both shard the attention heads",
            ("ulysses_sequence_parallel_size=1", "tensor_parallel_size=1"),
        )


class FSDPOptions(TrainedSharding, EngineOptions):
    """Options of `FSDPEngine`: the keys of `fsdp_config`, and four keys of the role."""

    ulysses_sequence_parallel_size: int = Field(default=1, ge=1)
    """Number of ranks over which the tokens of a micro-batch are split."""
    use_torch_compile: bool = False
    """Compile each FSDP unit with torch.compile."""
    activation_offload: bool = False
    """Offload the activations that are saved for the backward pass to CPU memory."""
    async_save: bool = False
    """Write checkpoints in the background from a copy in CPU memory, while training continues."""

    def ranks_per_row(self) -> int:
        return self.ulysses_sequence_parallel_size * self.tensor_parallel_size

    def layout_conflicts(self, world_size: int) -> Iterator[Conflict]:
        sequence, tensor = self.ulysses_sequence_parallel_size, self.tensor_parallel_size
        if world_size % (sequence * tensor):
            option = "tensor_parallel_size" if sequence == 1 else "ulysses_sequence_parallel_size"
            fix = f". Use {option}={largest_divisor(world_size, sequence * tensor)}" if 1 in (sequence, tensor) else ""
            yield Conflict(
                option,
                f"world_size={world_size} is not divisible by ulysses_sequence_parallel_size={sequence} x "
                f"tensor_parallel_size={tensor} = {sequence * tensor}: "
                f"{format_division(world_size, sequence * tensor)}{fix}",
            )
            return
        ranks = world_size // tensor
        shards = self.shards(world_size)
        if ranks % shards:
            quotient = f" / tensor_parallel_size={tensor} = {ranks}" if tensor > 1 else ""
            division = format_division(ranks, shards)
            message = f"world_size={world_size}{quotient} is not divisible by fsdp_size={shards}: {division}"
            yield Conflict("fsdp_size", f"{message}. Use fsdp_size={largest_divisor(ranks, shards)}")

    def shards(self, world_size: int) -> int:
        """Return the size of a shard group: the ranks over which FSDP shards one copy of the weights.

        With tensor parallelism, one copy is the tensor-parallel shard of the weights.
        """
        ranks = world_size // self.tensor_parallel_size
        return ranks if self.fsdp_size == -1 else min(self.fsdp_size, ranks)

    def conflicts(self, model: EngineModel) -> Iterator[Conflict]:
        sequence, tensor = self.ulysses_sequence_parallel_size, self.tensor_parallel_size
        if self.offload_policy and (self.param_offload or self.grad_offload or self.optimizer_offload):
            yield Conflict(
                "offload_policy",
                "offload_policy keeps parameters, gradients and optimizer state in CPU memory at all times, so "
                "param_offload, grad_offload and optimizer_offload have no effect. Set either offload_policy or the "
                "others",
            )
        yield from head_conflicts(sequence, tensor)
        if self.use_torch_compile and tensor > 1:
            yield Conflict(
                "use_torch_compile",
                f"use_torch_compile cannot be combined with tensor_parallel_size={tensor}, because torch does not "
                "compile the backward pass of tensor-parallel matrices",
                ("use_torch_compile=false", "tensor_parallel_size=1"),
            )
        if tensor > 1 and model.lora is not None:
            yield Conflict(
                "tensor_parallel_size",
                f"LoRA is not supported with tensor_parallel_size={tensor}. FSDP shards the weights over all ranks "
                "without tensor parallelism too",
                ("tensor_parallel_size=1",),
            )
        if model.enable_gradient_checkpointing and model.gradient_checkpointing_mode == "selective":
            yield from self._selective_checkpointing()

    def family_conflicts(self, values: Mapping[str, Any], model: EngineModel) -> Iterator[Conflict]:
        tensor, option = self.tensor_parallel_size, "tensor_parallel_size"
        yield from packed_conflicts(values, model)
        yield from sequence_conflicts(values, "ulysses_sequence_parallel_size", self.ulysses_sequence_parallel_size)
        if tensor > 1 and (reason := missing_feature("tensor parallelism", values)):
            message = f"{option}={tensor} is not supported for {values['model_type']} models: {reason}"
            yield Conflict(option, message, (f"{option}=1",))
        yield from size_conflicts(values, ("num_attention_heads", "num_key_value_heads"), option, tensor)

    def _selective_checkpointing(self) -> Iterator[Conflict]:
        option, fixes = "model.gradient_checkpointing_mode", ("model.gradient_checkpointing_mode=full",)
        if self.use_torch_compile:
            message = (
                "use_torch_compile cannot be combined with gradient_checkpointing_mode=selective, because selective "
                "checkpointing stores the outputs of single operators and a compiled layer fuses its operators"
            )
            yield Conflict(option, message, (*fixes, "use_torch_compile=false"))
        if self.wrap_policy.min_num_params:
            message = (
                f"wrap_policy.min_num_params={self.wrap_policy.min_num_params} cannot be combined with "
                "gradient_checkpointing_mode=selective, because FSDP gathers units inside a layer while the layer is "
                "recomputed, which selective checkpointing does not support"
            )
            yield Conflict(option, message, (*fixes, "wrap_policy.min_num_params=0"))


class FSDP1Options(FSDPOptions):
    """Options of `FSDP1Engine`, which wraps the older FSDP implementation and rejects some of them."""

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
