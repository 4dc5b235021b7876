"""Process groups of a Megatron engine.

    layout = Layout(tensor=2, pipeline=2, world=8)
    groups = create_groups(dist.group.WORLD, layout)      # collective over all ranks
    groups.tp, groups.pp, groups.dp                       # a `ProcessGroupCollection` of Megatron

Ranks are ordered as in Megatron: neighbors are in one tensor-parallel group, then in one context-parallel group, then
data-parallel, and the pipeline stages are farthest apart. Megatron keeps one set of groups in global variables. This
module does not set them: each engine passes its own groups to Megatron, so engines with different layouts coexist in
one process.
"""

# pyright: reportMissingImports=false

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from camshaft.config.schema.megatron import MegatronOptions
from camshaft.seat import Seat

AXES = ("pp", "dp", "cp", "tp")
"""Axes of the rank grid; the last one varies fastest."""
EXPERT_AXES = ("pp", "expert_dp", "ep")
"""Axes of the rank grid for the weights of experts, which are split over ranks of one pipeline stage."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups."""

    world: int
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1

    @classmethod
    def from_options(cls, options: MegatronOptions, world: int) -> "Layout":
        options.check_layout(world)
        return cls(
            world,
            tensor=options.tensor_model_parallel_size,
            context=options.context_parallel_size,
            pipeline=options.pipeline_model_parallel_size,
            expert=options.expert_model_parallel_size,
        )

    @property
    def data(self) -> int:
        return self.world // (self.tensor * self.context * self.pipeline)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return self.pipeline, self.data, self.context, self.tensor

    def seat(self, rank: int) -> Seat:
        """Return the seat of a rank; of all ranks that process the same rows, the first returns the results."""
        _, data, context, tensor = (int(index) for index in torch.unravel_index(torch.tensor(rank), self.shape))
        first_stage = rank < self.world // self.pipeline
        return Seat(rank, self.world, data, self.data, collects=first_stage and context == tensor == 0)

    def ranks_over(self, axes: Sequence[str]) -> list[list[int]]:
        """Return the groups of ranks that differ only in their positions along `axes`, of either grid."""
        names, shape = AXES, self.shape
        if not set(axes) <= set(AXES):
            names, shape = EXPERT_AXES, (self.pipeline, self.world // (self.pipeline * self.expert), self.expert)
        dims = [names.index(axis) for axis in axes]
        others = [dim for dim in range(len(names)) if dim not in dims]
        size = math.prod(shape[dim] for dim in dims)
        return torch.arange(self.world).view(shape).permute(*others, *dims).reshape(-1, size).tolist()


@functools.cache
def create_groups(world: dist.ProcessGroup, layout: Layout) -> ProcessGroupCollection:
    """Create the process groups of a layout on all ranks of `world`. Engines with the same layout share them."""
    created: dict[tuple[str, ...], dist.ProcessGroup] = {}

    def over(*axes: str) -> dist.ProcessGroup:
        if axes not in created:
            created[axes] = new_group(layout.ranks_over(axes))
        return created[axes]

    groups = ProcessGroupCollection(
        tp=over("tp"), cp=over("cp"), dp=over("dp"), pp=over("pp"), mp=over("pp", "tp"), dp_cp=over("dp", "cp")
    )
    groups.tp_cp, groups.tp_dp_cp = over("cp", "tp"), over("dp", "cp", "tp")
    groups.intra_dp_cp = groups.dp_cp
    groups.ep = groups.tp_ep = over("ep")
    groups.expt_tp = over()
    groups.expt_dp = groups.intra_expt_dp = over("expert_dp")
    groups.tp_ep_pp = over("pp", "ep")
    ends = [[ranks[0], ranks[-1]] if len(ranks) > 1 else ranks for ranks in layout.ranks_over(("pp",))]
    groups.embd = groups.pp if layout.pipeline <= 2 else new_group(ends)
    groups.pos_embd = None  # the models have rotary embeddings only
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # scratch memory of the tensor-parallel layers
        parallel_state._set_global_memory_buffer()
    return groups


def new_group(partition: list[list[int]]) -> dist.ProcessGroup:
    """Create the groups of `partition` and return the one that contains this rank."""
    own, _ = dist.new_subgroups_by_enumeration(partition)
    return cast(dist.ProcessGroup, own)
