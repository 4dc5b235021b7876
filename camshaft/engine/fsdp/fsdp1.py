"""The `fsdp1` engine: shards one model with PyTorch's older wrapper, `FullyShardedDataParallel`.

    engine = FSDP1Engine(EngineConfig(model=..., optim=..., options={"fsdp_size": 2}))      # strategy=fsdp1

It derives from `FSDPEngine` and replaces the sharding. The wrapper flattens all parameters of an FSDP unit into one
tensor, and each rank keeps a slice of it. Exports and checkpoints need names and shapes, so they use copies from the
wrapper's state dict. The constructor rejects unsupported options.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

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
from camshaft.device import available_device, random_states
from camshaft.engine import checkpoint
from camshaft.engine.base import DtypeOf, cast_weight
from camshaft.engine.fsdp.engine import FSDPEngine
from camshaft.engine.fsdp.mesh import Meshes
from camshaft.engine.fsdp.parallelize import dtype_of, units_of
from camshaft.engine.fsdp.weights import broadcast_weights, load_full_model
from camshaft.engine.optim import build_optimizer, clip_and_step
from camshaft.errors import EngineError
from camshaft.models.loader import skeleton
from camshaft.models.packed import PackedModel

PREFIX = "hf."
"""Prefix of parameter names in a `PackedModel`, before the Hugging Face names."""


class FSDP1Engine(FSDPEngine):
    """One model, sharded by `FullyShardedDataParallel`."""

    capabilities = FSDP1
    copies_weights = True

    def _build_sharded(self, group: dist.ProcessGroup) -> PackedModel:
        full_model = load_full_model(self.config, group)
        packed = skeleton(self.config.model, self.config.dtype)
        # Names are recorded before wrapping, which changes them. Tied parameters count once.
        self._parameter_names = [name for name, _ in packed.hf.named_parameters()]
        buffers = dict(packed.hf.named_buffers())
        name_of = {id(parameter): name for name, parameter in packed.hf.named_parameters()}
        entries = packed.hf.state_dict(keep_vars=True).items()
        self._tied_names = {name: name_of[id(p)] for name, p in entries if name_of.get(id(p), name) != name}
        self._weight_names = [*self._parameter_names, *(name for name in packed.hf.state_dict() if name in buffers)]
        self._split_sequences(packed)
        wrapped = wrap(packed, self.meshes, self.options, self.device)
        broadcast_weights(wrapped, full_model, self.device)
        return cast(PackedModel, wrapped.eval())

    # -- one step ---------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Sum the gradients over ranks instead of averaging them, as the wrapper does by default.

        Losses are divided by counts over all ranks, so the sum of their gradients is the gradient of the mini-batch.
        """
        (loss * self.meshes.weights.size()).backward()

    def clip_and_step(self) -> tuple[float, bool]:
        return clip_and_step(self.optimizer, self.grad_clip, self._total_norm)

    def _total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of the gradients, of which each rank holds a slice."""
        squares = torch.stack([gradient.float().square().sum() for gradient in gradients]).sum()
        dist.all_reduce(squares, group=self.meshes.weights.get_group("shards"))
        return squares.sqrt()

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        self.require_model()
        if model and available_device(device).type != self.device.type:
            raise EngineError(f"strategy=fsdp1 cannot move parameters to {device}; set strategy=fsdp")
        super().to(device, model=False, optimizer=optimizer)

    # -- weights and checkpoints ------------------------------------------------------------------

    def named_weights(
        self, adapter_only: bool = False, dtype_of: DtypeOf | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        if adapter_only:
            raise EngineError(
                "the model has no adapter, because strategy=fsdp1 does not support LoRA; set strategy=fsdp"
            )
        self.require_model()
        for name, tensor in self._shards().items():
            yield name, self.full_tensor(cast_weight(name, tensor, dtype_of))

    def _shards(self) -> dict[str, Tensor]:
        """Return copies of this rank's shards of the weights, by Hugging Face names."""
        state: Any = get_model_state_dict(self.module)
        return {name: state[PREFIX + name] for name in self._weight_names}

    def _checkpoint_state(self) -> checkpoint.State:
        shards = self._shards()
        parameters, optimizer = self._mirror(shards)
        # Without this check, torch would run an optimizer step to create missing state.
        if optimizer is not None and self.optimizer.state:
            state: Any = get_optimizer_state_dict(self.module, self.optimizer)["state"]
            for name, parameter in parameters.items():
                optimizer.state[parameter] = dict(state[PREFIX + name])
        return checkpoint.State.collect(
            shards, optimizer, parameters, self._checkpoint_metadata(), random_states(self.device)
        )

    def _load_checkpoint_state(self, folder: Path) -> checkpoint.LoadedState:
        shards = self._shards()
        parameters, optimizer = self._mirror(shards)
        loaded_state = checkpoint.load_into(folder, shards, optimizer, parameters, group=self.checkpoint_group)
        weights = shards | {name: shards[parameter_name] for name, parameter_name in self._tied_names.items()}
        set_model_state_dict(self.module, {PREFIX + name: tensor for name, tensor in weights.items()})
        if optimizer is not None and optimizer.state:
            state_dict: Any = get_optimizer_state_dict(self.module, self.optimizer)
            state = {PREFIX + name: optimizer.state[p] for name, p in parameters.items()}
            set_optimizer_state_dict(self.module, self.optimizer, state_dict | {"state": state})
        return loaded_state

    def _mirror(self, shards: dict[str, Tensor]) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer | None]:
        """Return the parameters in `shards` by Hugging Face name, and an optimizer of the same class for them.

        Checkpoints save and load the state of this optimizer.
        """
        if self._optimizer is None or self.config.optim is None:
            return {}, None
        parameters = {name: nn.Parameter(shards[name]) for name in self._parameter_names}
        return parameters, build_optimizer(parameters.values(), self.config.optim)


def wrap(packed: PackedModel, meshes: Meshes, options: FSDPOptions, device: torch.device) -> nn.Module:
    """Wrap `packed`, which is on the meta device, and allocate its parameters on `device`."""
    units = set(units_of(packed, options.wrap_policy))
    reshard = options.reshard_after_forward
    if meshes.layout.replicas > 1:
        strategy = ShardingStrategy.HYBRID_SHARD if reshard else ShardingStrategy._HYBRID_SHARD_ZERO2
    else:
        strategy = ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP

    def allocate(module: nn.Module) -> None:
        module.to_empty(device=device, recurse=False)
        packed.hf.tie_weights()  # to_empty allocates separate tensors for tied layers

    dtypes = options.mixed_precision
    return FullyShardedDataParallel(
        packed,
        device_mesh=meshes.weights,
        sharding_strategy=strategy,
        auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn=units.__contains__),
        mixed_precision=MixedPrecision(dtype_of(dtypes.param_dtype), dtype_of(dtypes.reduce_dtype)),
        device_id=device,
        param_init_fn=allocate,
        forward_prefetch=options.forward_prefetch,
        use_orig_params=True,
    )
