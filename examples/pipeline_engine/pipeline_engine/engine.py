"""The pipeline-parallel engine.

    engine = PipelineEngine(EngineConfig(model=..., optim=..., options={"pipeline_size": 2}))

`pipeline_size` neighbouring ranks hold the layers of one copy of the model and compute the same rows; the copies are
data-parallel. `TorchEngine` provides micro-batches, counts, losses, schedule and checkpoints.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from camshaft.engine import EngineCapabilities, EngineOptions, Seat, TorchEngine, load_model, seed_ranks
from camshaft.engine.base import DtypeOf, cast_weight
from camshaft.engine.optim import clip_and_step
from camshaft.engine.pipeline import weights_of_all_stages
from camshaft.errors import EngineError
from pipeline_engine.stage import PipelineStage


class PipelineOptions(EngineOptions):
    """Options of a run: `actor_rollout_ref.actor.engine_kwargs`, `critic.engine_kwargs`."""

    pipeline_size: int = Field(default=1, ge=1)
    """Stages, one rank each."""
    pipeline_micro_batches: int = Field(default=1, ge=1)
    """Parts of each micro-batch that are in different stages at the same time; 1: stages take turns."""

    def ranks_per_row(self) -> int:
        return self.pipeline_size


class PipelineEngine(TorchEngine):
    """One model, its layers split over `pipeline_size` ranks."""

    capabilities = EngineCapabilities(options=PipelineOptions, supports_lora=False)
    options: PipelineOptions
    module: PipelineStage

    def build_model(self) -> PipelineStage:
        self.join_ranks()
        self.options.check_layout(dist.get_world_size())
        mesh = mesh_of(dist.group.WORLD, self.options.pipeline_size, self.device.type)
        self.data_group, self.stage_group = mesh.get_group("data"), mesh.get_group("stage")
        full = load_model(self.config.model, self.config.dtype, "cpu", self.config.seed)
        stage = PipelineStage(full, self.stage_group, self.options.pipeline_micro_batches)
        seed_ranks(self.device, self.config.seed, dist.get_rank())
        return stage.to(self.device).eval()

    @property
    def seat(self) -> Seat:
        self.require_model()
        rank, world, size = dist.get_rank(), dist.get_world_size(), self.options.pipeline_size
        return Seat(rank, world, rank // size, world // size, collects=rank % size == 0)

    # -- one step ---------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self.module.backward()

    def clip_and_step(self) -> tuple[float, bool]:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        if gradients and self.seat.dp_size > 1:
            flat = self.sum_over_ranks(torch.cat([gradient.flatten() for gradient in gradients]))
            for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(total.view_as(gradient))
        self.module.sum_tied_gradient()
        return clip_and_step(self.optimizer, self.grad_clip, self._norm)

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm over all stages; a tied weight counts once."""
        tied = self.module.tied
        skipped = tied.grad if tied is not None and self.module.index == self.module.last else None
        square = torch.nn.utils.get_total_norm([g for g in gradients if g is not skipped]).square()
        dist.all_reduce(square, group=self.stage_group)
        return square.sqrt()

    # -- weights ----------------------------------------------------------------------------------

    def named_weights(
        self, adapter_only: bool = False, dtype_of: DtypeOf | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        if adapter_only:
            raise EngineError("no adapter: strategy=pipeline does not support LoRA")
        self.require_model()
        local = dict(self.module.hf.named_parameters())

        def full_weight(name: str) -> Tensor:
            return cast_weight(name, local[name].detach(), dtype_of).to(self.device)

        stages, templates = self.module.stage_of, self.module.templates
        return weights_of_all_stages(stages, full_weight, templates, dtype_of, self.stage_group, self.device)


@functools.cache
def mesh_of(world: dist.ProcessGroup, pipeline_size: int, device: str) -> DeviceMesh:
    """Return the process groups of a layout; the engines of one process share them."""
    shape = (world.size() // pipeline_size, pipeline_size)
    return init_device_mesh(device, shape, mesh_dim_names=("data", "stage"))
