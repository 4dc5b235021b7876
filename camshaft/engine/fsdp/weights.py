"""Loads the weights of a model folder into a sharded model.

    full_model = load_full_model(config, group)
    packed = allocate(config, device, parallelize)      # parallelize(packed) shards it on the meta device
    broadcast_weights(packed, full_model, device)

Only rank 0 reads the folder (or initializes the weights) and holds the full model in host memory. Every rank builds and
shards the model on the meta device, allocates its shards, and receives their values from rank 0.
"""

from collections.abc import Callable, Iterator, Mapping

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
"""Prefix that `FullyShardedDataParallel` inserts into parameter names."""


def allocate(
    config: EngineConfig, home_device: torch.device, parallelize: Callable[[PackedModel], None]
) -> PackedModel:
    """Build the model of `config` and shard it with `parallelize`. Its weights, on `home_device`, are uninitialized."""
    packed = skeleton(config.model, config.dtype)
    parallelize(packed)
    packed.to_empty(device=home_device)
    packed.hf.tie_weights()
    return packed


def load_full_model(config: EngineConfig, group: dist.ProcessGroup) -> PackedModel | None:
    """Load the full model into host memory on rank 0; return None on other ranks. Errors are raised on every rank."""
    models: list[PackedModel] = []
    on_rank_zero(group, lambda: models.append(load_model(config.model, config.dtype, "cpu", config.seed)))
    return models[0] if models else None


def broadcast_each(
    templates: Mapping[str, Tensor], full_model: PackedModel | None, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of rank 0's `full_model` on every rank, one at a time, in the order of `templates`."""
    weights = {} if full_model is None else dict(full_model.weights())
    for name, template in templates.items():
        full = weights[name].to(device) if weights else torch.empty_like(template, device=device)
        dist.broadcast(full, src=0)
        yield name, full


def broadcast_weights(packed: nn.Module, full_model: nn.Module | None, device: torch.device) -> None:
    """Copy the weights and buffers of rank 0's `full_model` into the sharded model `packed` on every rank."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(packed, full_model.state_dict() if full_model is not None else {}, options=options)
    buffers = dict(full_model.named_buffers()) if full_model is not None else {}
    for name, old_buffer in list(packed.named_buffers()):
        source = old_buffer if full_model is None else buffers[name.replace(WRAPPED, "")]
        if isinstance(source, DTensor):  # a replicated buffer of a tensor-parallel layer
            source = source.to_local()
        buffer = torch.empty_like(source, device=device) if full_model is None else source.to(device)
        dist.broadcast(buffer, src=0)
        path, _, leaf = name.rpartition(".")
        owner = packed.get_submodule(path)
        owner.register_buffer(leaf, buffer, persistent=leaf not in owner._non_persistent_buffers_set)
