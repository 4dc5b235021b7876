"""What a benchmark ran on, as its page says it, and the CPU time that has passed.

machine(), machine("cuda"), cpu_seconds()
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
    """Of this process, and of those that it has started and that still run; of these the system counts hundredths."""
    ticks, left = 0, _children(os.getpid())
    while left:
        pid = left.pop()
        try:
            spent = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
        except OSError:
            continue  # it has ended
        ticks += sum(map(int, spent))
        left += _children(pid)
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    try:
        return [int(child) for file in files for child in file.read_text(encoding="utf-8").split()]
    except OSError:
        return []


def machine(device: str = "cpu") -> str:
    """The processor, without a name of its own, and the versions; a GPU first, where that is the `device`."""
    about = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    names = [line.partition(":")[2].strip() for line in about.splitlines() if line.startswith("model name")]
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if importlib.util.find_spec("vllm"):
        import vllm  # pyright: ignore[reportMissingImports]

        versions += f", vllm {vllm.__version__}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{gpu(device)}{names[0] if names else platform.machine()}, {os.cpu_count()} cores, {capability}, {versions}"


def gpu(device: str) -> str:
    """The name, memory and number of multiprocessors of a CUDA device, and CUDA's version; nothing of others."""
    if not device.startswith("cuda"):
        return ""
    about = torch.cuda.get_device_properties(device)
    memory = f"{about.total_memory / 2**30:.0f} GiB"
    return f"{about.name}, {memory}, {about.multi_processor_count} SMs, CUDA {torch.version.cuda}; "
