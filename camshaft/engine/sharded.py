"""Base class of engines that shard a model over the ranks of a process group.

    class MyEngine(ShardedEngine):
        def build_model(self) -> PackedModule:
            group = self.join_ranks()           # for errors and checkpoints
            self.data_group = ...               # data-parallel ranks

It contains what such engines share: background saves, offloading and full tensors of shards. A subclass builds and
shards the model. Its options have the fields `activation_offload` and `async_save`, and those of
`param_offload`, `grad_offload` and `optimizer_offload` that the engine supports.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from camshaft.config.engine import EngineConfig
from camshaft.engine import checkpoint
from camshaft.engine.offload import Part
from camshaft.engine.torch_engine import TorchEngine
from camshaft.models.activations import offload_activations

OFFLOADS: dict[Part, str] = {"model": "param_offload", "gradients": "grad_offload", "optimizer": "optimizer_offload"}
"""Options that offload a part to host memory while the engine is idle."""


class ShardedEngine(TorchEngine):
    """One model on the ranks of the default process group."""

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        enabled = self.options.model_dump()
        self.offloaded_parts = tuple(part for part, option in OFFLOADS.items() if enabled.get(option))
        self._background_save: checkpoint.BackgroundSave | None = None

    def join_ranks(self) -> dist.ProcessGroup:
        group = super().join_ranks()
        self._background_save = checkpoint.BackgroundSave(group) if self.options.async_save else None
        return group

    # -- one step ---------------------------------------------------------------------------------

    def forward_context(self) -> AbstractContextManager[Any]:
        offload = self.options.activation_offload and torch.is_grad_enabled()
        return offload_activations(self.device) if offload else nullcontext()

    def after_inference(self) -> None:
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # exports and checkpoints require sharded parameters

    # -- weights and checkpoints ------------------------------------------------------------------

    def full_tensor(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.detach().to(self.device)
        with torch.no_grad():
            # Offloaded shards move to the device first, because the collectives of its backend reject host memory.
            on_device: Any = tensor.detach().to(self.device)
            return on_device.full_tensor()

    def _write_checkpoint(self, state: checkpoint.State, local_path: str, **options: Any) -> None:
        if self._background_save is None:
            super()._write_checkpoint(state, local_path, **options)
        else:
            self._background_save.start(state, local_path, **options)

    def wait_for_checkpoint(self) -> None:
        if self._background_save is not None:
            self._background_save.wait()
