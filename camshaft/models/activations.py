"""Reduces activation memory: gradient checkpointing, and offloading of activations to host memory.

    model.enable_gradient_checkpointing("selective")     # saves matrix products and attention, recomputes the rest
    with offload_activations("cuda"):
        loss = run(model)                                # copies saved activations to host memory
    loss.backward()                                      # copies them back when the backward pass needs them

Neither changes the gradients; they stay bitwise equal. Both can be combined, and both work in a model that FSDP2
shards.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from camshaft.device import is_cuda

Mode = Literal["full", "selective"]

EXPENSIVE = frozenset({
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm", "aten::_scaled_mm",
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable", "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
})  # fmt: skip
"""Names of the torch operators for matrix products and attention, which account for most of the compute of a layer."""

MIN_OFFLOAD_BYTES = 1 << 16
"""Default size in bytes below which a tensor is not copied to host memory."""


def checkpointing_kwargs(mode: Mode) -> dict[str, Any]:
    """Return the keyword arguments of `torch.utils.checkpoint.checkpoint` for `mode`."""
    if mode == "full":
        return {"use_reentrant": False}
    return {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, _policy)}


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Save the results of `EXPENSIVE` operators and recompute all others."""
    is_expensive = operator._schema.name in EXPENSIVE
    return CheckpointPolicy.MUST_SAVE if is_expensive else CheckpointPolicy.PREFER_RECOMPUTE


class _OffloadedTensor(NamedTuple):
    """An offloaded tensor: a copy in host memory, for a DTensor of the local shard."""

    host: Tensor
    device: torch.device
    layout: dict[str, Any] | None
    """Arguments of `DTensor.from_local`; None for a regular tensor."""


@contextmanager
def offload_activations(device: torch.device | str, min_bytes: int = MIN_OFFLOAD_BYTES) -> Iterator[None]:
    """Copy the tensors on `device` that autograd saves inside the context to host memory.

    The backward pass copies them back and may run outside the context. Parameters and views of them are not copied:
    they stay on the device anyway, or FSDP2 has gathered them and frees them itself. Tensors of fewer than `min_bytes`
    bytes are not copied either. Copies use pinned memory and the compute stream, so the host does not wait for them,
    and device memory is not reused before a copy has finished. `device` may also be a CPU, for tests.
    """
    target = torch.device(device)

    def pack(tensor: Tensor) -> Tensor | _OffloadedTensor:
        parameter = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if parameter or tensor.device.type != target.type or tensor.layout != torch.strided:
            return tensor.detach()  # saving the tensor itself would create a reference cycle with its graph
        with torch.no_grad():
            local_shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local_shard.nbytes < min_bytes:
                return tensor.detach()
            host = torch.empty_like(local_shard, device="cpu", pin_memory=target.type != "cpu" or is_cuda(local_shard))
            host.copy_(local_shard, non_blocking=True)
        return _OffloadedTensor(host, local_shard.device, _layout(tensor) if isinstance(tensor, DTensor) else None)

    def unpack(saved_tensor: Tensor | _OffloadedTensor) -> Tensor:
        if not isinstance(saved_tensor, _OffloadedTensor):
            return saved_tensor
        local_shard = torch.empty_like(saved_tensor.host, device=saved_tensor.device, pin_memory=False)
        local_shard.copy_(saved_tensor.host, non_blocking=True)
        return local_shard if saved_tensor.layout is None else DTensor.from_local(local_shard, **saved_tensor.layout)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _layout(tensor: DTensor) -> dict[str, Any]:
    """Return the arguments with which `DTensor.from_local` rebuilds `tensor` from its local shard."""
    return {
        "device_mesh": tensor.device_mesh,
        "placements": tensor.placements,
        "run_check": False,
        "shape": tensor.shape,
        "stride": tensor.stride(),
    }
