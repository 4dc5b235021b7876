"""The sharded engine: one model over many ranks with PyTorch's `fully_shard`, on gloo or NCCL.

    engine = FSDPEngine(EngineConfig(model=..., optim=..., device="cuda", options={"fsdp_size": 8}))

`options` are `FSDPOptions` in `config/schema/fsdp.py`. Steps (micro-batches, counts, losses) are in
`engine/torch_engine.py`, which all engines share.
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
from camshaft.models.activations import offloaded_activations
from camshaft.models.packed import PackedModel
from camshaft.models.sequence import SequenceSplit, check_heads, join_columns, split_columns
from camshaft.seat import Seat

SAVE_TIMEOUT = timedelta(hours=12)
"""Timeout of checkpoint collectives: ranks wait while one of them copies a checkpoint to remote storage."""


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
        self._saving: checkpoint.BackgroundSave | None = None

    def build_model(self) -> PackedModel:
        join_group(self.device)
        self.meshes = Meshes.of(Layout.of(self.options, dist.get_world_size()), self.device)
        # A separate gloo group: collectives of a background save must not mix with those of training.
        self.checkpoint_group = files = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT))
        self._saving = checkpoint.BackgroundSave(files) if self.options.async_save else None
        module = self._build_sharded(files)
        # Dropout differs between ranks with different rows or tokens; tensor-parallel ranks need the same masks.
        seed_ranks(self.device, self.config.seed, dist.get_rank() // self.meshes.layout.tensor)
        return module

    def _build_sharded(self, files: dist.ProcessGroup) -> PackedModel:
        return weights.build(self.config, self.device, self.home_device, files, self._parallelize)

    def _parallelize(self, packed: PackedModel) -> None:
        """Shard a model on the meta device: matrices, then FSDP units, then tokens."""
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
        return offloaded_activations(self.device) if offload else nullcontext()

    def after_inference(self) -> None:
        for module in parallelize.fsdp_modules(self.module):
            module.reshard()  # exports and checkpoints read the shards

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
        # With this policy FSDP moves each unit to the device for its computation and back to host memory.
        return HOST if self.options.offload_policy else self.device

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        if not self.options.offload_policy:  # which keeps everything in host memory
            super().to(device, model, optimizer)

    def full_tensor(self, tensor: Tensor) -> Tensor:
        return weights.full_tensor(tensor, self.device)

    def _save(
        self, state: checkpoint.State, local_path: str, hdfs_path: str | None, global_step: int, keep: int | None
    ) -> None:
        if self._saving is None:
            super()._save(state, local_path, hdfs_path, global_step, keep)
        else:
            self._saving.start(state, local_path, hdfs_path=hdfs_path, global_step=global_step, max_ckpt_to_keep=keep)

    def wait_for_checkpoint(self) -> None:
        if self._saving is not None:
            self._saving.wait()

    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True) -> None:
        self.wait_for_checkpoint()
        super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
