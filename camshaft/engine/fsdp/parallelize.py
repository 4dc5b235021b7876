"""Shards a model with `fully_shard`: chooses its FSDP units, dtypes, and the reduction of gradients.

    shard(packed, mesh, options, device, torch.bfloat16)    # the model may be on the meta device; it is filled later

Gradients are summed over ranks, not averaged, because losses are already divided by the counts of the whole
mini-batch.
"""

import itertools
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PreTrainedModel

from camshaft.config.schema.fsdp import FSDPOptions, WrapPolicy
from camshaft.errors import EngineError
from camshaft.models.loader import DTYPES
from camshaft.models.packed import PackedModel, output_layer


def shard(
    packed: PackedModel,
    mesh: DeviceMesh,
    options: FSDPOptions,
    device: torch.device,
    param_dtype: torch.dtype | None,
) -> None:
    """Shard the FSDP units of `packed` over `mesh`, then the remaining parameters as the root unit.

    A step computes with casts of the parameters to `param_dtype`; None computes with the parameters.
    """
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype, dtype_of(options.mixed_precision.reduce_dtype)),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu")
        if options.offload_policy
        else OffloadPolicy(),
    }
    check_dtypes(packed)
    units = list(units_of(packed, options.wrap_policy))
    for unit in units:
        use_all_weights(unit)
        if options.use_torch_compile:
            unit.compile(dynamic=True)  # the graphs exclude the hooks of FSDP, which torch does not trace
        fully_shard(unit, **arguments, reshard_after_forward=options.reshard_after_forward)
    for layer in [module for module in packed.hf.modules() if type(module).__name__ in layer_classes(packed.hf)]:
        if not isinstance(layer, FSDPModule):
            use_all_weights(layer)  # which the root unit gathers
    # By default the root unit stays gathered after a forward pass. Optimizers, exports and checkpoints need shards.
    fully_shard(packed, **arguments, reshard_after_forward=True)
    for module in packed.modules():
        if isinstance(module, FSDPModule):
            # Gloo does not support the reduction with a factor that FSDP would use otherwise.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    if options.forward_prefetch:
        units_in_order = [unit for unit in packed.modules() if unit in set(units)]
        for unit, next_unit in itertools.pairwise(units_in_order):
            cast(FSDPModule, unit).set_modules_to_forward_prefetch([cast(FSDPModule, next_unit)])


def use_all_weights(unit: nn.Module) -> None:
    """Give the weights of compressors a gradient of zero on ranks whose rows are too short for them.

    Ranks reduce the gradients of a unit together, and would reduce different weights. Inner units have been prepared.
    """
    compressors = [module for module in _modules_of(unit) if hasattr(module, "compress_rate")]
    modules = list(dict.fromkeys(module for compressor in compressors for module in _modules_of(compressor)))
    if not modules:
        return

    def add_zeros(_unit: nn.Module, _args: Any, output: Any) -> Any:
        weights = [weight for module in modules for weight in module.parameters(recurse=False) if weight.requires_grad]
        if isinstance(output, tuple):
            return (_UseWeights.apply(output[0], *weights), *output[1:])
        return _UseWeights.apply(output, *weights)

    unit.register_forward_hook(add_zeros)  # before `fully_shard`, whose hook frees the weights


def _modules_of(unit: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a unit without those of its inner units."""
    yield unit
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from _modules_of(child)


class _UseWeights(torch.autograd.Function):
    """Returns its first argument, and gives the others gradients of zero."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *weights: Tensor) -> Tensor:
        ctx.likes = [(weight.shape, weight.dtype, weight.device) for weight in weights]
        return hidden.clone()  # FSDP warns of a view

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.likes]
        return (*gradients, *zeros)


def check_dtypes(packed: PackedModel) -> None:
    """Raise `EngineError` if trained weights have different dtypes, which FSDP does not shard together."""
    names = {parameter.dtype: name for name, parameter in packed.hf.named_parameters() if parameter.requires_grad}
    if len(names) > 1:
        listed = ", ".join(f"{name} in {str(dtype).removeprefix('torch.')}" for dtype, name in names.items())
        raise EngineError(
            f"{type(packed.hf).__name__} has trained weights of several dtypes ({listed}), which FSDP does not shard "
            "together; set dtype=float32, or strategy=reference"
        )


def dtype_of(name: str | None) -> torch.dtype | None:
    return None if name is None else DTYPES[name]


def units_of(packed: PackedModel, policy: WrapPolicy) -> Iterator[nn.Module]:
    """Yield the modules that become FSDP units, except the root. Inner modules come before outer ones."""
    if policy.min_num_params:
        yield from _select_by_size(packed, policy.min_num_params)
        return
    classes, layers = policy.transformer_layer_cls_to_wrap, layer_classes(packed.hf)
    names = {name.strip() for name in classes.split(",")} if classes else layers
    present = {type(module).__name__ for module in packed.hf.modules()}
    if missing_classes := sorted(names - present):
        raise EngineError(
            f"wrap_policy.transformer_layer_cls_to_wrap contains {', '.join(missing_classes)}, but "
            f"{type(packed.hf).__name__} has no such module; its layer classes are "
            f"{', '.join(sorted(layers or present))}"
        )
    if not names:
        raise EngineError(
            f"{type(packed.hf).__name__} declares no layer class, so FSDP would gather the whole model as one unit; "
            "set wrap_policy.transformer_layer_cls_to_wrap to the class of its layers, or wrap_policy.min_num_params"
        )
    yield from reversed([module for module in packed.hf.modules() if type(module).__name__ in names])


def layer_classes(hf: PreTrainedModel) -> set[str]:
    """Return the names of the classes of a model's layers.

    They are those that transformers declares or, if it declares none, those in the list with the most parameters.
    """
    declared = {type(module).__name__ for module in hf.modules()} & set(hf._no_split_modules or ())
    lists = [module for module in hf.modules() if isinstance(module, nn.ModuleList)]
    largest = max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()), default=())
    return declared or {type(layer).__name__ for layer in largest}


def _select_by_size(packed: PackedModel, min_num_params: int) -> Iterator[nn.Module]:
    """Yield modules with at least `min_num_params` parameters, not counting those of the units inside them."""
    # The root unit keeps the output layer, whose weight is read outside its forward, and the embedding, which may be
    # tied to it.
    root_layers = (output_layer(packed.hf, packed.head), packed.hf.get_input_embeddings())
    assigned = {id(p) for layer in root_layers for p in layer.parameters()}
    root_modules = {
        id(module) for module in packed.modules() if any(layer in set(module.modules()) for layer in root_layers)
    }

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            yield from visit(child)
        parameters = [p for p in module.parameters() if id(p) not in assigned]
        num_params = sum(p.numel() for p in parameters)
        if id(module) in root_modules or isinstance(module, nn.ModuleList) or num_params < min_num_params:
            return
        assigned.update(id(p) for p in parameters)
        yield module

    yield from visit(packed)
