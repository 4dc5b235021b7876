"""The sharded engine on the older wrapper, `FullyShardedDataParallel`.

    engine = FSDP1Engine(EngineConfig(model=..., optim=..., options={"fsdp_size": 2}))      # strategy=fsdp1

It derives from `FSDPEngine` and differs in sharding. The wrapper flattens the parameters of a unit into one tensor and
keeps a slice of it; exports and checkpoints use copies with names and shapes, made by its state dict (`_Mirror`).
Unsupported options are rejected at construction.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from camshaft.config.backends import FSDP1
from camshaft.config.schema.fsdp import FSDPOptions
from camshaft.device import random_states
from camshaft.engine import checkpoint
from camshaft.engine.fsdp.engine import FSDPEngine
from camshaft.engine.fsdp.mesh import Meshes
from camshaft.engine.fsdp.parallelize import dtype_of, units_of
from camshaft.engine.fsdp.weights import fill, read
from camshaft.engine.optim import build_optimizer, clip_and_step
from camshaft.errors import EngineError
from camshaft.models.loader import skeleton
from camshaft.models.packed import PackedModel
from camshaft.models.sequence import SequenceSplit, check_heads

PREFIX = "hf."
"""Prefix of a `PackedModel` before the Hugging Face names."""


class FSDP1Engine(FSDPEngine):
    """One model, sharded by `FullyShardedDataParallel`."""

    capabilities = FSDP1

    def _build_sharded(self, files: dist.ProcessGroup) -> PackedModel:
        config, meshes = self.config, self.meshes
        full_model = read(config, files)
        packed = skeleton(config.model, config.dtype)
        # Without tied duplicates; the wrapper changes names and shapes.
        self._trained = [name for name, _ in packed.hf.named_parameters()]
        buffers = dict(packed.hf.named_buffers())
        first = {id(parameter): name for name, parameter in packed.hf.named_parameters()}
        every = packed.hf.state_dict(keep_vars=True).items()
        self._tied = {name: first[id(p)] for name, p in every if first.get(id(p), name) != name}
        self._names = [*self._trained, *(name for name in packed.hf.state_dict() if name in buffers)]
        if meshes.sequence is not None:
            check_heads(packed.hf.config, meshes.layout.sequence)
            packed.sequence = SequenceSplit(meshes.sequence, self.device)
        wrapped = wrap(packed, meshes, self.options, self.device)
        fill(wrapped, full_model, self.device)
        return cast(PackedModel, wrapped.eval())

    # -- one step ---------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Undo the wrapper's average over ranks: the loss is a share of the mini-batch's loss already."""
        (loss * self.meshes.weights.size()).backward()

    def clip_and_step(self) -> tuple[float, bool]:
        return clip_and_step(self.optimizer, self.config.grad_clip, self._norm)

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm over the slices of all ranks."""
        squares = torch.stack([gradient.float().square().sum() for gradient in gradients]).sum()
        dist.all_reduce(squares, group=self.meshes.weights.get_group("shards"))
        return squares.sqrt()

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        if model and torch.device(device).type != self.device.type:
            raise EngineError(f"strategy=fsdp1 cannot move its parameters to {device}; set strategy=fsdp")
        super().to(device, model=False, optimizer=optimizer)

    # -- weights and checkpoints ------------------------------------------------------------------

    def named_weights(self, adapter_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        if adapter_only:
            raise EngineError("no adapter: strategy=fsdp1 does not support lora")
        for name, tensor in self._shards().items():
            yield name, self.full_tensor(tensor)

    def _shards(self) -> dict[str, Tensor]:
        """Copy this rank's shards of the weights, by Hugging Face names."""
        state: Any = get_model_state_dict(self.module)
        return {name: state[PREFIX + name] for name in self._names}

    def _state(self) -> checkpoint.State:
        shards = self._shards()
        mirror = self._mirror(shards)
        # torch would take an optimizer step to create missing state.
        if mirror.optimizer is not None and self.optimizer.state:
            state: Any = get_optimizer_state_dict(self.module, self.optimizer)["state"]
            for name, parameter in mirror.parameters.items():
                mirror.optimizer.state[parameter] = dict(state[PREFIX + name])
        random = random_states(self.device)
        return checkpoint.State.of(shards, mirror.optimizer, mirror.parameters, self._metadata(), random)

    def _load_state(self, folder: Path) -> checkpoint.Loaded:
        shards = self._shards()
        mirror = self._mirror(shards)
        loaded = checkpoint.load_into(folder, shards, mirror.optimizer, mirror.parameters, group=self.checkpoint_group)
        weights = shards | {name: shards[first] for name, first in self._tied.items()}
        set_model_state_dict(self.module, {PREFIX + name: tensor for name, tensor in weights.items()})
        if mirror.optimizer is not None and mirror.optimizer.state:
            current: Any = get_optimizer_state_dict(self.module, self.optimizer)
            state = {PREFIX + name: mirror.optimizer.state[p] for name, p in mirror.parameters.items()}
            set_optimizer_state_dict(self.module, self.optimizer, current | {"state": state})
        return loaded

    def _mirror(self, shards: dict[str, Tensor]) -> _Mirror:
        """Build an optimizer of the same class over `shards`, for a checkpoint to save or load."""
        if self._optimizer is None or self.config.optim is None:
            return _Mirror({}, None)
        parameters = {name: nn.Parameter(shards[name]) for name in self._trained}
        return _Mirror(parameters, build_optimizer(parameters.values(), self.config.optim))


class _Mirror(NamedTuple):
    """Named parameters in place of those that the wrapper has flattened, and their optimizer."""

    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer | None


def wrap(packed: PackedModel, meshes: Meshes, options: FSDPOptions, device: torch.device) -> nn.Module:
    """Wrap `packed`, which is on the meta device."""
    units = set(units_of(packed, options.wrap_policy))
    keep = not options.reshard_after_forward
    if meshes.layout.copies > 1:
        strategy = ShardingStrategy._HYBRID_SHARD_ZERO2 if keep else ShardingStrategy.HYBRID_SHARD
    else:
        strategy = ShardingStrategy.SHARD_GRAD_OP if keep else ShardingStrategy.FULL_SHARD

    def materialise(module: nn.Module) -> None:
        module.to_empty(device=device, recurse=False)
        packed.hf.tie_weights()  # to_empty gives one of two tied layers a new tensor

    dtypes = options.mixed_precision
    return FullyShardedDataParallel(
        packed,
        device_mesh=meshes.weights,
        sharding_strategy=strategy,
        auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn=units.__contains__),
        mixed_precision=MixedPrecision(dtype_of(dtypes.param_dtype), dtype_of(dtypes.reduce_dtype)),
        device_id=device,
        param_init_fn=materialise,
        forward_prefetch=options.forward_prefetch,
        use_orig_params=True,
    )
