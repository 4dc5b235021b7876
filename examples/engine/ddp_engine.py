"""A data-parallel training engine: every rank holds a copy of the model and trains on different rows.

    engine = DDPEngine(EngineConfig(model=..., optim=..., options={"bucket_mb": 50}))

`TorchEngine` provides micro-batches, losses, the schedule, checkpoints and LoRA. The engine adds the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor

from camshaft.engine import EngineCapabilities, EngineOptions, PackedModel, Seat, TorchEngine, load_model, seed_ranks


class DDPOptions(EngineOptions):
    """Options of a role in a run: `actor_rollout_ref.actor.engine_kwargs`, `critic.engine_kwargs`."""

    bucket_mb: float = Field(default=25.0, gt=0)
    """Size in MB up to which gradients are summed in one collective. Larger buckets use more memory."""
    gradient_compression: Literal["none", "bfloat16"] = "none"
    """Dtype in which ranks exchange gradients. bfloat16 halves the traffic of float32 gradients and rounds them."""


class DDPEngine(TorchEngine):
    """Replicas of one model, whose gradients are summed over all ranks."""

    capabilities = EngineCapabilities(options=DDPOptions)
    options: DDPOptions

    def build_model(self) -> PackedModel:
        self.join_ranks()
        self.data_group = dist.group.WORLD
        model = load_model(self.config.model, self.config.dtype, str(self.device), self.config.seed)
        seed_ranks(self.device, self.config.seed, dist.get_rank())  # ranks draw different dropout masks
        return model

    @property
    def seat(self) -> Seat:
        self.require_model()
        rank, world = dist.get_rank(), dist.get_world_size()
        return Seat(rank, world, dp_rank=rank, dp_size=world)

    def clip_and_step(self) -> tuple[float, bool]:
        dtype = torch.bfloat16 if self.options.gradient_compression == "bfloat16" else None
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        for bucket in buckets(gradients, self.options.bucket_mb * 1e6):
            # A sum, not a mean: each rank's loss is divided by the token count of all ranks.
            total = self.sum_over_ranks(torch.cat([gradient.flatten() for gradient in bucket]).to(dtype=dtype))
            for gradient, part in zip(bucket, total.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))
        return super().clip_and_step()


def buckets(tensors: Iterable[Tensor], limit: float) -> Iterator[list[Tensor]]:
    """Group consecutive tensors into lists of at most `limit` bytes; a larger tensor is in a separate list."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.nbytes for t in bucket) + tensor.nbytes > limit:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
