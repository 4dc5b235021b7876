"""Layout of the ranks of one engine.

    layout = Layout.of(options, world=8)        # sizes only
    meshes = Meshes.of(layout, device)          # process groups; collective

Tensor parallelism varies fastest in rank numbers, then sequence parallelism, then data parallelism. The same ranks form
two meshes:

    weights:   copies x shards x tensor         FSDP gathers over `shards` and sums over `copies` and `shards`
    tokens:      data x sequence x tensor       `data` ranks have different rows

Sequence-parallel ranks have the same rows and different shards of the weights.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from camshaft.config.schema.fsdp import FSDPOptions
from camshaft.seat import Seat


@dataclass(frozen=True)
class Layout:
    """The sizes of the axes; `copies * shards * tensor` and `data * sequence * tensor` are both `world`."""

    world: int
    shards: int
    sequence: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, options: FSDPOptions, world: int) -> Layout:
        """Compute the sizes; the error for sizes that do not divide spells out the arithmetic."""
        options.check_layout(world)
        sequence, tensor = options.ulysses_sequence_parallel_size, options.tensor_parallel_size
        return cls(world, options.shards(world), sequence, tensor)

    @property
    def copies(self) -> int:
        """Number of copies of the weights; above 1 it is HybridShard."""
        return self.world // (self.shards * self.tensor)

    @property
    def data(self) -> int:
        """Number of data-parallel ranks, each a group of sequence- and tensor-parallel ranks."""
        return self.world // (self.sequence * self.tensor)

    def seat(self, rank: int) -> Seat:
        group = self.sequence * self.tensor
        return Seat(rank, self.world, rank // group, self.data, collects=rank % group == 0)


@dataclass(frozen=True)
class Meshes:
    """Process groups of a layout; None for axes of one rank."""

    layout: Layout
    weights: DeviceMesh
    """One axis of shards, or two: copies and shards."""
    tensor: DeviceMesh | None
    sequence: dist.ProcessGroup | None
    data: dist.ProcessGroup | None

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> Meshes:
        """Create the meshes; engines of one process share them, since each group costs memory and time to start."""
        return _meshes(dist.group.WORLD, layout, device.type)

    @classmethod
    def _new(cls, layout: Layout, kind: str) -> Meshes:
        sizes = {"copies": layout.copies, "shards": layout.shards, "tensor": layout.tensor}
        used = {name: size for name, size in sizes.items() if size > 1 or name == "shards"}
        mesh = init_device_mesh(kind, tuple(used.values()), mesh_dim_names=tuple(used))
        axes = tuple(name for name in ("copies", "shards") if name in used)
        tokens = init_device_mesh(
            kind,
            (layout.data, layout.sequence, layout.tensor),
            mesh_dim_names=("data", "sequence", "same"),
        )
        return cls(
            layout,
            weights=mesh[axes] if len(used) > len(axes) else mesh,
            tensor=mesh["tensor"] if layout.tensor > 1 else None,
            sequence=tokens.get_group("sequence") if layout.sequence > 1 else None,
            data=tokens.get_group("data") if layout.data > 1 else None,
        )


@functools.lru_cache(maxsize=4)
def _meshes(world: dist.ProcessGroup, layout: Layout, kind: str) -> Meshes:
    """Create the groups of `layout`; `world` is part of the cache key because it may be destroyed and created again."""
    return Meshes._new(layout, kind)
