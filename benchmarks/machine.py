"""Describe the machine of a benchmark and measure CPU time.

machine(), machine("cuda"), kind(), cpu_seconds()
"""

from __future__ import annotations

import importlib.util
import os
import platform
import time
from pathlib import Path

import torch
import transformers


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its running descendants (those in steps of 10 ms)."""
    ticks, pids = 0, _children(os.getpid())
    while pids:
        pid = pids.pop()
        try:
            spent = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
        except OSError:
            continue  # the process has ended
        ticks += sum(map(int, spent))
        pids += _children(pid)
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    try:
        return [int(child) for file in files for child in file.read_text(encoding="utf-8").split()]
    except OSError:
        return []


def processor() -> str:
    """Return the model name of the processor, or the architecture where the system does not report it."""
    about = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    names = [line.partition(":")[2].strip() for line in about.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def kind() -> str:
    """Return the vendor and the vector instructions that torch uses, such as "AMD AVX2"."""
    vendor = processor().split("(")[0].split()[0]
    return f"{vendor} {torch.backends.cpu.get_cpu_capability()}"


def machine(device: str = "cpu") -> str:
    """Describe the processor and the versions; for a CUDA device, the GPU first."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if importlib.util.find_spec("vllm"):
        import vllm  # pyright: ignore[reportMissingImports]

        versions += f", vllm {vllm.__version__}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{gpu(device)}{processor()}, {os.cpu_count()} cores, {capability}, {versions}"


def gpu(device: str) -> str:
    """Describe a CUDA device: name, memory, multiprocessors and CUDA version. Empty for other devices."""
    if not device.startswith("cuda"):
        return ""
    about = torch.cuda.get_device_properties(device)
    memory = f"{about.total_memory / 2**30:.0f} GiB"
    return f"{about.name}, {memory}, {about.multi_processor_count} SMs, CUDA {torch.version.cuda}; "
