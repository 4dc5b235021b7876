"""What vLLM needs of a process while it starts, and leaving the process as it was.

    with starting("cuda"):
        import vllm
        llm = vllm.LLM(...)

Importing and starting vLLM sets environment variables, reseeds every random state, and replaces a function of
torch by one that does nothing. Worker processes of the trainer would inherit the first, its results depend on the
second, and its threads on the third.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist


def world_size() -> int:
    """Ranks that this one has met."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this one among them."""
    return dist.get_rank() if dist.is_initialized() else 0


@contextlib.contextmanager
def starting(device: str) -> Iterator[None]:
    """Inside, vLLM may be imported and an engine built."""
    with _unchanged(device), _environment(device):
        join_group(device)
        yield


def join_group(device: str) -> None:
    """vLLM uses the process group that is there; one that it made itself would not reach the host from a GPU."""
    if not dist.is_initialized():
        kind = torch.device(device).type
        backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore
        atexit.register(leave_group)


def leave_group() -> None:
    """End that group before the interpreter takes it apart in no order."""
    if dist.is_initialized():
        dist.destroy_process_group()


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
        own = place.index
        if own is None:
            own = 0 if place.type == "cpu" else torch.accelerator.current_device_index()
        os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(own), "WORLD_SIZE": str(world_size())}
    yield


@contextlib.contextmanager
def _unchanged(device: str) -> Iterator[None]:
    """The environment, all random states and torch's threads as they were before, afterwards."""
    environment = dict(os.environ)
    states = random.getstate(), np.random.get_state()
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        with own_random_state(device):
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
def own_random_state(device: str) -> Iterator[None]:
    """What torch draws inside leaves the caller's random states alone."""
    place = torch.device(device)
    if place.type == "cpu" or not torch.accelerator.is_available():
        with torch.random.fork_rng(devices=[]):
            yield
        return
    with torch.random.fork_rng(devices=[place], device_type=place.type):
        yield
