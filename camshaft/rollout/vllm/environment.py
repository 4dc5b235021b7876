"""What vLLM needs of a process while it starts, and leaving the process as it was.

    with startup_environment("cuda"):
        import vllm
        llm = vllm.LLM(...)

Importing and starting vLLM sets environment variables, reseeds every random state, and replaces a function of
torch by one that does nothing. Worker processes of the trainer would inherit the first, its results depend on the
second, and its threads on the third.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch

from camshaft.device import here, join_group, rank, world_size


@contextlib.contextmanager
def startup_environment(device: str) -> Iterator[None]:
    """Inside, vLLM may be imported and an engine built."""
    with _unchanged(device), _environment(device):
        join_group(torch.device(device))  # one that vLLM made itself would not reach the host from a GPU
        yield


@contextlib.contextmanager
def _environment(device: str) -> Iterator[None]:
    """What vLLM reads from the environment while it starts; what the user has set there stays."""
    place = torch.device(device)
    if place.type == "cpu":
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else it takes cores from the trainer
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if world_size() > 1:
        own = here(device).index or 0
        os.environ |= {"RANK": str(rank()), "LOCAL_RANK": str(own), "WORLD_SIZE": str(world_size())}
    yield


@contextlib.contextmanager
def _unchanged(device: str) -> Iterator[None]:
    """The environment, all random states and torch's threads as they were before, afterwards."""
    environment = dict(os.environ)
    states = random.getstate(), np.random.get_state()
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        with preserve_random_state(device):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_num_threads = set_threads  # vLLM puts a function there that does nothing
        torch.set_num_threads(threads)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


@contextlib.contextmanager
def preserve_random_state(device: str) -> Iterator[None]:
    """What torch draws inside leaves the caller's random states alone."""
    place = torch.device(device)
    if place.type == "cpu" or not torch.accelerator.is_available():
        with torch.random.fork_rng(devices=[]):
            yield
        return
    with torch.random.fork_rng(devices=[place], device_type=place.type):
        yield
