"""Gradients over data-parallel ranks, master weights, and the update of the weights.

    data_parallel = DataParallel(module, device, torch.float32)     # or ShardedDataParallel: the distributed optimizer
    data_parallel.attach(torch.optim.AdamW(data_parallel.optimizer_parameters.values()))
    data_parallel.zero_grad()                                       # then backward passes
    norm, updated = data_parallel.clip_and_step(max_norm=1.0)

Megatron accumulates the gradients of all micro-batches in one buffer per stage, and sums the buffers over ranks once
per update. With `ShardedDataParallel`, each data-parallel rank updates one part of the weights and holds the optimizer
state of this part only.

If the model computes in a lower precision than that of the weights, the optimizer updates master weights, which are
rounded to the parameters after each update. Gradients are then accumulated and summed in float32.
"""

# pyright: reportMissingImports=false

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from camshaft.engine.megatron.weights import WeightStore
from camshaft.engine.optim import clip_and_step

State = Mapping[str, Any]
"""State of one parameter in an optimizer."""


class DataParallel(WeightStore):
    """Gradient buffers of the stages of one rank, for an optimizer with its complete state on every rank."""

    shards_optimizer = False
    optimizer: torch.optim.Optimizer

    def __init__(self, module: MegatronModel, device: torch.device, dtype: torch.dtype):
        super().__init__(dtype)
        self.module, self.groups, self.device = module, module.groups, device
        self.has_masters = dtype != module.config.params_dtype
        """True if the optimizer updates master weights, which have the type `dtype`."""
        settings = DistributedDataParallelConfig(
            use_distributed_optimizer=self.shards_optimizer, grad_reduce_in_fp32=self.has_masters
        )
        if module.config.tensor_model_parallel_size > 1:
            _mark_experts(module)
        with on_device(device):
            self.replicas: Any = [
                DistributedDataParallel(module.config, settings, cast(Any, stage), pg_collection=self.groups)
                for stage in module.stages
            ]
        # Megatron adds gradients to the buffer in a hook that autograd drops when a parameter moves to another device.
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(_add_to_buffer)
        if self.has_masters and not self.shards_optimizer:
            module.masters = nn.ParameterList(_master(parameter, dtype) for parameter in module.stages.parameters())
        parameters = list(module.stages.parameters())
        self.optimizer_parameters = dict(zip(parameters, module.masters or parameters, strict=True))
        """Maps each parameter to the one that the optimizer updates: its master weight, or itself if it has none."""

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the optimizer, which updates `optimizer_parameters`."""
        self.optimizer = optimizer

    def zero_grad(self) -> None:
        """Clear the accumulated gradients."""
        for replica in self.replicas:
            replica.zero_grad_buffer()

    def clip_and_step(self, max_norm: float) -> tuple[float, bool]:
        """Sum the gradients over ranks, clip their norm and apply one update, as `optim.clip_and_step` does."""
        with on_device(self.device):
            finalize_model_grads(self.replicas, pg_collection=self.groups)
            self.assign_gradients()
            try:
                norm, updated = clip_and_step(self.optimizer, max_norm, self._norm)
            finally:
                # A parameter that keeps its part of the buffer as gradient would add it to the buffer again.
                for parameter in self._updated_parameters():
                    parameter.grad = None
            if updated:
                self.sync_parameters()
        return norm, updated

    def assign_gradients(self) -> None:
        """Set the gradients of the parameters that the optimizer updates to parts of the buffers."""
        for parameter, owner in self.optimizer_parameters.items():
            owner.grad = cast(Any, parameter).main_grad

    @torch.no_grad()
    def sync_parameters(self) -> None:
        """Round master weights to parameters, and send updated weights to the ranks that did not update them."""
        if self.has_masters:
            for parameter, master in self.optimizer_parameters.items():
                parameter.copy_(master)

    def _updated_parameters(self) -> Iterator[nn.Parameter]:
        groups: Iterable[Any] = self.optimizer.param_groups
        for group in groups:
            yield from group["params"]

    def _norm(self, _: list[Tensor]) -> Tensor:
        """Return the norm of the gradients on all ranks. A weight that several ranks hold counts once."""
        counted = [
            parameter
            for parameter in self._updated_parameters()
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

        The keys are False for most weights, and True for those of experts.
        """
        experts = {True: self.groups.tp_ep_pp} if self.module.config.num_moe_experts else {}
        return {False: self.groups.mp} | experts

    # -- weights and optimizer state, for exports and checkpoints ---------------------------------

    def weight_of(self, parameter: nn.Parameter) -> Tensor:
        return self.optimizer_parameters[parameter].detach()

    @torch.no_grad()
    def set_weight(self, parameter: nn.Parameter, weight: Tensor) -> None:
        self.optimizer_parameters[parameter].copy_(weight)
        parameter.copy_(weight)

    def has_state(self) -> bool:
        """Return True if the optimizer has made an update."""
        return bool(self.optimizer.state)

    def state_of(self, parameter: nn.Parameter) -> State:
        """Return the state of a parameter; its tensors have the shape of the parameter or are scalars."""
        return self.optimizer.state[self.optimizer_parameters[parameter]]

    def set_state(self, parameter: nn.Parameter, state: State) -> None:
        """Set the state that `state_of` returned."""
        self.optimizer.state[self.optimizer_parameters[parameter]] = dict(state)


class ShardedDataParallel(DataParallel):
    """The distributed optimizer: each data-parallel rank holds a part of the master weights and optimizer state."""

    shards_optimizer = True

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the optimizer, and replace its parameters with this rank's parts of them."""
        super().attach(optimizer)
        with on_device(self.device):
            self._shards = DistributedOptimizer(
                optimizer,
                OptimizerConfig(use_distributed_optimizer=True),
                grad_scaler=cast(Any, None),
                init_state_fn=None,
                model_chunks=self.replicas,
                per_model_buffers=dict(enumerate(self._buffers())),
                data_parallel_group=self.groups.dp_cp,
                data_parallel_group_gloo=None,
                data_parallel_group_idx=0,
                distributed_optimizer_instance_id=0,
            )

    def assign_gradients(self) -> None:
        self._connect_parameters()
        self._shards.prepare_grads()

    def _buffers(self) -> list[list[Any]]:
        """Return two lists of buffers per stage: of dense weights and of experts."""
        return [buffers for each in self.replicas for buffers in (each.buffers, each.expert_parallel_buffers)]

    @torch.no_grad()
    def _connect_parameters(self) -> None:
        """Make the parameters views of the buffers of weights, which a move to another device and back replaces."""
        for buffer in itertools.chain(*self._buffers()):
            for parameter, (start, stop, _) in buffer.param_index_map.items():
                view = buffer.param_data[start:stop].view(parameter.shape)
                if parameter.data_ptr() != view.data_ptr():
                    view.copy_(parameter)
                    parameter.data = view

    @torch.no_grad()
    def sync_parameters(self) -> None:
        if self.has_masters:
            self._shards._copy_main_params_to_model_params()
        for replica in self.replicas:
            replica.start_param_sync()

    def norm_groups(self) -> dict[bool, dist.ProcessGroup]:
        return {False: cast(dist.ProcessGroup, dist.group.WORLD)}

    def weight_of(self, parameter: nn.Parameter) -> Tensor:
        if not self.has_masters:
            return parameter.detach()
        return self._gather(parameter, lambda shard: shard, torch.empty(1, dtype=self.dtype))

    @torch.no_grad()
    def set_weight(self, parameter: nn.Parameter, weight: Tensor) -> None:
        parameter.copy_(weight)
        shard, positions = self._shard_of(parameter)
        if self.has_masters and shard is not None:
            shard.copy_(weight.flatten()[positions])

    def has_state(self) -> bool:
        count = torch.tensor(len(self.optimizer.state), device=self.device)
        dist.all_reduce(count, dist.ReduceOp.MAX, group=self.groups.dp_cp)
        return bool(count)

    def state_of(self, parameter: nn.Parameter) -> State:
        states = self.optimizer.state
        return {
            key: self._gather(parameter, lambda shard, key=key: states[shard][key], example)
            for key, example in next(iter(states.values())).items()
        }

    def set_state(self, parameter: nn.Parameter, state: State) -> None:
        shard, positions = self._shard_of(parameter)
        if shard is not None:
            self.optimizer.state[shard] = {
                key: value.flatten()[positions].clone() if value.ndim else value for key, value in state.items()
            }

    @torch.no_grad()
    def _gather(self, parameter: nn.Parameter, tensor_of: Callable[[Tensor], Tensor], example: Tensor) -> Tensor:
        """Gather a tensor of a parameter from the ranks that hold parts of it; `example` has its type.

        `tensor_of` maps this rank's part of the parameter to the part of the tensor. A scalar is equal on all ranks.
        """
        shard, positions = self._shard_of(parameter)
        is_scalar = example.ndim == 0
        full = example.new_zeros(() if is_scalar else parameter.numel(), device=self.device)
        if shard is not None:
            full[... if is_scalar else positions] = tensor_of(shard).to(self.device)
        group = self.groups.expt_dp if _is_expert(parameter) else self.groups.dp_cp
        dist.all_reduce(full, dist.ReduceOp.MAX if is_scalar else dist.ReduceOp.SUM, group=group)
        return full.to(example.device) if is_scalar else full.view(parameter.shape)

    def _shard_of(self, parameter: nn.Parameter) -> tuple[nn.Parameter | None, slice]:
        """Return this rank's part of a parameter and its position in the flattened parameter; None for no part."""
        if parameter not in self._shards.model_param_group_index_map:
            return None, slice(0)
        group, order = self._shards.model_param_group_index_map[parameter]
        positions = self._shards._get_model_param_range_map(parameter)["param"]
        return self.optimizer.param_groups[group]["params"][order], slice(positions.start, positions.end)


def _add_to_buffer(parameter: Tensor) -> None:
    """Add the gradient of one backward pass to the gradient buffer."""
    assert parameter.grad is not None
    cast(Any, parameter).main_grad.add_(parameter.grad)
    parameter.grad = None


def _master(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Return a master weight with the attributes of the parameter, which state how ranks split it."""
    master = nn.Parameter(parameter.detach().to(dtype, copy=True))
    vars(master).update(vars(parameter))
    return master


def _mark_experts(module: MegatronModel) -> None:
    """Mark the weights of experts, so that their gradients are summed over tensor-parallel ranks.

    Tensor-parallel ranks hold whole experts and process different tokens.
    """
    for name, parameter in module.named_parameters():
        if ".experts." in name:
            cast(Any, parameter).allreduce = False


def _is_expert(parameter: Tensor) -> bool:
    """Return True for the weight of an expert whose gradients are summed over the ranks of `expt_dp`."""
    return not getattr(parameter, "allreduce", True)
