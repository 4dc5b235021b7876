"""Assignment of an engine's ranks to data, sequence, tensor and weight parallelism.

    layout = Layout.from_options(options, world=8)              # axis sizes only
    meshes = create_meshes(dist.group.WORLD, layout, "cpu")     # process groups; a collective

Consecutive ranks are tensor-parallel, then sequence-parallel, then data-parallel. The same ranks form two meshes:

    weights:   replicas x shards x tensor         FSDP gathers over `shards` and reduces over `replicas` and `shards`
    tokens:      data x sequence x tensor       data-parallel ranks process different rows

Sequence-parallel ranks process the same rows, but hold different shards of the weights.
"""

import functools
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from camshaft.config.schema.fsdp import FSDPOptions
from camshaft.seat import Seat


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes.

    Both `pipeline * replicas * shards * tensor` and `pipeline * data * sequence * tensor` equal `world`.
    """

    world: int
    shards: int
    sequence: int = 1
    tensor: int = 1
    pipeline: int = 1
    """Number of pipeline stages, of the torchtitan engine."""

    @classmethod
    def from_options(cls, options: FSDPOptions, world: int) -> "Layout":
        """Compute the axis sizes for `world` ranks; raise an error if the options do not fit `world`."""
        options.check_layout(world)
        sequence, tensor = options.ulysses_sequence_parallel_size, options.tensor_parallel_size
        return cls(world, options.shards(world), sequence, tensor)

    @property
    def ranks_per_stage(self) -> int:
        return self.world // self.pipeline

    @property
    def replicas(self) -> int:
        """Number of replicas of the weights. More than one replica is hybrid sharding."""
        return self.ranks_per_stage // (self.shards * self.tensor)

    @property
    def data(self) -> int:
        """Data-parallel size: the number of groups of sequence- and tensor-parallel ranks of a stage."""
        return self.ranks_per_stage // (self.sequence * self.tensor)

    def seat(self, rank: int) -> Seat:
        group, rank_in_stage = self.sequence * self.tensor, rank % self.ranks_per_stage
        collects = rank < self.ranks_per_stage and rank % group == 0
        return Seat(rank, self.world, rank_in_stage // group, self.data, collects)


@dataclass(frozen=True)
class Meshes:
    """Device meshes and process groups of a layout; None for axes of size 1."""

    layout: Layout
    weights: DeviceMesh
    """Mesh with the axis `shards`, preceded by the axis `replicas` if there are several replicas."""
    tensor: DeviceMesh | None
    sequence: dist.ProcessGroup | None
    data: dist.ProcessGroup | None


@functools.cache
def create_meshes(world: dist.ProcessGroup, layout: Layout, device_type: str) -> Meshes:
    """Create the meshes of a layout. Engines share them, because each process group costs memory and start-up time.

    They are cached by `world` too, the default process group, because it may be destroyed and created again.
    """
    sizes = {"replicas": layout.replicas, "shards": layout.shards, "tensor": layout.tensor}
    axis_sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shards"}
    mesh = init_device_mesh(device_type, tuple(axis_sizes.values()), mesh_dim_names=tuple(axis_sizes))
    weight_axes = tuple(name for name in ("replicas", "shards") if name in axis_sizes)
    shape = (layout.data, layout.sequence, layout.tensor)
    tokens = init_device_mesh(device_type, shape, mesh_dim_names=("data", "sequence", "tensor"))
    return Meshes(
        layout,
        weights=mesh[weight_axes] if len(axis_sizes) > len(weight_axes) else mesh,
        tensor=mesh["tensor"] if layout.tensor > 1 else None,
        sequence=tokens.get_group("sequence") if layout.sequence > 1 else None,
        data=tokens.get_group("data") if layout.data > 1 else None,
    )
