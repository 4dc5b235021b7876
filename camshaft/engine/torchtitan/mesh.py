"""Assignment of an engine's ranks to pipeline, data, sequence and tensor parallelism.

    layout = layout_of(options, world=8)                # axis sizes only
    meshes = Meshes.create(layout, device)              # process groups; a collective

Consecutive ranks are tensor-parallel, then sequence-parallel, then data-parallel; the stages of a pipeline are farthest
apart. torchtitan builds the meshes of the weights (`ParallelDims`): pipeline x replicas x shards x tensor.
Sequence-parallel ranks hold different shards of the weights.
"""

# pyright: reportMissingImports=false
import functools
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.utils import set_spmd_backend

from camshaft.config.schema.torchtitan import TorchtitanOptions
from camshaft.engine.fsdp.mesh import Layout

SPMD_BACKEND = "partial_dtensor"
"""Represents only tensor-parallel weights as DTensors before FSDP. FSDP of torch 2.13 supports no other backend."""


def layout_of(options: TorchtitanOptions, world: int) -> Layout:
    """Compute the axis sizes for `world` ranks; raise an error if the options do not fit `world`."""
    options.check_layout(world)
    sequence, tensor = options.ulysses_sequence_parallel_size, options.tensor_parallel_size
    return Layout(world, options.shards(world), sequence, tensor, options.pipeline_parallel_degree)


@dataclass(frozen=True)
class Meshes:
    """Device meshes and process groups of a layout; None for axes of size 1."""

    layout: Layout
    dims: ParallelDims
    """Meshes of the weights, as torchtitan names them."""
    pipeline: dist.ProcessGroup | None
    end_stages: dist.ProcessGroup | None
    """Group of the first and last stage, which share tied weights; None on other stages or without a pipeline."""
    sequence: dist.ProcessGroup | None
    data: dist.ProcessGroup | None

    @classmethod
    def create(cls, layout: Layout, device: torch.device) -> "Meshes":
        """Create the meshes, or return those that an earlier engine of this process created for the same layout.

        Engines share meshes because each process group costs memory and start-up time.
        """
        set_spmd_backend(SPMD_BACKEND)
        return _create_meshes(dist.group.WORLD, layout, device.type)


@functools.cache
def _create_meshes(world: dist.ProcessGroup, layout: Layout, device_type: str) -> Meshes:
    """Create the meshes of `layout`, cached by `world` too, because it may be destroyed and created again."""
    sizes = {"pp": layout.pipeline, "dp_replicate": layout.replicas, "dp_shard": layout.shards, "tp": layout.tensor}
    dims = ParallelDims(**sizes, cp=1, ep=1, world_size=layout.world, spmd_backend=SPMD_BACKEND)
    # torchtitan selects the device type when it is imported, and assumes CUDA on a machine without an accelerator.
    default, parallel_dims.device_type = parallel_dims.device_type, device_type
    try:
        dims.build_mesh()
    finally:
        parallel_dims.device_type = default
    shape = (layout.pipeline, layout.data, layout.sequence, layout.tensor)
    tokens = init_device_mesh(device_type, shape, mesh_dim_names=("pipeline", "data", "sequence", "tensor"))
    pipeline = ends = tokens.get_group("pipeline") if layout.pipeline > 1 else None
    if layout.pipeline > 2:
        last = layout.world - layout.ranks_per_stage
        ranks_of_ends = [[rank, last + rank] for rank in range(layout.ranks_per_stage)]
        ends = cast("dist.ProcessGroup | None", dist.new_subgroups_by_enumeration(ranks_of_ends)[0])
    return Meshes(
        layout,
        dims,
        pipeline=pipeline,
        end_stages=ends,
        sequence=tokens.get_group("sequence") if layout.sequence > 1 else None,
        data=tokens.get_group("data") if layout.data > 1 else None,
    )
