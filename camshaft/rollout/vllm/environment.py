"""Start vLLM inside a trainer process and undo the changes that vLLM makes to the process.

    with startup_environment("cuda"):
        import vllm
        llm = vllm.LLM(...)

Importing and starting vLLM sets environment variables, reseeds all random generators, and replaces
`torch.set_num_threads` by a function that does nothing. Without this module, the trainer's worker processes would
inherit the variables, and the trainer's results and number of threads would change.
"""

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch

from camshaft.device import join_group, rank, with_device_index, world_size


@contextlib.contextmanager
def startup_environment(device: str) -> Iterator[None]:
    """Prepare the process for importing vLLM and building an engine.

    On exit, restore environment variables, random states and torch's thread settings.
    """
    environment = dict(os.environ)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        with preserve_random_state(device):
            _set_environment(device)
            join_group(torch.device(device))  # a process group that vLLM creates on a GPU does not support CPU tensors
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_threads  # vLLM has replaced it by a function that does nothing
        torch.set_num_threads(threads)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


def _set_environment(device: str) -> None:
    """Set the environment variables that vLLM reads at startup. Values set by the user take precedence."""
    if torch.device(device).type == "cpu":
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # binding would take cores away from the trainer
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["PYTHONSAFEPATH"] = "1"  # processes that vLLM starts do not import files of the working directory
    if world_size() > 1:
        local_rank = with_device_index(device).index or 0
        os.environ.update(RANK=str(rank()), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(world_size()))


@contextlib.contextmanager
def preserve_random_state(device: str) -> Iterator[None]:
    """Restore torch's random states of the CPU and of `device` on exit."""
    torch_device = torch.device(device)
    devices = [torch_device] if torch_device.type != "cpu" and torch.accelerator.is_available() else []
    with torch.random.fork_rng(devices, device_type=torch_device.type):
        yield
