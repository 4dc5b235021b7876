"""What a benchmark ran on, as its page says it: `machine()`."""

from __future__ import annotations

import importlib.util
import os
import platform
from pathlib import Path

import torch
import transformers


def machine() -> str:
    """The processor, without a name of its own, and the versions."""
    about = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    names = [line.partition(":")[2].strip() for line in about.splitlines() if line.startswith("model name")]
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if importlib.util.find_spec("vllm"):
        import vllm  # pyright: ignore[reportMissingImports]

        versions += f", vllm {vllm.__version__}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, {capability}, {versions}"
