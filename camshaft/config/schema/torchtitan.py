"""Options of the torchtitan engine, `strategy=torchtitan`.

    options = TorchtitanOptions.from_dict({"tensor_parallel_size": 2, "data_parallel_replicate_degree": 2})
    options.shards(world_size=8)            # 2

Names that exist in `fsdp_config` have the same meaning there. The other names are those of torchtitan's
`ParallelismConfig`.
"""

from collections.abc import Iterator

from pydantic import Field

from camshaft.config.engine import Conflict, EngineModel, EngineOptions, format_division
from camshaft.config.schema.fields import OffOrPositive
from camshaft.config.schema.fsdp import MixedPrecision


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
    context_parallel_degree: int = Field(default=1, ge=1)
    """Rejected above 1; `ulysses_sequence_parallel_size` splits long rows instead."""
    mixed_precision: MixedPrecision = MixedPrecision()
    reshard_after_forward: bool = True
    """Free the gathered weights of each layer after its forward pass."""
    param_offload: bool = False
    grad_offload: bool = False
    optimizer_offload: bool = False
    activation_offload: bool = False
    """Offload the activations that are saved for the backward pass to CPU memory."""
    async_save: bool = False
    """Write checkpoints in the background from a copy in CPU memory, while training continues."""

    def ranks_per_row(self) -> int:
        return self.ulysses_sequence_parallel_size * self.tensor_parallel_size

    def shards(self, world_size: int) -> int:
        """Return the number of ranks over which FSDP shards one replica of the weights."""
        ranks = world_size // (self.tensor_parallel_size * self.data_parallel_replicate_degree)
        return ranks if self.data_parallel_shard_degree == -1 else self.data_parallel_shard_degree

    def layout_conflicts(self, world_size: int) -> Iterator[Conflict]:
        replicas, tensor = self.data_parallel_replicate_degree, self.tensor_parallel_size
        sequence, shards = self.ulysses_sequence_parallel_size, self.data_parallel_shard_degree
        sizes = {"data_parallel_replicate_degree": replicas, "tensor_parallel_size": tensor}
        if shards != -1:
            sizes["data_parallel_shard_degree"] = shards
        product = 1
        for size in sizes.values():
            product *= size
        if world_size % product or (shards != -1 and product != world_size):
            used = {name: size for name, size in sizes.items() if size > 1 or name == "data_parallel_shard_degree"}
            factors = " x ".join(f"{name}={size}" for name, size in used.items())
            problem = "is not divisible by" if shards == -1 else "differs from"
            division = f": {format_division(world_size, product)}" if shards == -1 else f" = {product}"
            yield Conflict(next(reversed(used)), f"world_size={world_size} {problem} {factors}{division}")
        elif self.shards(world_size) % sequence:
            yield Conflict(
                "ulysses_sequence_parallel_size",
                f"ulysses_sequence_parallel_size={sequence} does not divide the {self.shards(world_size)} ranks over "
                "which FSDP shards the weights. Sequence-parallel ranks belong to one replica",
            )

    def conflicts(self, model: EngineModel) -> Iterator[Conflict]:
        sequence, tensor = self.ulysses_sequence_parallel_size, self.tensor_parallel_size
        if self.context_parallel_degree > 1:
            yield Conflict(
                "context_parallel_degree",
                "context parallelism of torchtitan requires its flex attention, which supports neither a CPU nor the "
                "packed rows of this engine",
                ("ulysses_sequence_parallel_size=2", "context_parallel_degree=1"),
            )
        if sequence > 1 and tensor > 1:
            yield Conflict(
                "ulysses_sequence_parallel_size",
                f"ulysses_sequence_parallel_size={sequence} cannot be combined with tensor_parallel_size={tensor}, "
                "because both shard the attention heads",
                ("ulysses_sequence_parallel_size=1", "tensor_parallel_size=1"),
            )
