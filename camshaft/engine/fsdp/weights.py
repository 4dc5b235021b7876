"""Weights of a sharded model: from a folder into shards, and whole again one at a time.

    packed = build(config, device, device, group, arrange)   # arrange(packed) shards it while it has no storage
    whole(packed.hf.lm_head.weight, device)

Rank 0 alone reads the folder (or draws the weights) and holds the whole model, in host memory; the others have a
model without storage, shard it, and receive their parts.
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
"""What the older wrapper puts into the names of what it wraps."""


def build(
    config: EngineConfig,
    device: torch.device,
    home: torch.device,
    group: dist.ProcessGroup,
    arrange: Callable[[PackedModel], None],
) -> PackedModel:
    """The model that `config` describes, sharded by `arrange`, with its weights in `home`.

    It computes on `device`, where its buffers are; `group` moves what is not tensors.
    """
    whole = read(config, group)
    packed = skeleton(config.model, config.dtype)
    arrange(packed)
    packed.to_empty(device=home)
    packed.hf.tie_weights()
    fill(packed, whole, device)
    return packed.eval()


def read(config: EngineConfig, group: dist.ProcessGroup) -> PackedModel | None:
    """The whole model in host memory, on rank 0; what goes wrong there is raised on every rank."""
    found: list[PackedModel] = []
    on_rank_zero(group, lambda: found.append(load_model(config.model, config.dtype, "cpu", config.seed)))
    return found[0] if found else None


def fill(packed: nn.Module, whole: nn.Module | None, device: torch.device) -> None:
    """Give every rank its part of what rank 0 has in `whole`; buffers that no file has are given too."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(packed, whole.state_dict() if whole is not None else {}, options=options)
    given = dict(whole.named_buffers()) if whole is not None else {}
    for name, buffer in list(packed.named_buffers()):
        moved = given[name.replace(WRAPPED, "")].to(device) if given else torch.empty_like(buffer, device=device)
        dist.broadcast(moved, src=0)
        owner, _, leaf = name.rpartition(".")
        setattr(packed.get_submodule(owner), leaf, moved)


def whole(tensor: Tensor, device: torch.device) -> Tensor:
    """All of a sharded tensor, on `device`; collective over its mesh."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        # Shards that wait in host memory cannot be exchanged by the device's own collectives.
        there: Any = tensor.detach().to(device)
        return there.full_tensor()
