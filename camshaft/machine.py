"""Devices and optional libraries of this machine, from which the config chooses the values of `auto` keys.

    detect_machine()             # Machine(device="cuda", devices=8, libraries=frozenset({"vllm"}))

On a machine without the device files of a GPU, torch is not imported.
"""

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CPU = "cpu"
DEVICE_FILES = ("nvidia[0-9]*", "kfd", "dxg")
"""Patterns of the files in /dev that drivers of GPUs create: NVIDIA, AMD, and Windows Subsystem for Linux."""
LIBRARIES = ("vllm", "sglang", "triton")
"""Optional libraries on which choices depend: generators, and the compiler of kernels for GPUs."""


@dataclass(frozen=True)
class Machine:
    """Devices and optional libraries of a machine."""

    device: str = CPU
    """Type of the accelerator, or cpu."""
    devices: int = 1
    """Number of accelerators. 1 on a machine without."""
    libraries: frozenset[str] = frozenset()
    """Installed libraries of `LIBRARIES`."""


@cache
def detect_machine() -> Machine:
    """Return the devices and libraries of this machine. Import torch only if there may be accelerators to count."""
    libraries = frozenset(name for name in LIBRARIES if importlib.util.find_spec(name) is not None)
    device, count = _accelerators() if has_device_files(DEVICE_FILES) else (CPU, 1)
    return Machine(device, count, libraries)


def has_device_files(patterns: Iterable[str], folder: Path = Path("/dev")) -> bool:
    """Return True if a file of the folder matches one of the patterns."""
    return any(any(folder.glob(pattern)) for pattern in patterns)


def _accelerators() -> tuple[str, int]:
    """Return the type and the number of the accelerators that torch can use."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return (CPU, 1) if accelerator is None else (accelerator.type, torch.accelerator.device_count())
