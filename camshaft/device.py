"""Devices and process groups.

    device = resolve_device(config.device)  # torch.device("cuda", 3) on local rank 3
    join_group(device)                      # use the existing process group, or create one

A device is any device type of PyTorch or of a registered backend, such as `cpu`, `cuda`, `xpu` or `npu`. Only this
module depends on the device type, for example to select a communication backend. The rest of the package does not.
"""

import atexit
import contextlib
import functools
import hashlib
import importlib.util
import ipaddress
import os
import resource
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from camshaft.errors import EngineError


def resolve_device(device: str) -> torch.device:
    """Return the device of this process with its index, and make it the current device.

    The index is LOCAL_RANK if the variable is set and valid. An unavailable device raises EngineError.
    """
    resolved = available_device(device)
    if resolved.type == "cpu":
        return resolved
    if resolved.index is None:
        local = int(os.environ.get("LOCAL_RANK", -1))  # set by torchrun; a process may see only one device
        index = local if 0 <= local < _module(resolved).device_count() else _module(resolved).current_device()
        resolved = torch.device(resolved.type, index)
    _module(resolved).set_device(resolved)
    return resolved


def available_device(device: str) -> torch.device:
    """Return the device; raise EngineError if this machine does not have it, or if it cannot hold data, like meta."""
    try:
        resolved = torch.device(device)
        count = 0 if resolved.type in ("cpu", "meta") else _module(resolved).device_count()
    except RuntimeError as error:
        raise EngineError(
            f"device={device} is not supported by this build of torch ({error}); use another device"
        ) from error
    if resolved.type != "cpu" and (resolved.index or 0) >= count:
        number = f", which has {count} {resolved.type} devices" if count else ""
        raise EngineError(f"device={device} is not available on this machine{number}; use cpu, or another machine")
    return resolved


def with_device_index(device: str) -> torch.device:
    """Return `device` with the current device index.

    Pass the result to other processes, because they would resolve a device without an index to index 0.
    """
    resolved = torch.device(device)
    if resolved.type == "cpu" or resolved.index is not None or not torch.accelerator.is_available():
        return resolved
    return torch.device(resolved.type, torch.accelerator.current_device_index())


def device_identity(device: torch.device) -> str:
    """Return a name of the accelerator that is equal in all processes of the machine, or "" for the CPU.

    If the accelerator reports no UUID, the name contains its index in this process.
    """
    if device.type == "cpu":
        return ""
    module = _module(device)
    properties = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
    uuid = getattr(properties, "uuid", None)
    return str(device) if uuid is None else f"{device.type} {uuid}"


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Move `tensor` to `device`.

    Copies from CPU memory to an accelerator use pinned memory and are asynchronous. A copy from pageable memory would
    wait for all work that is queued on the device.
    """
    target = torch.device(device)
    if tensor.device.type != "cpu" or not tensor.numel() or not can_pin_memory(target):
        return tensor.to(target)
    return tensor.pin_memory().to(target, non_blocking=True)


def can_pin_memory(device: torch.device) -> bool:
    """Return True if CPU memory can be pinned for copies to this device."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


_simulates_cuda = False


@contextlib.contextmanager
def simulate_cuda() -> Iterator[None]:
    """Select the code path of CUDA for CPU tensors. Only a forecast can do this, because it runs no kernel."""
    global _simulates_cuda
    before, _simulates_cuda = _simulates_cuda, True
    try:
        yield
    finally:
        _simulates_cuda = before


def is_cuda(tensor: Tensor) -> bool:
    """Return True if the tensor takes the code path of CUDA: it is on a CUDA device, or one is simulated."""
    return tensor.is_cuda or _simulates_cuda


def supports_triton(tensor: Tensor) -> bool:
    """Return True if the tensor is on a CUDA device and Triton is installed."""
    return tensor.is_cuda and _triton_is_installed()


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def world_size() -> int:
    """Return the world size, or 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process, or 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def backend_for(device: torch.device) -> str:
    """Return the backend for a process group: gloo for CPU tensors, and the default backend of the device."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def host_backend() -> str:
    """Return the backend of the default process group for CPU tensors: gloo, or that of a fake group (`planning`)."""
    return _group_backends()["cpu"]


def _group_backends() -> dict[str, str]:
    """Map each type of device that the default process group supports to its backend."""
    return dict(part.split(":") for part in dist.get_backend_config().split(","))


def join_group(device: torch.device) -> None:
    """Initialize the default process group unless it exists.

    The group is created from the variables of torchrun (RANK, WORLD_SIZE), or consists of this process only. Raise
    EngineError if an existing group does not support the device or the CPU.
    """
    if dist.is_initialized():
        missing = [kind for kind in ("cpu", device.type) if kind not in _group_backends()]
        if missing:
            raise EngineError(
                f"the existing process group ({dist.get_backend_config()}) does not support {missing[0]}; create it "
                f"with torch.distributed.init_process_group('{backend_for(device)}'), or let the engine create it"
            )
        return
    backend = backend_for(device)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore
    atexit.register(leave_group)


def create_store(host: str, world: int | None, timeout: timedelta) -> TCPStore:
    """Open the server of a store on a free port, for processes that reach this one at the address `host`.

    torch would accept connections from all networks, even if the other processes are on this machine.
    """
    options: dict[str, Any] = {"is_master": True, "timeout": timeout, "wait_for_workers": False}
    if not ipaddress.ip_address(host).is_loopback:
        return TCPStore(host, 0, world, **options)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        return TCPStore(host, port, world, **options, master_listen_fd=listener.detach())


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy a process group of gloo, which has threads and connections, unless that has been done."""
    if dist.is_initialized():
        with contextlib.suppress(ValueError):  # it was destroyed with the default process group
            dist.destroy_process_group(group)


def leave_group() -> None:
    """Destroy the default process group, if it is initialized."""
    if dist.is_initialized():
        dist.destroy_process_group()


def seed_ranks(device: torch.device, *numbers: int) -> None:
    """Seed the random number generators of the CPU and the device with a hash of `numbers` (run seed, rank, ...)."""
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
    """Restore the states that `random_states` returned. On the CPU, the state of another device is ignored."""
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and "device" in states:
        _module(device).set_rng_state(states["device"], device)


def synchronize(device: torch.device) -> None:
    """Wait until all work that is queued on the device is finished."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def release_cache(device: torch.device) -> None:
    """Release unused memory of the caching allocator to the device."""
    if device.type != "cpu":
        _module(device).empty_cache()


def memory_info(device: torch.device) -> tuple[int, int] | None:
    """Return the free and the total memory of the device in bytes, or None if it does not report them, like the CPU.

    Memory that the caching allocator holds but does not use is free.
    """
    if device.type == "cpu" or not hasattr(_module(device), "mem_get_info"):
        return None
    free, total = _module(device).mem_get_info(device)
    cached = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return free + cached, total


def peak_memory(device: torch.device | str) -> int:
    """Return the peak memory of tensors on the device in bytes. On the CPU, return that of the whole process."""
    resolved = torch.device(device)
    if resolved.type != "cpu":
        return torch.accelerator.max_memory_allocated(resolved)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux reports KiB


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
