"""The way of weights between processes: three means, one interface.

    sender = open_sender(device, size)                 # the trainer's side
    tell(sender.handle()); sender.meet()               # `tell`: over a pipe, over HTTP, ... of the caller
    for pieces, used in pack_buckets(weights, sender.buffer):
        tell(pieces, used); sender.push(used); wait_until_taken()

    receiver = open_receiver(handle)                   # the generator's side
    assembler.take(pieces, receiver.pull(used))

`SharedMemory` is for two processes on one machine, on the CPU: the memory has no name in a file system, so nothing
is left behind whoever is killed, and no limit on /dev/shm counts. `DeviceMemory` shares a tensor of an accelerator
between processes (CUDA IPC). `Broadcast` goes to other machines, over gloo or NCCL, to any number of receivers at
once. Who sends has to wait until a bucket was taken before it fills the next; all waits here are bounded.
"""

from __future__ import annotations

import base64
import mmap
import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing  # teaches ForkingPickler to share tensors
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from camshaft.device import wait_for
from camshaft.errors import RolloutError

SECONDS = 60.0
"""How long the other side may take for its part of one bucket, unless told otherwise."""


class Sender(ABC):
    """One end, with the bytes that go next."""

    buffer: Tensor
    """(size,) uint8, to be filled by the caller."""

    @abstractmethod
    def handle(self) -> dict[str, Any]:
        """What a receiver has to be told, in the types of JSON."""

    def meet(self) -> None:  # noqa: B027 - most means need no meeting
        """To be called once, when all receivers have been told and are opening their end."""

    def push(self, used: int) -> None:  # noqa: B027 - what is shared is there already
        """To be called when the receivers have been told of this bucket and are pulling it."""

    def close(self) -> None:  # noqa: B027 - most means end with their last reference
        """Let go of what the means holds."""


class Receiver(ABC):
    """The other end."""

    @abstractmethod
    def pull(self, used: int) -> Tensor:
        """(used,) uint8; valid until the sender is told that it was taken."""


# -- one machine, CPU -----------------------------------------------------------------------------


class SharedMemory(Sender):
    """Memory that exists as long as a process has it mapped; a receiver opens it through its sender's process."""

    def __init__(self, size: int):
        if not hasattr(os, "memfd_create"):
            raise RolloutError(
                "shared memory without a name needs Linux; generate in this process (rollout.name=torch)"
            )
        self._file = os.memfd_create("camshaft-weights")
        os.ftruncate(self._file, size)
        self.buffer = _mapped(self._file, size)

    def handle(self) -> dict[str, Any]:
        known = os.fstat(self._file)
        return {"means": "shared_memory", "process": os.getpid(), "file": self._file, "inode": known.st_ino}

    def close(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)  # nobody has it mapped any more, so it is freed
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class SharedMemoryReceiver(Receiver):
    """The same memory, seen from the other process."""

    def __init__(self, handle: Mapping[str, Any]):
        path = f"/proc/{handle['process']}/fd/{handle['file']}"
        try:
            file = os.open(path, os.O_RDWR)
        except OSError as error:
            raise RolloutError(
                f"the weights in the memory of process {handle['process']} cannot be reached ({error}); it must run "
                "on this machine, in the same container, as the same user, and still be alive"
            ) from error
        try:
            known = os.fstat(file)
            if known.st_ino != handle["inode"]:
                raise RolloutError(f"{path} is not the memory that weights were announced in; its sender has ended")
            self._buffer = _mapped(file, known.st_size)
        finally:
            os.close(file)

    def pull(self, used: int) -> Tensor:
        return self._buffer[:used]


def _mapped(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


# -- one machine, accelerator ---------------------------------------------------------------------


class DeviceMemory(Sender):
    """A tensor of an accelerator that another process opens, through torch's own sharing of tensors."""

    def __init__(self, device: torch.device, size: int):
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def handle(self) -> dict[str, Any]:
        shared = bytes(ForkingPickler.dumps(self.buffer))
        return {"means": "device_memory", "tensor": base64.b64encode(shared).decode()}


class DeviceMemoryReceiver(Receiver):
    """The same tensor, opened here."""

    def __init__(self, handle: Mapping[str, Any]):
        self._buffer: Tensor = pickle.loads(base64.b64decode(handle["tensor"]))

    def pull(self, used: int) -> Tensor:
        return self._buffer[:used]


# -- several machines -----------------------------------------------------------------------------


class Broadcast(Sender):
    """A group of its own, beside those of the trainer: this process is rank 0, the receivers are ranks 1 and up."""

    def __init__(self, device: torch.device, size: int, host: str, receivers: int = 1, seconds: float = SECONDS):
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self._host, self._world, self._seconds = host, receivers + 1, seconds
        wait = timedelta(seconds=seconds)
        self._store: Any = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=wait)
        self._group: Any = None

    def handle(self) -> dict[str, Any]:
        return {
            "means": "broadcast",
            "host": self._host,
            "port": self._store.port,
            "world": self._world,
            "size": len(self.buffer),
            "seconds": self._seconds,
        }

    def meet(self) -> None:
        self._group = _group(self._store, 0, self._world, self.buffer.device, self._seconds)

    def push(self, used: int) -> None:
        _broadcast(self._group, self.buffer[:used], self._seconds)

    def close(self) -> None:
        self._group = None


class BroadcastReceiver(Receiver):
    """One of the other ranks; opening it waits for all of them."""

    def __init__(self, handle: Mapping[str, Any], rank: int, device: torch.device):
        self._seconds = float(handle["seconds"])
        wait = timedelta(seconds=self._seconds)
        try:
            store: Any = TCPStore(handle["host"], handle["port"], is_master=False, timeout=wait)
        except (RuntimeError, ValueError) as error:
            raise RolloutError(
                f"{handle['host']}:{handle['port']}, where weights are to come from, does not answer: {error}"
            ) from error
        self._buffer = torch.empty(handle["size"], dtype=torch.uint8, device=device)
        self._group = _group(store, rank, handle["world"], device, self._seconds)

    def pull(self, used: int) -> Tensor:
        _broadcast(self._group, self._buffer[:used], self._seconds)
        return self._buffer[:used]


def _group(store: Any, rank: int, world: int, device: torch.device, seconds: float) -> Any:
    """A process group that is not the default one: the other side has a default group of its own."""
    kinds = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}
    backend = dist.get_default_backend_for_device(device)
    if backend not in kinds:
        raise RolloutError(f"weights are broadcast over {' or '.join(kinds)}; device={device} has {backend}")
    own = PrefixStore("weights", store)
    if backend == "gloo":
        make: Any = lambda: dist.ProcessGroupGloo(own, rank, world, timedelta(seconds=seconds))  # noqa: E731
    else:
        nccl: Any = vars(dist)[kinds[backend]]
        make = lambda: nccl(own, rank, world)  # noqa: E731
    try:
        return make()
    except RuntimeError as error:
        raise RolloutError(f"the {world} processes that share weights did not find each other: {error}") from error


def _broadcast(group: Any, data: Tensor, seconds: float) -> None:
    wait = timedelta(seconds=seconds)
    try:
        group.broadcast(data, 0, wait).wait(wait)
        wait_for(data.device)
    except RuntimeError as error:
        raise RolloutError(f"the broadcast of weights broke off: {error}") from error


# -- which one ------------------------------------------------------------------------------------


def open_sender(device: torch.device, size: int) -> Sender:
    """For a receiver on this machine, with buckets of `size` bytes on `device`."""
    return SharedMemory(size) if device.type == "cpu" else DeviceMemory(device, size)


def open_receiver(handle: Mapping[str, Any], rank: int = 1, device: torch.device | str = "cpu") -> Receiver:
    """The end that belongs to `handle`; rank and device are for a broadcast."""
    means = handle["means"]
    if means == "shared_memory":
        return SharedMemoryReceiver(handle)
    if means == "device_memory":
        return DeviceMemoryReceiver(handle)
    if means == "broadcast":
        return BroadcastReceiver(handle, rank, torch.device(device))
    raise RolloutError(f"weights are announced over '{means}', which is not known here; both sides need one version")
