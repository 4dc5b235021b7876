"""The `torchtitan` engine: trains model definitions of torchtitan with its parallelism, on gloo or NCCL.

    engine = TorchtitanEngine(EngineConfig(model=..., optim=..., options={"tensor_parallel_size": 2}))

`options` are described by `TorchtitanOptions` in `config/schema/torchtitan.py`. torchtitan defines the model, its
tensor parallelism, FSDP units and activation checkpointing. Optimizer, checkpoints, micro-batches and losses are those
of the other engines (`ShardedEngine`).
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from camshaft.config.backends import TORCHTITAN
from camshaft.config.engine import EngineConfig
from camshaft.config.schema.torchtitan import TorchtitanOptions
from camshaft.device import seed_ranks
from camshaft.engine.sharded import ShardedEngine
from camshaft.engine.torchtitan import weights
from camshaft.engine.torchtitan.mesh import Layout, Meshes
from camshaft.engine.torchtitan.model import TitanModel
from camshaft.errors import EngineError
from camshaft.seat import Seat


class TorchtitanEngine(ShardedEngine):
    """One model of torchtitan on the ranks of the default process group."""

    capabilities = TORCHTITAN
    options: TorchtitanOptions
    module: TitanModel  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        if config.dtype == "float64":
            raise EngineError("strategy=torchtitan does not support dtype=float64; set dtype=float32, or strategy=fsdp")

    def build_model(self) -> TitanModel:
        group = self.join_ranks()
        self.meshes = Meshes.create(Layout.from_options(self.options, dist.get_world_size()), self.device)
        self.data_group = self.meshes.data
        module = weights.build(self.config, self.options, self.meshes, self.device, group)
        # Tensor-parallel ranks need equal dropout masks. All other ranks process different rows or tokens.
        seed_ranks(self.device, self.config.seed, dist.get_rank() // self.meshes.layout.tensor)
        return module

    def after_inference(self) -> None:
        # The output layer runs after the decoder's forward pass, so its FSDP unit stays in the state of a forward pass.
        # In this state, `reshard` has an effect only on units that reshard after a forward pass.
        head = self.module.decoder.lm_head
        if isinstance(head, FSDPModule):
            head.set_reshard_after_forward(True, recurse=False)
        super().after_inference()
        if isinstance(head, FSDPModule):
            head.set_reshard_after_forward(False, recurse=False)

    @property
    def seat(self) -> Seat:
        return self.meshes.layout.seat(dist.get_rank())
