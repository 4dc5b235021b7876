"""Sharding with `fully_shard`: FSDP units, dtypes, and reduction of gradients.

    shard(packed, meshes, options, device)      # the model may be on the meta device; weights come later

Gradients are summed over ranks, not averaged: losses are divided by the counts of the whole mini-batch. The sum is
requested explicitly, since gloo has no reduction with a factor.
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
    """Shard `packed` over `mesh`: its units, then the remaining parameters as the root."""
    dtypes = options.mixed_precision
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(dtype_of(dtypes.param_dtype), dtype_of(dtypes.reduce_dtype)),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu")
        if options.offload_policy
        else OffloadPolicy(),
    }
    units = list(units_of(packed, options.wrap_policy))
    for unit in units:
        if options.use_torch_compile:  # without the hooks of FSDP
            unit.forward = torch.compile(unit.forward, dynamic=True)
        fully_shard(unit, **arguments, reshard_after_forward=options.reshard_after_forward)
    # By default the root keeps its weights gathered after a forward pass, and an optimizer, an export or a checkpoint
    # would then see unsharded tensors.
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
    """Yield the modules that become FSDP units, inner ones before outer ones, without the root."""
    if policy.min_num_params:
        yield from _large(packed, policy.min_num_params)
        return
    classes = policy.transformer_layer_cls_to_wrap
    names = {name.strip() for name in classes.split(",")} if classes else set(packed.hf._no_split_modules or ())
    present = {type(module).__name__ for module in packed.hf.modules()}
    missing = sorted(names - present) if classes else []
    if missing:
        raise EngineError(
            f"wrap_policy.transformer_layer_cls_to_wrap: {type(packed.hf).__name__} has no {', '.join(missing)}; "
            f"its layers are {', '.join(sorted(packed.hf._no_split_modules or present))}"
        )
    if not names & present:
        raise EngineError(
            f"{type(packed.hf).__name__} declares no layer class to shard by, and would be gathered in one unit; set "
            "wrap_policy.transformer_layer_cls_to_wrap to the class of its layers, or wrap_policy.min_num_params"
        )
    yield from reversed([module for module in packed.hf.modules() if type(module).__name__ in names])


def _large(packed: PackedModel, limit: int) -> Iterator[nn.Module]:
    """Yield modules of at least `limit` parameters, without those of units inside them."""
    # The root reads the output layer's weight outside that layer's forward, and embeddings may be tied to it.
    ends = (output_layer(packed.hf, packed.head), packed.hf.get_input_embeddings())
    assigned = {id(p) for end in ends for p in end.parameters()}
    of_root = {id(module) for module in packed.modules() if any(end in set(module.modules()) for end in ends)}

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            yield from visit(child)
        parameters = [p for p in module.parameters() if id(p) not in assigned]
        if id(module) in of_root or isinstance(module, nn.ModuleList) or sum(p.numel() for p in parameters) < limit:
            return
        assigned.update(id(p) for p in parameters)
        yield module

    yield from visit(packed)
