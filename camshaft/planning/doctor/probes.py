"""Programs that `camshaft doctor --deep` runs in child processes. The last line of their output is the result."""

from __future__ import annotations

import importlib
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from camshaft.subprocesses import extend_import_path

if TYPE_CHECKING:
    from torch import Tensor

SHARED_BYTES = 256 * 2**20
"""Size of the block of shared memory that two processes exchange."""


def run(name: str, path: Sequence[str]) -> None:
    """Run the program with this name, and write its result to standard output."""
    extend_import_path(path)
    sys.stdout.write(f"{PROGRAMS[name]()}\n")
    sys.stdout.flush()
    os._exit(0)  # finalization of the interpreter can abort in threads of libraries


def compute() -> str:
    """Multiply two matrices with torch, and compare the product with that of Python."""
    import torch

    size = 64
    left, right = torch.arange(size * size).reshape(size, size) % 7, torch.arange(size * size).reshape(size, size) % 5
    product = (left.float() @ right.float()).long()
    rows, columns = left.tolist(), right.T.tolist()
    exact = [[sum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in rows]
    assert product.tolist() == exact, "torch multiplies matrices incorrectly on this machine"
    return f"torch {torch.__version__} computes with {torch.get_num_threads()} threads"


def nccl() -> str:
    """Add up a tensor on two devices, or on one if there is only one."""
    import torch

    return all_reduce(min(2, torch.accelerator.device_count()), None, "local")


def all_reduce(ranks: int, device: str | None, backend: str) -> str:
    """Start ranks as a run does, and add up a tensor. The backend `ray` starts a cluster if this machine has none."""
    from camshaft.controller import Options, PoolSpec, pool, spawn
    from camshaft.planning.doctor.probe_role import Adder

    start = time.perf_counter()
    spec = PoolSpec(ranks_per_node=ranks, device=device, cpus_per_rank=0.1)
    with pool(spec, backend, Options(timeout=20.0)) as ranks_pool:
        total = spawn(Adder, pool=ranks_pool).add()
    assert total == sum(range(1, ranks + 1)), f"the ranks added up to {total}"
    return f"{ranks} ranks started and exchanged a tensor in {time.perf_counter() - start:.1f} s"


def shared_memory() -> str:
    """Write a block of shared memory, and read it in a second process."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(SHARED_BYTES)
        with mmap.mmap(file.fileno(), SHARED_BYTES) as block:
            page = os.urandom(mmap.PAGESIZE)
            for start in range(0, SHARED_BYTES, mmap.PAGESIZE):  # SIGBUS if the file system is full
                block[start : start + mmap.PAGESIZE] = page
            child = os.fork()
            if child == 0:
                os._exit(int(block[SHARED_BYTES - mmap.PAGESIZE :] != page))
            _, status = os.waitpid(child, 0)
    assert status == 0, "a second process reads other bytes than the first one has written to /dev/shm"
    return f"two processes share {SHARED_BYTES // 2**20} MiB"


def reward() -> str:
    """Start a reward process, score a response, and end the process."""
    from camshaft.dataproto import DataProto
    from camshaft.rewards.manager import RewardManager

    row = DataProto.from_dict({"data_source": ["doctor"], "ground_truth": ["42"], "extra_info": [None]})
    with RewardManager(name="exact_match", num_workers=1) as rewards:
        score = rewards.score_texts(row, ["42"]).scores.tolist()
    assert score == [1.0], f"the reward process answered {score}"
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text(encoding="utf-8").split()
    assert not children, f"the reward process {children} remains"
    return "a reward process started, scored a response and ended"


def device() -> str:
    """Multiply matrices in bfloat16 on each device, and report the free memory."""
    import torch

    kind = torch.accelerator.current_accelerator(check_available=True)
    assert kind is not None, f"torch {torch.__version__} sees no device although the driver is loaded"
    lines = []
    for index in range(torch.accelerator.device_count()):
        ones: Tensor = torch.ones(256, 256, dtype=torch.bfloat16, device=f"{kind.type}:{index}")
        assert bool((ones @ ones == 256).all()), f"{kind.type}:{index} multiplies matrices incorrectly"
        module = torch.get_device_module(kind.type)
        free, total = module.mem_get_info(index)
        lines.append(f"{kind.type}:{index} {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    return "; ".join(lines)


def compile_kernel() -> str:
    """Compile a function for the device with Triton."""
    import torch

    kind = torch.accelerator.current_accelerator(check_available=True)
    assert kind is not None, "torch sees no device"
    values = torch.arange(1024.0, device=kind)
    start = time.perf_counter()
    compiled = torch.compile(_scale)(values)
    assert torch.equal(compiled, _scale(values)), "the compiled function returns other values"
    return f"Triton compiled a kernel in {time.perf_counter() - start:.1f} s"


def _scale(values: Tensor) -> Tensor:
    return values * 2 + 1


def time_import(name: str) -> str:
    """Import a library, and report how long it takes."""
    start = time.perf_counter()
    importlib.import_module(name)
    return f"import {name} takes {time.perf_counter() - start:.1f} s"


PROGRAMS: dict[str, Callable[[], str]] = {
    "torch": compute,
    "ranks": partial(all_reduce, 2, "cpu", "local"),
    "shared memory": shared_memory,
    "reward": reward,
    "device": device,
    "nccl": nccl,
    "compile": compile_kernel,
    "ray": partial(all_reduce, 2, "cpu", "ray"),
    "vllm": partial(time_import, "vllm"),
    "sglang": partial(time_import, "sglang"),
    "megatron": partial(time_import, "megatron.core"),
    "torchtitan": partial(time_import, "torchtitan"),
}
