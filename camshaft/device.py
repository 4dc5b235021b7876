"""Devices and process groups. Only this module maps devices to communication backends.

    device = resolve_device(config.device)  # torch.device("cuda", 3) on local rank 3
    join_group(device)                      # the existing process group, torchrun's, or a group of one process

A device is any name supported by PyTorch or a registered backend: `cpu`, `cuda`, `xpu`, `npu`, ... The rest of the
package is device-agnostic.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.util
import os
import resource
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from camshaft.errors import EngineError


def resolve_device(device: str) -> torch.device:
    """Resolve `device` to the device index of this process and select it; raise EngineError if it is unavailable."""
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise EngineError(f"device={device} is not supported by this torch build ({error}); use another") from error
    if resolved.type == "cpu":
        return resolved
    if not _module(resolved).is_available():
        raise EngineError(f"device={device} is not available; use cpu, or start on a machine that has one")
    if resolved.index is None:
        local = int(os.environ.get("LOCAL_RANK", -1))  # set by torchrun; a process may see only one device
        index = local if 0 <= local < _module(resolved).device_count() else _module(resolved).current_device()
        resolved = torch.device(resolved.type, index)
    _module(resolved).set_device(resolved)
    return resolved


def here(device: str) -> torch.device:
    """Return `device` with the current device index, because another process resolves a bare name to index 0."""
    resolved = torch.device(device)
    if resolved.type == "cpu" or resolved.index is not None or not torch.accelerator.is_available():
        return resolved
    return torch.device(resolved.type, torch.accelerator.current_device_index())


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Move `tensor` to `device`. Copies from CPU memory to an accelerator use pinned memory and are asynchronous; a
    copy
    from pageable memory would wait for all queued work."""
    target = torch.device(device)
    if tensor.device.type != "cpu" or not tensor.numel() or not pins_for(target):
        return tensor.to(target)
    return tensor.pin_memory().to(target, non_blocking=True)


def pins_for(device: torch.device) -> bool:
    """Return True if CPU memory can be pinned for this device type."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def supports_triton(tensor: Tensor) -> bool:
    """Return True if Triton kernels can process the tensor: it is on a GPU and Triton is installed."""
    return tensor.is_cuda and _triton_is_installed()


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def world_size() -> int:
    """Return the world size, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def backend_for(device: torch.device) -> str:
    """Return the backend of a process group: gloo for CPU tensors, plus the device's default backend."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def join_group(device: torch.device) -> None:
    """Join a process group: the existing one, torchrun's, or a group of one process."""
    if dist.is_initialized():
        _check_group(device)
        return
    backend = backend_for(device)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore
    atexit.register(leave_group)


def _check_group(device: torch.device) -> None:
    """Raise EngineError if the existing process group does not support the device and the CPU."""
    config = dist.get_backend_config()
    backends = dict(part.split(":") for part in config.split(","))
    for kind in ("cpu", device.type):
        if kind not in backends:
            raise EngineError(
                f"the existing process group ({config}) does not support {kind}; create it with "
                f"torch.distributed.init_process_group('{backend_for(device)}'), or let the engine create it"
            )


def leave_group() -> None:
    """Destroy the process group before the interpreter shuts down."""
    if dist.is_initialized():
        dist.destroy_process_group()


def seed_ranks(device: torch.device, *numbers: int) -> None:
    """Seed the random number generators of the CPU and the device from `numbers`: the run seed and rank numbers."""
    mixed = int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:7], "big")
    torch.default_generator.manual_seed(mixed)
    if device.type != "cpu":
        _module(device).manual_seed(mixed)


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the random number generator states of the CPU and the device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = _module(device).get_rng_state(device)
    return states


def set_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore `random_states`; a device state is ignored on the CPU."""
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and "device" in states:
        _module(device).set_rng_state(states["device"], device)


def wait_for(device: torch.device) -> None:
    """Wait until all work queued on the device is finished."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def release_cache(device: torch.device) -> None:
    """Return cached memory of the allocator to the device."""
    if device.type != "cpu":
        _module(device).empty_cache()


def peak_memory(device: torch.device | str) -> int:
    """Return the peak memory in bytes: of tensors on the device, or of this process on the CPU."""
    resolved = torch.device(device)
    if resolved.type != "cpu":
        return torch.accelerator.max_memory_allocated(resolved)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
