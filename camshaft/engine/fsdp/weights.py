"""Weights of a sharded model: loaded from a folder into shards, gathered one at a time.

    packed = build(config, device, device, group, parallelize)   # parallelize(packed) shards it on the meta device
    full_tensor(packed.hf.lm_head.weight, device)

Only rank 0 reads the folder (or initializes the weights) and holds the full model, in host memory. Every rank shards a
model on the meta device, and receives its shards from rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from camshaft.config.engine import EngineConfig
from camshaft.engine.collectives import on_rank_zero
from camshaft.models.loader import load_model, skeleton
from camshaft.models.packed import PackedModel

WRAPPED = "_fsdp_wrapped_module."
"""Part of parameter names that `FullyShardedDataParallel` inserts."""


def build(
    config: EngineConfig,
    device: torch.device,
    home: torch.device,
    group: dist.ProcessGroup,
    parallelize: Callable[[PackedModel], None],
) -> PackedModel:
    """Build the model of `config`, sharded by `parallelize`, with parameters on `home` and buffers on `device`.

    `group` exchanges errors.
    """
    full_model = read(config, group)
    packed = skeleton(config.model, config.dtype)
    parallelize(packed)
    packed.to_empty(device=home)
    packed.hf.tie_weights()
    fill(packed, full_model, device)
    return packed.eval()


def read(config: EngineConfig, group: dist.ProcessGroup) -> PackedModel | None:
    """Load the full model into host memory on rank 0; its errors are raised on every rank."""
    models: list[PackedModel] = []
    on_rank_zero(group, lambda: models.append(load_model(config.model, config.dtype, "cpu", config.seed)))
    return models[0] if models else None


def fill(packed: nn.Module, full_model: nn.Module | None, device: torch.device) -> None:
    """Send every rank its shards of `full_model`, which rank 0 has, and all buffers."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(packed, full_model.state_dict() if full_model is not None else {}, options=options)
    buffers = dict(full_model.named_buffers()) if full_model is not None else {}
    for name, buffer in list(packed.named_buffers()):
        moved = buffers[name.replace(WRAPPED, "")].to(device) if buffers else torch.empty_like(buffer, device=device)
        dist.broadcast(moved, src=0)
        owner, _, leaf = name.rpartition(".")
        setattr(packed.get_submodule(owner), leaf, moved)


def full_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Gather a sharded tensor on `device`; collective over its mesh."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        # Offloaded shards move to the device first: its collectives do not accept host memory.
        on_device: Any = tensor.detach().to(device)
        return on_device.full_tensor()
