"""The `fsdp` engine: shards one model over all ranks with PyTorch's `fully_shard`, on gloo or NCCL.

    engine = FSDPEngine(EngineConfig(model=..., optim=..., device="cuda", options={"fsdp_size": 8}))

`options` are described by `FSDPOptions` in `config/schema/fsdp.py`. The training step (micro-batches, counts, losses)
is inherited from `TorchEngine` in `engine/torch_engine.py`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from camshaft.config.backends import FSDP
from camshaft.config.engine import EngineConfig
from camshaft.config.schema.fsdp import FSDPOptions
from camshaft.dataproto import DataProto
from camshaft.device import join_group, seed_ranks
from camshaft.engine import checkpoint
from camshaft.engine.fsdp import parallelize, weights
from camshaft.engine.fsdp.mesh import Layout, Meshes
from camshaft.engine.fsdp.tensor_parallel import apply_tensor_parallel
from camshaft.engine.offload import HOST, Part
from camshaft.engine.torch_engine import TorchEngine
from camshaft.models.activations import offload_activations
from camshaft.models.packed import PackedModel
from camshaft.models.sequence import SequenceSplit, check_heads, join_columns, split_columns
from camshaft.seat import Seat

SAVE_TIMEOUT = timedelta(hours=12)
"""Timeout of checkpoint collectives. It is long because ranks wait while rank 0 copies to remote storage."""


class FSDPEngine(TorchEngine):
    """One model, sharded over the ranks of the default process group."""

    capabilities = FSDP
    options: FSDPOptions

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        offloads: dict[Part, bool] = {
            "model": self.options.param_offload,
            "gradients": self.options.grad_offload,
            "optimizer": self.options.optimizer_offload,
        }
        self.offloaded_parts = tuple(part for part in offloads if offloads[part])
        self._background_save: checkpoint.BackgroundSave | None = None

    def build_model(self) -> PackedModel:
        join_group(self.device)
        self.meshes = Meshes.create(Layout.from_options(self.options, dist.get_world_size()), self.device)
        # Collectives of a background save would interleave with those of training, so checkpoints use another group.
        self.checkpoint_group = group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT))
        self._background_save = checkpoint.BackgroundSave(group) if self.options.async_save else None
        module = self._build_sharded(group)
        # Tensor-parallel ranks need equal dropout masks. All other ranks process different rows or tokens.
        seed_ranks(self.device, self.config.seed, dist.get_rank() // self.meshes.layout.tensor)
        return module

    def _build_sharded(self, group: dist.ProcessGroup) -> PackedModel:
        """Build the sharded model with its weights; `group` exchanges errors."""
        return weights.build(self.config, self.device, self.home_device, group, self._parallelize)

    def _parallelize(self, packed: PackedModel) -> None:
        """Apply tensor parallelism, then FSDP, then sequence parallelism to a model on the meta device."""
        meshes = self.meshes
        if meshes.tensor is not None:
            apply_tensor_parallel(packed, meshes.tensor)
        parallelize.shard(packed, meshes.weights, self.options, self.device)
        if meshes.sequence is not None:
            check_heads(packed.hf.config, meshes.layout.sequence)
            packed.sequence = SequenceSplit(meshes.sequence, self.device)

    @property
    def seat(self) -> Seat:
        return self.meshes.layout.seat(dist.get_rank())

    # -- one step ---------------------------------------------------------------------------------

    def forward_context(self) -> AbstractContextManager[Any]:
        offload = self.options.activation_offload and torch.is_grad_enabled()
        return offload_activations(self.device) if offload else nullcontext()

    def after_inference(self) -> None:
        for module in parallelize.fsdp_modules(self.module):
            module.reshard()  # exports and checkpoints require sharded parameters

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        if self.meshes.data is not None:
            dist.all_reduce(tensor, group=self.meshes.data)
        return tensor

    def max_over_ranks(self, count: int) -> int:
        if self.meshes.data is None:
            return count
        maximum = torch.tensor(count, device=self.device)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self.meshes.data)
        return int(maximum)

    def shard_data(self, data: DataProto) -> DataProto:
        split = self.module.sequence
        return data if split is None else split_columns(data, split)

    def unshard_data(self, data: DataProto) -> DataProto:
        split = self.module.sequence
        return data if split is None else join_columns(data, split)

    # -- weights and checkpoints ------------------------------------------------------------------

    @property
    def home_device(self) -> torch.device:
        # With the offload policy, FSDP copies each unit to the device for its computation and keeps it in host memory.
        return HOST if self.options.offload_policy else self.device

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        if not self.options.offload_policy:  # with the offload policy, all parts stay in host memory
            super().to(device, model, optimizer)

    def full_tensor(self, tensor: Tensor) -> Tensor:
        return weights.full_tensor(tensor, self.device)

    def _save(
        self, state: checkpoint.State, local_path: str, hdfs_path: str | None, global_step: int, keep: int | None
    ) -> None:
        if self._background_save is None:
            super()._save(state, local_path, hdfs_path, global_step, keep)
        else:
            self._background_save.start(
                state, local_path, hdfs_path=hdfs_path, global_step=global_step, max_ckpt_to_keep=keep
            )

    def wait_for_checkpoint(self) -> None:
        if self._background_save is not None:
            self._background_save.wait()

    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True) -> None:
        self.wait_for_checkpoint()
        super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
