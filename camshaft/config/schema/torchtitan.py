"""Options of the torchtitan engine, `strategy=torchtitan`.

    options = TorchtitanOptions.from_dict({"tensor_parallel_size": 2, "data_parallel_replicate_degree": 2})
    options.shards(world_size=8)            # 2

Names that exist in `fsdp_config` have the same meaning there. The other names are those of torchtitan's
`ParallelismConfig`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from camshaft.config.engine import Conflict, EngineModel, EngineOptions, format_division
from camshaft.config.families.conflicts import sequence_conflicts, size_conflicts
from camshaft.config.families.support import rope_limit
from camshaft.config.schema.fields import OffOrPositive
from camshaft.config.schema.fsdp import MixedPrecision, head_conflicts

UNSUPPORTED = {
    "context_parallel_degree": (
        "torchtitan splits packed rows only with its flex attention, which has no backward pass on a CPU",
        "ulysses_sequence_parallel_size=2",
    ),
    "expert_parallel_degree": (
        "the engine supports dense models only, because torchtitan computes experts in bfloat16 even if the model is "
        "float32",
    ),
}
"""Degrees of torchtitan that the engine does not support: the reason, and settings to use instead."""


class TorchtitanOptions(EngineOptions):
    """Options of `TorchtitanEngine`."""

    data_parallel_replicate_degree: int = Field(default=1, ge=1)
    """Number of replicas of the weights (HSDP)."""
    data_parallel_shard_degree: OffOrPositive = -1
    """Number of ranks over which FSDP shards one replica; -1 uses all ranks that remain. It includes the
    sequence-parallel ranks."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Number of ranks over which each weight matrix is split (`tensor_parallel_degree` of torchtitan)."""
    enable_sequence_parallel: bool = True
    """Split the tokens between tensor-parallel layers over the tensor-parallel ranks."""
    ulysses_sequence_parallel_size: int = Field(default=1, ge=1)
    """Number of ranks over which the tokens of a micro-batch are split."""
    pipeline_parallel_degree: int = Field(default=1, ge=1)
    """Number of pipeline stages. As in torchtitan, the embedding and the output layer count as one layer each when the
    layers are distributed."""
    context_parallel_degree: int = Field(default=1, ge=1)
    expert_parallel_degree: int = Field(default=1, ge=1)
    """Degrees of torchtitan that are rejected above 1, with the reason (`UNSUPPORTED`)."""
    mixed_precision: MixedPrecision = MixedPrecision()
    reshard_after_forward: bool = True
    """Free the gathered weights of each layer after its forward pass. Pipeline stages keep them for further
    micro-batches, as in torchtitan."""
    param_offload: bool = False
    grad_offload: bool = False
    optimizer_offload: bool = False
    activation_offload: bool = False
    """Offload the activations that are saved for the backward pass to CPU memory."""
    async_save: bool = False
    """Write checkpoints in the background from a copy in CPU memory, while training continues."""

    def ranks_per_row(self) -> int:
        return self.ulysses_sequence_parallel_size * self.tensor_parallel_size * self.pipeline_parallel_degree

    def shards(self, world_size: int) -> int:
        """Return the number of ranks over which FSDP shards one replica of the weights of a pipeline stage."""
        ranks_per_shard = self.pipeline_parallel_degree * self.tensor_parallel_size
        ranks = world_size // (ranks_per_shard * self.data_parallel_replicate_degree)
        return ranks if self.data_parallel_shard_degree == -1 else self.data_parallel_shard_degree

    def layout_conflicts(self, world_size: int) -> Iterator[Conflict]:
        replicas, tensor = self.data_parallel_replicate_degree, self.tensor_parallel_size
        sequence, shards = self.ulysses_sequence_parallel_size, self.data_parallel_shard_degree
        sizes = {
            "pipeline_parallel_degree": self.pipeline_parallel_degree,
            "data_parallel_replicate_degree": replicas,
            "tensor_parallel_size": tensor,
        }
        if shards != -1:
            sizes["data_parallel_shard_degree"] = shards
        product = 1
        for size in sizes.values():
            product *= size
        if world_size % product or (shards != -1 and product != world_size):
            used = {name: size for name, size in sizes.items() if size > 1 or name == "data_parallel_shard_degree"}
            factors = " x ".join(f"{name}={size}" for name, size in used.items())
            if shards == -1:
                problem = f"is not divisible by {factors}: {format_division(world_size, product)}"
            else:
                problem = f"differs from {factors}" + (f" = {product}" if len(used) > 1 else "")
            yield Conflict(next(reversed(used)), f"world_size={world_size} {problem}")
        elif self.shards(world_size) % sequence:
            yield Conflict(
                "ulysses_sequence_parallel_size",
                f"ulysses_sequence_parallel_size={sequence} does not divide the {self.shards(world_size)} ranks over "
                "which FSDP shards the weights. Sequence-parallel ranks belong to one replica",
            )

    def conflicts(self, model: EngineModel) -> Iterator[Conflict]:
        for option, (reason, *fixes) in UNSUPPORTED.items():
            if (degree := getattr(self, option)) > 1:
                yield Conflict(option, f"{option}={degree} is not supported: {reason}", (f"{option}=1", *fixes))
        yield from head_conflicts(self.ulysses_sequence_parallel_size, self.tensor_parallel_size)

    def family_conflicts(self, values: Mapping[str, Any], model: EngineModel) -> Iterator[Conflict]:
        for key, supported in {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}.items():
            if (actual := values.get(key, supported)) != supported:
                message = f"strategy=torchtitan supports {values['model_type']} models only with {key}={supported}"
                yield Conflict("", f"{message}, got {actual}", ("strategy=fsdp",))
        if (limit := rope_limit(values)) is not None:
            yield Conflict("", f"strategy=torchtitan does not support rope_type={limit.rope_type}", ("strategy=fsdp",))
        yield from sequence_conflicts(values, "ulysses_sequence_parallel_size", self.ulysses_sequence_parallel_size)
        sizes = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
        yield from size_conflicts(values, sizes, "tensor_parallel_size", self.tensor_parallel_size)
        layers, stages = values.get("num_hidden_layers"), self.pipeline_parallel_degree
        if isinstance(layers, int) and layers < stages:
            option = "pipeline_parallel_degree"
            message = f"num_hidden_layers={layers} of this {values['model_type']} model is less than {option}={stages}"
            yield Conflict(option, message, (f"{option}={layers}",))
