"""Gradients over data-parallel ranks, and the update of the weights.

    data_parallel = DataParallel(module, device)            # or ShardedDataParallel: the distributed optimizer
    data_parallel.attach(optimizer)                         # an optimizer of all parameters of this rank
    data_parallel.zero_grad()                               # then backward passes
    norm, updated = data_parallel.clip_and_step(optimizer, max_norm=1.0)

Megatron accumulates the gradients of all micro-batches in one buffer per stage, and sums the buffers over ranks once
per update. With `ShardedDataParallel`, each data-parallel rank updates one part of the weights and holds the optimizer
state of this part only.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from torch import Tensor, nn

from camshaft.engine.megatron.cpu import on_device
from camshaft.engine.megatron.model import MegatronModel
from camshaft.engine.optim import clip_and_step

State = Mapping[str, Any]
"""State of one parameter in an optimizer."""


class DataParallel:
    """Gradient buffers of the stages of one rank, for an optimizer with its complete state on every rank."""

    shards_optimizer = False

    def __init__(self, module: MegatronModel, device: torch.device):
        self.module, self.groups, self.device = module, module.groups, device
        settings = DistributedDataParallelConfig(use_distributed_optimizer=self.shards_optimizer)
        with on_device(device):
            self.replicas: Any = [
                DistributedDataParallel(module.config, settings, cast(Any, stage), pg_collection=self.groups)
                for stage in module.stages
            ]
        # Megatron adds gradients to the buffer in a hook that autograd drops when a parameter moves to another device.
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(_add_to_buffer)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare a new optimizer of all parameters of this rank."""

    def zero_grad(self) -> None:
        """Clear the accumulated gradients."""
        for replica in self.replicas:
            replica.zero_grad_buffer()

    def clip_and_step(self, optimizer: torch.optim.Optimizer, max_norm: float) -> tuple[float, bool]:
        """Sum the gradients over ranks, clip their norm and apply one update, as `optim.clip_and_step` does."""
        with on_device(self.device):
            finalize_model_grads(self.replicas, pg_collection=self.groups)
            self.assign_gradients()
            try:
                norm, updated = clip_and_step(optimizer, max_norm, functools.partial(self._norm, optimizer))
            finally:
                # A parameter that keeps its part of the buffer as gradient would add it to the buffer again.
                for parameter in _parameters(optimizer):
                    parameter.grad = None
            if updated:
                self.gather_weights()
        return norm, updated

    def assign_gradients(self) -> None:
        """Set the gradients of the parameters that the optimizer updates to parts of the buffers."""
        for parameter in self.module.parameters():
            parameter.grad = cast(Any, parameter).main_grad

    def gather_weights(self) -> None:
        """Send updated weights to the ranks that did not update them."""

    def _norm(self, optimizer: torch.optim.Optimizer, _: list[Tensor]) -> Tensor:
        """Return the norm of the gradients on all ranks. A weight that several ranks hold counts once."""
        counted = [
            parameter
            for parameter in _parameters(optimizer)
            if not getattr(parameter, "shared", False)
            and param_is_not_tensor_parallel_duplicate(parameter, self.groups.tp)
        ]
        square = torch.zeros((), device=self.device)
        for is_expert, group in self.norm_groups().items():
            gradients = [p.grad for p in counted if _is_expert(p) == is_expert and p.grad is not None]
            squares = torch.nn.utils.get_total_norm(gradients).square().to(self.device)
            dist.all_reduce(squares, group=group)
            square = square + squares
        return square.sqrt()

    def norm_groups(self) -> dict[bool, dist.ProcessGroup]:
        """Return the ranks whose gradients together are those of the whole model, without repetition.

        The keys are False for most weights, and True for those of experts that are split over ranks.
        """
        experts = {True: self.groups.tp_ep_pp} if self.groups.ep.size() > 1 else {}
        return {False: self.groups.mp} | experts

    # -- optimizer state, for checkpoints ---------------------------------------------------------

    def has_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the optimizer has made an update."""
        return bool(optimizer.state)

    def state_of(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> State:
        """Return the state of a parameter; its tensors have the shape of the parameter or are scalars."""
        return optimizer.state[parameter]

    def set_state(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, state: State) -> None:
        """Set the state that `state_of` returned."""
        optimizer.state[parameter] = dict(state)


class ShardedDataParallel(DataParallel):
    """The distributed optimizer: each data-parallel rank holds a part of the optimizer state."""

    shards_optimizer = True

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the parameters of the optimizer by this rank's parts of them."""
        with on_device(self.device):
            self._shards = DistributedOptimizer(
                optimizer,
                OptimizerConfig(use_distributed_optimizer=True),
                grad_scaler=cast(Any, None),
                init_state_fn=None,
                model_chunks=self.replicas,
                per_model_buffers={index: replica.buffers for index, replica in enumerate(self.replicas)},
                data_parallel_group=self.groups.dp_cp,
                data_parallel_group_gloo=None,
                data_parallel_group_idx=0,
                distributed_optimizer_instance_id=0,
            )

    def assign_gradients(self) -> None:
        self._connect_parameters()
        self._shards.prepare_grads()

    @torch.no_grad()
    def _connect_parameters(self) -> None:
        """Make the parameters views of the buffers of weights, which a move to another device and back replaces."""
        for buffer in (buffer for replica in self.replicas for buffer in replica.buffers):
            for parameter, (start, stop, _) in buffer.param_index_map.items():
                view = buffer.param_data[start:stop].view(parameter.shape)
                if parameter.data_ptr() != view.data_ptr():
                    view.copy_(parameter)
                    parameter.data = view

    def gather_weights(self) -> None:
        for replica in self.replicas:
            replica.start_param_sync()

    def norm_groups(self) -> dict[bool, dist.ProcessGroup]:
        return {False: cast(dist.ProcessGroup, dist.group.WORLD)}

    def has_state(self, optimizer: torch.optim.Optimizer) -> bool:
        count = torch.tensor(len(optimizer.state), device=self.device)
        dist.all_reduce(count, dist.ReduceOp.MAX, group=self.groups.dp_cp)
        return bool(count)

    def state_of(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> State:
        """Gather the state of a parameter from the ranks that hold parts of it."""
        shard, positions = self._shard_of(optimizer, parameter)
        held = {} if shard is None else optimizer.state[shard]
        state: dict[str, Any] = {}
        for key, example in next(iter(optimizer.state.values())).items():
            is_scalar = example.ndim == 0
            full = example.new_zeros(() if is_scalar else parameter.numel(), device=self.device)
            if shard is not None:
                full[... if is_scalar else positions] = held[key].to(self.device)
            dist.all_reduce(full, dist.ReduceOp.MAX if is_scalar else dist.ReduceOp.SUM, group=self.groups.dp_cp)
            state[key] = full.to(example.device) if is_scalar else full.view(parameter.shape)
        return state

    def set_state(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, state: State) -> None:
        shard, positions = self._shard_of(optimizer, parameter)
        if shard is not None:
            optimizer.state[shard] = {
                key: value.flatten()[positions].clone() if value.ndim else value for key, value in state.items()
            }

    def _shard_of(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> tuple[Tensor | None, slice]:
        """Return this rank's part of a parameter and its position in the flattened parameter; None for no part."""
        if parameter not in self._shards.model_param_group_index_map:
            return None, slice(0)
        group, order = self._shards.model_param_group_index_map[parameter]
        positions = self._shards._get_model_param_range_map(parameter)["param"]
        return optimizer.param_groups[group]["params"][order], slice(positions.start, positions.end)


def _add_to_buffer(parameter: Tensor) -> None:
    """Add the gradient of one backward pass to the gradient buffer."""
    assert parameter.grad is not None
    cast(Any, parameter).main_grad.add_(parameter.grad)
    parameter.grad = None


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters that an optimizer updates."""
    groups: Iterable[Any] = optimizer.param_groups
    for group in groups:
        yield from group["params"]


def _is_expert(parameter: nn.Parameter) -> bool:
    """Return True for the weight of an expert that only some of the data-parallel ranks hold."""
    return not getattr(parameter, "allreduce", True)
