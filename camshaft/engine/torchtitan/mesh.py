"""Assignment of an engine's ranks to data, sequence and tensor parallelism.

    layout = Layout.from_options(options, world=8)      # axis sizes only
    meshes = Meshes.create(layout, device)              # process groups; a collective

Consecutive ranks are tensor-parallel, then sequence-parallel, then data-parallel. torchtitan builds the meshes of the
weights (`ParallelDims`): replicas x shards x tensor. Sequence-parallel ranks hold different shards of the weights.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.utils import set_spmd_backend

from camshaft.config.schema.torchtitan import TorchtitanOptions
from camshaft.seat import Seat

SPMD_BACKEND = "partial_dtensor"
"""Represents only tensor-parallel weights as DTensors before FSDP. FSDP of torch 2.13 supports no other backend."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes. The product of `replicas`, `shards` and `tensor` is the world size."""

    replicas: int
    shards: int
    sequence: int
    tensor: int

    @classmethod
    def from_options(cls, options: TorchtitanOptions, world: int) -> Layout:
        """Compute the axis sizes for `world` ranks; raise an error if the options do not fit `world`."""
        options.check_layout(world)
        sequence, tensor = options.ulysses_sequence_parallel_size, options.tensor_parallel_size
        return cls(options.data_parallel_replicate_degree, options.shards(world), sequence, tensor)

    @property
    def data(self) -> int:
        """Data-parallel size: the number of groups of sequence- and tensor-parallel ranks."""
        return self.replicas * self.shards // self.sequence

    def seat(self, rank: int) -> Seat:
        group = self.sequence * self.tensor
        return Seat(rank, self.data * group, rank // group, self.data, collects=rank % group == 0)


@dataclass(frozen=True)
class Meshes:
    """Device meshes and process groups of a layout; None for axes of size 1."""

    layout: Layout
    dims: ParallelDims
    """Meshes of the weights, as torchtitan names them."""
    sequence: dist.ProcessGroup | None
    data: dist.ProcessGroup | None

    @classmethod
    def create(cls, layout: Layout, device: torch.device) -> Meshes:
        """Create the meshes, or return those that an earlier engine of this process created for the same layout.

        Engines share meshes because each process group costs memory and start-up time.
        """
        set_spmd_backend(SPMD_BACKEND)
        return _create_meshes(dist.group.WORLD, layout, device.type)

    @classmethod
    def _new(cls, layout: Layout, device_type: str) -> Meshes:
        sizes = {"dp_replicate": layout.replicas, "dp_shard": layout.shards, "tp": layout.tensor}
        world = layout.replicas * layout.shards * layout.tensor
        dims = ParallelDims(**sizes, cp=1, pp=1, ep=1, world_size=world, spmd_backend=SPMD_BACKEND)
        with _device_type_of_torchtitan(device_type):
            dims.build_mesh()
        shape = (layout.data, layout.sequence, layout.tensor)
        tokens = init_device_mesh(device_type, shape, mesh_dim_names=("data", "sequence", "tensor"))
        return cls(
            layout,
            dims,
            sequence=tokens.get_group("sequence") if layout.sequence > 1 else None,
            data=tokens.get_group("data") if layout.data > 1 else None,
        )


@functools.lru_cache(maxsize=4)
def _create_meshes(world: dist.ProcessGroup, layout: Layout, device_type: str) -> Meshes:
    """Create the meshes of `layout`, cached by `world` too, because it may be destroyed and created again."""
    return Meshes._new(layout, device_type)


@contextlib.contextmanager
def _device_type_of_torchtitan(device_type: str) -> Iterator[None]:
    """Build meshes of torchtitan on `device_type`.

    torchtitan selects the device type when it is imported, and assumes CUDA on a machine without an accelerator.
    """
    default = parallel_dims.device_type
    parallel_dims.device_type = device_type
    try:
        yield
    finally:
        parallel_dims.device_type = default
