"""Activation memory: gradient checkpointing and offload to host memory.

    model.enable_gradient_checkpointing("selective")     # keeps matrix products and attention, recomputes the rest
    with offloaded_activations("cuda"):
        loss = run(model)                                # copies saved activations to host memory
    loss.backward()                                      # copies them back when the backward pass needs them

Both leave all gradients bitwise the same. They can be combined, and work in a model that FSDP2 shards.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

Mode = Literal["full", "selective"]

EXPENSIVE = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_grouped_mm",
        "aten::_scaled_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "torch_attn::_varlen_attn",
    }
)
"""Names of the torch operators of matrix products and attention, nearly all the work of a layer."""

SMALL = 1 << 16
"""Tensors of fewer bytes are not copied to host memory."""


def checkpointing_kwargs(mode: Mode) -> dict[str, Any]:
    """Return the arguments of `torch.utils.checkpoint.checkpoint` for a mode."""
    if mode == "full":
        return {"use_reentrant": False}
    return {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, _policy)}


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    keep = operator._schema.name in EXPENSIVE
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class _Kept(NamedTuple):
    """A saved tensor in host memory; for a DTensor, the local shard of this rank."""

    host: Tensor
    device: torch.device
    layout: dict[str, Any] | None
    """Arguments of `DTensor.from_local`; None for a plain tensor."""


@contextmanager
def offloaded_activations(device: torch.device | str, at_least: int = SMALL) -> Iterator[None]:
    """Copy tensors that autograd saves on `device` to host memory; the backward pass may run outside of the context.

    Parameters and views of them are not copied: they are on the device anyway, and under FSDP2 they are gathered
    layers that FSDP2 frees. Tensors below `at_least` bytes are not copied either. Copies are pinned and run on the
    compute stream, so nothing waits for them and no memory is reused before they finish. A CPU as `device` copies too.
    """
    target = torch.device(device)

    def pack(tensor: Tensor) -> Tensor | _Kept:
        parameter = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if parameter or tensor.device.type != target.type or tensor.layout != torch.strided:
            return tensor.detach()  # the tensor itself would keep alive the graph that keeps it
        with torch.no_grad():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.nbytes < at_least:
                return tensor.detach()
            host = torch.empty_like(local, device="cpu", pin_memory=target.type != "cpu")
            host.copy_(local, non_blocking=True)
        return _Kept(host, local.device, _layout(tensor) if isinstance(tensor, DTensor) else None)

    def unpack(kept: Tensor | _Kept) -> Tensor:
        if not isinstance(kept, _Kept):
            return kept
        local = kept.host.to(kept.device, non_blocking=True)
        return local if kept.layout is None else DTensor.from_local(local, **kept.layout)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _layout(tensor: DTensor) -> dict[str, Any]:
    return {
        "device_mesh": tensor.device_mesh,
        "placements": tensor.placements,
        "run_check": False,
        "shape": tensor.shape,
        "stride": tensor.stride(),
    }
