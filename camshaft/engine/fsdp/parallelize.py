"""Sharding a model with `fully_shard`: units, numbers of the computation, and what is summed.

    shard(packed, meshes, options, device)      # the model may be on the meta device; weights come later

Gradients are summed over ranks, never averaged: a loss is divided by the counts of the whole mini-batch
already. The sum is asked for by name, since gloo has no reduction with a factor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from camshaft.config.schema.fsdp import FSDPOptions, WrapPolicy
from camshaft.errors import EngineError
from camshaft.models.loader import DTYPES
from camshaft.models.packed import PackedModel, output_layer


def shard(packed: PackedModel, mesh: DeviceMesh, options: FSDPOptions, device: torch.device) -> None:
    """Make `packed` an FSDP model over `mesh`: its units, then what is left as the root's own."""
    numbers = options.mixed_precision
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(dtype_of(numbers.param_dtype), dtype_of(numbers.reduce_dtype)),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu")
        if options.offload_policy
        else OffloadPolicy(),
    }
    units = list(units_of(packed, options.wrap_policy))
    for unit in units:
        if options.use_torch_compile:  # the computation alone: the hooks of FSDP stay outside
            unit.forward = torch.compile(unit.forward, dynamic=True)
        fully_shard(unit, **arguments, reshard_after_forward=options.reshard_after_forward)
    # Left to itself the root keeps its weights gathered after a forward pass, and then an optimizer, an export or
    # a checkpoint would see plain tensors in the place of sharded ones.
    fully_shard(packed, **arguments, reshard_after_forward=True)
    for module in fsdp_modules(packed):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    if options.forward_prefetch:
        ordered = [unit for unit in packed.modules() if unit in set(units)]
        for unit, after in itertools.pairwise(ordered):
            cast(FSDPModule, unit).set_modules_to_forward_prefetch([cast(FSDPModule, after)])


def dtype_of(name: str | None) -> torch.dtype | None:
    return None if name is None else DTYPES[name]


def fsdp_modules(packed: nn.Module) -> list[FSDPModule]:
    return [module for module in packed.modules() if isinstance(module, FSDPModule)]


def units_of(packed: PackedModel, policy: WrapPolicy) -> Iterator[nn.Module]:
    """The modules that become units, inner ones before those that hold them; the root is not among them."""
    if policy.min_num_params:
        yield from _large(packed, policy.min_num_params)
        return
    told = policy.transformer_layer_cls_to_wrap
    names = {name.strip() for name in told.split(",")} if told else set(packed.hf._no_split_modules or ())
    found = {type(module).__name__ for module in packed.hf.modules()}
    missing = sorted(names - found) if told else []
    if missing:
        raise EngineError(
            f"wrap_policy.transformer_layer_cls_to_wrap: {type(packed.hf).__name__} has no {', '.join(missing)}; "
            f"its layers are {', '.join(sorted(packed.hf._no_split_modules or found))}"
        )
    if not names & found:
        raise EngineError(
            f"{type(packed.hf).__name__} does not say which of its layers belong together, and would be gathered as a "
            "whole: name their class in wrap_policy.transformer_layer_cls_to_wrap, or set wrap_policy.min_num_params"
        )
    yield from reversed([module for module in packed.hf.modules() if type(module).__name__ in names])


def _large(packed: PackedModel, limit: int) -> Iterator[nn.Module]:
    """Modules of at least `limit` parameters, not counting those of units inside them."""
    # The root reads the output layer's weight outside of that layer's own forward, and embeddings may be tied to it.
    ends = (output_layer(packed.hf, packed.head), packed.hf.get_input_embeddings())
    taken = {id(p) for end in ends for p in end.parameters()}
    of_root = {id(module) for module in packed.modules() if any(end in set(module.modules()) for end in ends)}

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            yield from visit(child)
        own = [p for p in module.parameters() if id(p) not in taken]
        if id(module) in of_root or isinstance(module, nn.ModuleList) or sum(p.numel() for p in own) < limit:
            return
        taken.update(id(p) for p in own)
        yield module

    yield from visit(packed)
