"""Devices, optional libraries and memory of this machine.

    detect_machine()             # Machine(device="cuda", devices=8, libraries=frozenset({"vllm"})), for `auto` keys
    memory_limit()               # bytes of the machine, or of the container

On a machine without the device files of a GPU, torch is not imported.
"""

import importlib.util
import os
import sys
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


def omp_threads(variable: str) -> int:
    """Return the number of threads that a value of OMP_NUM_THREADS sets, or 0 if it sets none.

    A list such as "4,2" contains one number per level of nested parallelism.
    """
    first = variable.partition(",")[0].strip()
    return int(first) if first.isdigit() else 0


def describe_contention(ranks: int) -> tuple[str, str] | None:
    """Return a problem and its fix if threads of `ranks` processes would wait for cores that other programs use.

    A parallel operation ends when its last thread does, so a single thread without a core delays all others. The load
    is that of the whole machine, and is assumed to be the same on each core.
    """
    cores = len(os.sched_getaffinity(0))
    threads = omp_threads(os.environ.get("OMP_NUM_THREADS", "")) or max(1, cores // ranks)
    others = (os.getloadavg()[0] - 1) * cores / (os.cpu_count() or cores)  # without this process
    if threads == 1 or others < cores / 2:
        return None
    fitting = max(1, int(cores - others) // ranks)
    problem = (
        f"other programs have used about {min(cores, round(others))} of {cores} cores in the last minute; threads of "
        "torch then wait for each other, which can make a step many times slower"
    )
    return problem, f"set OMP_NUM_THREADS={fitting}, or stop these programs"


def memory_limit() -> int:
    """Return the memory of this machine or the limit of the container, whichever is smaller, in bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # also without /proc
    return min(total, cgroup_memory() or sys.maxsize)


def available_memory() -> int:
    """Return the memory that new processes can use without swapping, within the limit of the container, in bytes."""
    available, limit = memory_facts()["MemAvailable"], cgroup_memory()
    return available if limit is None else min(available, max(0, limit - _cgroup_memory_in_use()))


def memory_facts() -> dict[str, int]:
    """Return the entries of /proc/meminfo in bytes."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    pairs = (line.split(":", 1) for line in lines)
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def cgroup_memory() -> int | None:
    """Return the memory limit of the container in bytes, or None."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        if (text := cgroup_file(name)) is not None and text.isdigit():
            return int(text)
    return None


def _cgroup_memory_in_use() -> int:
    """Return the memory that the container uses in bytes, without cached files that the kernel can drop."""
    for folder, current, cached in (("", "memory.current", ""), ("memory/", "memory.usage_in_bytes", "total_")):
        text = cgroup_file(f"{folder}{current}")
        if text is not None and text.isdigit():
            entries = dict(line.split() for line in (cgroup_file(f"{folder}memory.stat") or "").splitlines())
            return int(text) - int(entries.get(f"{cached}inactive_file", 0))
    return 0


def cgroup_file(name: str) -> str | None:
    """Return the text of a file that describes the limits of the container, or None."""
    try:
        return (Path("/sys/fs/cgroup") / name).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def has_device_files(patterns: Iterable[str], folder: Path = Path("/dev")) -> bool:
    """Return True if a file of the folder matches one of the patterns."""
    return any(any(folder.glob(pattern)) for pattern in patterns)


def _accelerators() -> tuple[str, int]:
    """Return the type and the number of the accelerators that torch can use."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return (CPU, 1) if accelerator is None else (accelerator.type, torch.accelerator.device_count())
