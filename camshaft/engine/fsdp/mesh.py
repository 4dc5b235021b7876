"""How the ranks of one engine are laid out.

    layout = Layout.of(options, world=8)        # numbers only
    meshes = Meshes.of(layout, device)          # process groups; collective

Ranks are numbered with tensor parallelism fastest, then sequence parallelism, then data. The same ranks are
seen in two ways:

    weights:   copies x shards x tensor         FSDP gathers over `shards` and sums over `copies` and `shards`
    tokens:      data x sequence x tensor       `data` ranks have rows of their own

Sequence-parallel ranks hold different weights and the same rows, so that weights are sharded over them too.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from camshaft.config.schema.fsdp import FSDPOptions
from camshaft.errors import EngineError
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
        """An error with the sum spelled out if the sizes do not divide."""
        conflicts = [str(conflict) for conflict in options.layout_conflicts(world)]
        if conflicts:
            raise EngineError("\n".join(conflicts))
        sequence, tensor = options.ulysses_sequence_parallel_size, options.tensor_parallel_size
        return cls(world, options.shards(world), sequence, tensor)

    @property
    def copies(self) -> int:
        """Whole copies of the weights; above 1 it is HybridShard."""
        return self.world // (self.shards * self.tensor)

    @property
    def data(self) -> int:
        """Ranks, or groups of ranks, with rows of their own."""
        return self.world // (self.sequence * self.tensor)

    def seat(self, rank: int) -> Seat:
        together = self.sequence * self.tensor
        return Seat(rank, self.world, rank // together, self.data, collects=rank % together == 0)


@dataclass(frozen=True)
class Meshes:
    """The layout as process groups; None where an axis has one rank."""

    layout: Layout
    weights: DeviceMesh
    """One axis of shards, or two: copies and shards."""
    tensor: DeviceMesh | None
    sequence: dist.ProcessGroup | None
    data: dist.ProcessGroup | None

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> Meshes:
        """Engines of one process with the same layout share their groups: each costs memory and time to start."""
        return _meshes(dist.group.WORLD, layout, device.type)

    @classmethod
    def _new(cls, layout: Layout, kind: str) -> Meshes:
        sizes = {"copies": layout.copies, "shards": layout.shards, "tensor": layout.tensor}
        used = {name: size for name, size in sizes.items() if size > 1 or name == "shards"}
        whole = init_device_mesh(kind, tuple(used.values()), mesh_dim_names=tuple(used))
        axes = tuple(name for name in ("copies", "shards") if name in used)
        tokens = init_device_mesh(
            kind,
            (layout.data, layout.sequence, layout.tensor),
            mesh_dim_names=("data", "sequence", "same"),
        )
        return cls(
            layout,
            weights=whole[axes] if len(used) > len(axes) else whole,
            tensor=whole["tensor"] if layout.tensor > 1 else None,
            sequence=tokens.get_group("sequence") if layout.sequence > 1 else None,
            data=tokens.get_group("data") if layout.data > 1 else None,
        )


@functools.lru_cache(maxsize=4)
def _meshes(world: dist.ProcessGroup, layout: Layout, kind: str) -> Meshes:
    """The groups of `layout` inside `world`; after that one was ended, another `world` makes its own."""
    return Meshes._new(layout, kind)
