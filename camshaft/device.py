"""Devices and process groups: the one place that asks torch which backend goes with which device.

    device = place(config.device)          # torch.device("cuda", 3): this process's own
    join_group(device)                     # torchrun's group, the one that is there, or a group of one

A device is any name that PyTorch or a registered backend knows: `cpu`, `cuda`, `xpu`, `npu`, ... Nothing
else in the package names one.
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


def place(device: str) -> torch.device:
    """`device` with the index that this process uses; an error if this torch does not have it."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise EngineError(f"device={device}: this torch knows no such device ({error})") from error
    if found.type == "cpu":
        return found
    if not _module(found).is_available():
        raise EngineError(f"device={device}: there is none here. Type cpu, or start on a machine that has one")
    if found.index is None:
        local = int(os.environ.get("LOCAL_RANK", -1))  # of torchrun; a process that sees one device only has that
        own = local if 0 <= local < _module(found).device_count() else _module(found).current_device()
        found = torch.device(found.type, own)
    _module(found).set_device(found)
    return found


def here(device: str) -> torch.device:
    """`device` with the index that this process uses now; to another process a bare name is the first of its kind."""
    found = torch.device(device)
    if found.type == "cpu" or found.index is not None or not torch.accelerator.is_available():
        return found
    return torch.device(found.type, torch.accelerator.current_device_index())


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor` on `device`. What goes from host memory to an accelerator does so in a pinned copy, behind the work that
    is queued there: a copy of pageable memory would wait until all of that is done."""
    target = torch.device(device)
    if tensor.device.type != "cpu" or not tensor.numel() or not pins_for(target):
        return tensor.to(target)
    return tensor.pin_memory().to(target, non_blocking=True)


def pins_for(device: torch.device) -> bool:
    """Whether it is the kind of device that host memory is pinned for here."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def takes_triton(tensor: Tensor) -> bool:
    """Whether kernels of Triton can be used on it: on a GPU, where Triton is installed."""
    return tensor.is_cuda and _triton_is_installed()


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def world_size() -> int:
    """Ranks that this one has met."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this one among them."""
    return dist.get_rank() if dist.is_initialized() else 0


def backend_for(device: torch.device) -> str:
    """What a process group is made with: gloo for tensors in host memory, and beside it what the device has."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def join_group(device: torch.device) -> None:
    """Be in a process group: the one that exists, torchrun's, or one of this process alone."""
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
    """A group that somebody else made has to reach the device, and the host for what waits there."""
    told = dist.get_backend_config()
    there = dict(part.split(":") for part in told.split(","))
    for kind in ("cpu", device.type):
        if kind not in there:
            raise EngineError(
                f"the process group that exists ({told}) does not reach {kind}. Make it with "
                f"torch.distributed.init_process_group('{backend_for(device)}'), or leave that to the engine"
            )


def leave_group() -> None:
    """End the group that `join_group` made, before the interpreter takes it apart in no order."""
    if dist.is_initialized():
        dist.destroy_process_group()


def seed_ranks(device: torch.device, *numbers: int) -> None:
    """Dropout from here on is drawn from `numbers`: those of this rank, beside the seed of the run."""
    mixed = int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:7], "big")
    torch.default_generator.manual_seed(mixed)
    if device.type != "cpu":
        _module(device).manual_seed(mixed)


def random_states(device: torch.device) -> dict[str, Tensor]:
    """What dropout draws from next, on the CPU and on the device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = _module(device).get_rng_state(device)
    return states


def set_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Continue where `random_states` was taken; a state of another kind of device is passed over."""
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and "device" in states:
        _module(device).set_rng_state(states["device"], device)


def wait_for(device: torch.device) -> None:
    """Until what is queued on the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def release_cache(device: torch.device) -> None:
    """Give memory that the allocator keeps back to the device, for whoever runs next."""
    if device.type != "cpu":
        _module(device).empty_cache()


def peak_memory(device: torch.device | str) -> int:
    """The most bytes so far: of tensors on the device, or of this process where that is the CPU."""
    found = torch.device(device)
    if found.type != "cpu":
        return torch.accelerator.max_memory_allocated(found)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
