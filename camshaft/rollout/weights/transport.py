"""Move weights between processes over shared memory, device memory or a broadcast, with one interface.

    sender = open_sender(device, size)                 # in the trainer
    notify(sender.handle()); sender.connect()          # `notify`: the caller's channel, such as a pipe or HTTP
    for pieces, used in pack_buckets(weights, sender.buffer):
        notify(pieces, used); sender.push(used); wait_until_taken()

    receiver = open_receiver(handle)                   # in the generator
    assembler.take(pieces, receiver.pull(used))

`SharedMemory` connects two processes on one machine on the CPU. The memory has no name in a file system, so no file
remains after a kill and the size of /dev/shm does not matter. `DeviceMemory` shares a tensor on an accelerator between
processes (CUDA IPC). `Broadcast` reaches any number of receivers on other machines over gloo or NCCL. The sender must
wait until a bucket was taken before it refills the buffer. All waits in this module are bounded.
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
"""Default time limit for the other side to handle one bucket."""


class Sender(ABC):
    """The sending end, which owns the buffer of the next bucket."""

    buffer: Tensor
    """uint8 of shape (size,), filled by the caller."""

    @abstractmethod
    def handle(self) -> dict[str, Any]:
        """Return what `open_receiver` needs, in JSON types."""

    def connect(self) -> None:  # noqa: B027 - shared memory needs no connection
        """Connect to the receivers; call it once, while all of them open their end."""

    def push(self, used: int) -> None:  # noqa: B027 - the receiver reads shared memory directly
        """Transfer the first `used` bytes; call it while the receivers pull the bucket."""

    def close(self) -> None:  # noqa: B027 - device memory is freed with its last reference
        """Release the resources of this end."""


class Receiver(ABC):
    """The receiving end."""

    @abstractmethod
    def pull(self, used: int) -> Tensor:
        """Return uint8 of shape (used,); valid until the sender learns that the bucket was taken."""


# -- one machine, CPU -----------------------------------------------------------------------------


class SharedMemory(Sender):
    """Anonymous memory (memfd) that a receiver opens through the sender's entry in /proc.

    The kernel frees it when no process maps it any more.
    """

    def __init__(self, size: int):
        if not hasattr(os, "memfd_create"):
            raise RolloutError(
                "anonymous shared memory requires Linux; set rollout.name=torch to generate in the trainer's process"
            )
        self._file = os.memfd_create("camshaft-weights")
        os.ftruncate(self._file, size)
        self.buffer = _map_file(self._file, size)

    def handle(self) -> dict[str, Any]:
        inode = os.fstat(self._file).st_ino
        return {"means": "shared_memory", "process": os.getpid(), "file": self._file, "inode": inode}

    def close(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)  # drops the mapping, which frees the memory
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class SharedMemoryReceiver(Receiver):
    """The memory of a `SharedMemory` sender, mapped into this process."""

    def __init__(self, handle: Mapping[str, Any]):
        path = f"/proc/{handle['process']}/fd/{handle['file']}"
        try:
            file = os.open(path, os.O_RDWR)
        except OSError as error:
            raise RolloutError(
                f"cannot open the shared weights of process {handle['process']} ({error}); it must be alive and run on "
                "this machine, in the same container, as the same user"
            ) from error
        try:
            status = os.fstat(file)
            if status.st_ino != handle["inode"]:
                raise RolloutError(f"{path} is not the memory that the sender announced; the sender has ended")
            self._buffer = _map_file(file, status.st_size)
        finally:
            os.close(file)

    def pull(self, used: int) -> Tensor:
        return self._buffer[:used]


def _map_file(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


# -- one machine, accelerator ---------------------------------------------------------------------


class DeviceMemory(Sender):
    """A tensor on an accelerator that another process opens through `torch.multiprocessing`."""

    def __init__(self, device: torch.device, size: int):
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def handle(self) -> dict[str, Any]:
        shared = bytes(ForkingPickler.dumps(self.buffer))
        return {"means": "device_memory", "tensor": base64.b64encode(shared).decode()}


class DeviceMemoryReceiver(Receiver):
    """The tensor of a `DeviceMemory` sender, opened in this process."""

    def __init__(self, handle: Mapping[str, Any]):
        self._buffer: Tensor = pickle.loads(base64.b64decode(handle["tensor"]))

    def pull(self, used: int) -> Tensor:
        return self._buffer[:used]


# -- several machines -----------------------------------------------------------------------------


class Broadcast(Sender):
    """A separate process group for weights: the sender is rank 0, the receivers are ranks 1 and up."""

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

    def connect(self) -> None:
        self._group = _group(self._store, 0, self._world, self.buffer.device, self._seconds)

    def push(self, used: int) -> None:
        _broadcast(self._group, self.buffer[:used], self._seconds)

    def close(self) -> None:
        self._group = None


class BroadcastReceiver(Receiver):
    """A receiving rank of the broadcast; the constructor waits for all ranks."""

    def __init__(self, handle: Mapping[str, Any], rank: int, device: torch.device):
        self._seconds = float(handle["seconds"])
        wait = timedelta(seconds=self._seconds)
        try:
            store: Any = TCPStore(handle["host"], handle["port"], is_master=False, timeout=wait)
        except (RuntimeError, ValueError) as error:
            raise RolloutError(
                f"the sender of the weights at {handle['host']}:{handle['port']} does not answer: {error}"
            ) from error
        self._buffer = torch.empty(handle["size"], dtype=torch.uint8, device=device)
        self._group = _group(store, rank, handle["world"], device, self._seconds)

    def pull(self, used: int) -> Tensor:
        _broadcast(self._group, self._buffer[:used], self._seconds)
        return self._buffer[:used]


def _group(store: Any, rank: int, world: int, device: torch.device, seconds: float) -> Any:
    """Create a process group without `init_process_group`: both sides have a default group already."""
    classes = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}
    backend = dist.get_default_backend_for_device(device)
    if backend not in classes:
        raise RolloutError(f"a weight broadcast requires {' or '.join(classes)}, but device={device} uses {backend}")
    prefixed = PrefixStore("weights", store)
    if backend == "gloo":
        make: Any = lambda: dist.ProcessGroupGloo(prefixed, rank, world, timedelta(seconds=seconds))  # noqa: E731
    else:
        nccl: Any = vars(dist)[classes[backend]]
        make = lambda: nccl(prefixed, rank, world)  # noqa: E731
    try:
        return make()
    except RuntimeError as error:
        raise RolloutError(f"the {world} processes of the weight broadcast did not connect: {error}") from error


def _broadcast(group: Any, data: Tensor, seconds: float) -> None:
    wait = timedelta(seconds=seconds)
    try:
        group.broadcast(data, 0, wait).wait(wait)
        wait_for(data.device)
    except RuntimeError as error:
        raise RolloutError(f"the weight broadcast failed: {error}") from error


# -- selection ------------------------------------------------------------------------------------


def open_sender(device: torch.device, size: int) -> Sender:
    """Open a sender for a receiver on this machine, with buckets of `size` bytes on `device`."""
    return SharedMemory(size) if device.type == "cpu" else DeviceMemory(device, size)


def open_receiver(handle: Mapping[str, Any], rank: int = 1, device: torch.device | str = "cpu") -> Receiver:
    """Open the receiving end for a sender's `handle`; a broadcast also needs rank and device."""
    means = handle["means"]
    if means == "shared_memory":
        return SharedMemoryReceiver(handle)
    if means == "device_memory":
        return DeviceMemoryReceiver(handle)
    if means == "broadcast":
        return BroadcastReceiver(handle, rank, torch.device(device))
    raise RolloutError(f"unknown weight transport '{means}'; install the same version of camshaft on both sides")
