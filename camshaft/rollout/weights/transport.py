"""Move weights between processes through shared memory, device memory or a broadcast, behind one interface.

    sender = open_sender(device, size)                 # in the trainer
    notify(sender.handle()); sender.connect()          # `notify`: the caller's channel, such as a pipe or HTTP
    for bucket in pack_buckets(weights, sender.buffers):
        wait_until_read(previous_bucket)
        notify(bucket); sender.push(bucket.buffer, bucket.num_bytes)

    receiver = open_receiver(handle)                   # in the generator
    assembler.unpack(bucket.pieces, receiver.pull(bucket.buffer, bucket.num_bytes))

`SharedMemory` shares CPU memory between two processes on one machine. The memory has no name in a file system, so a
killed process leaves no file behind and the size of /dev/shm does not matter. `DeviceMemory` shares a tensor on an
accelerator between processes (CUDA IPC). `Broadcast` reaches any number of receivers on other machines over gloo or
NCCL. A sender has two buffers, so it gathers a bucket while the receivers read the previous one. It must wait until
they have read a bucket before it refills the buffer of that bucket. All waits in this module have a time limit.
"""

import base64
import contextlib
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from camshaft.device import create_store, release_cache, synchronize
from camshaft.errors import RolloutError

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

IPC_DEVICES = ("cuda",)
"""Device types whose memory torch can share between processes."""

BUFFERS = 2
"""Buffers of a sender: one is filled while the receivers read the other."""

BUCKET_SECONDS = 60.0
"""Default time limit, in seconds, for the other side to process one bucket."""


class Sender(ABC):
    """The sending end of a transport. It owns `BUFFERS` buffers, each of which holds one bucket."""

    buffers: tuple[Tensor, ...]
    """Buffers of dtype uint8 and shape (size,), which the caller fills in turn."""

    @abstractmethod
    def handle(self) -> dict[str, Any]:
        """Return the argument of `open_receiver` as a JSON-serializable dict."""

    def connect(self) -> None:  # noqa: B027 - shared memory needs no connection
        """Connect to the receivers. Call this once, while all receivers call `open_receiver`."""

    def push(self, number: int, num_bytes: int) -> None:  # noqa: B027 - the receiver reads shared memory directly
        """Transfer the first `num_bytes` bytes of buffer `number`. Call this while the receivers call `pull`."""

    def close(self) -> None:  # noqa: B027 - device memory is freed with its last reference
        """Release the resources of this end."""


class Receiver:
    """The receiving end of a transport. Unless a subclass overrides `pull`, buckets are in `memory` of the sender."""

    def __init__(self, device: torch.device, memory: Tensor):
        self.device, self._buffers = device, memory.chunk(BUFFERS)

    def pull(self, number: int, num_bytes: int) -> Tensor:
        """Return the bucket in buffer `number` as a uint8 tensor of shape (num_bytes,).

        It is valid until the sender refills this buffer.
        """
        return self._buffers[number][:num_bytes]


class HostMemory:
    """Anonymous memory (memfd) that another process opens through this process's directory in /proc.

    The kernel frees the memory when no process maps it any more.
    """

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise RolloutError(
                "anonymous shared memory requires Linux; set rollout.name=torch and hybrid_engine=true to generate in "
                "the trainer's process"
            )
        self._file, self._size = os.memfd_create("camshaft-weights"), 0

    def extend(self, size: int) -> Tensor:
        """Append `size` bytes, which are allocated when they are written, and return them as a uint8 tensor.

        Unless it is the last one, `size` must be a multiple of `mmap.ALLOCATIONGRANULARITY`.
        """
        start, self._size = self._size, self._size + size
        os.ftruncate(self._file, self._size)
        return torch.frombuffer(mmap.mmap(self._file, size, offset=start), dtype=torch.uint8)

    def handle(self) -> dict[str, Any]:
        """Return the argument of `open_memory` as a JSON-serializable dict."""
        return {"process": os.getpid(), "file": self._file, "inode": os.fstat(self._file).st_ino}

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class SharedMemory(Sender):
    """Host memory that a receiver on this machine maps."""

    def __init__(self, size: int):
        self._memory = HostMemory()
        self.buffers = self._memory.extend(BUFFERS * size).chunk(BUFFERS)

    def handle(self) -> dict[str, Any]:
        return {"means": "shared_memory", **self._memory.handle()}

    def close(self) -> None:
        self.buffers = ()  # releases this process's mapping of the memory
        self._memory.close()


def open_memory(handle: Mapping[str, Any]) -> Tensor:
    """Map all `HostMemory` of another process into this process, as a uint8 tensor."""
    path = f"/proc/{handle['process']}/fd/{handle['file']}"
    try:
        file = os.open(path, os.O_RDWR)
    except OSError as error:
        raise RolloutError(
            f"cannot open the shared weights of process {handle['process']} ({error}); that process must be alive "
            "and run on this machine, in the same container and as the same user"
        ) from error
    try:
        status = os.fstat(file)
        if status.st_ino != handle["inode"]:
            raise RolloutError(
                f"{path} is not the memory that the sender announced, because the sender has ended; send the weights "
                "again"
            )
        return torch.frombuffer(mmap.mmap(file, status.st_size), dtype=torch.uint8)
    finally:
        os.close(file)


class DeviceMemory(Sender):
    """A tensor on a CUDA device that another process opens by its IPC handle."""

    def __init__(self, device: torch.device, size: int):
        if device.type not in IPC_DEVICES:
            raise RolloutError(
                f"processes can share the memory of a CUDA device only, not of device={device}; set rollout.name=torch "
                "to generate in the trainer's process"
            )
        with _without_expandable_segments(device):
            self._memory = torch.empty(BUFFERS * size, dtype=torch.uint8, device=device)
        self.buffers = self._memory.chunk(BUFFERS)

    def handle(self) -> dict[str, Any]:
        _, arguments = reduce_tensor(self._memory)
        return encode_device_handle(arguments)


@contextlib.contextmanager
def _without_expandable_segments(device: torch.device) -> Iterator[None]:
    """Allocate outside of expandable segments of torch's allocator.

    A process opens their memory with pidfd_getfd, which containers and ptrace restrictions forbid.
    """
    settings = next((os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name)), "").replace(" ", "")
    if "expandable_segments:True" not in settings:
        yield
        return
    release_cache(device)
    memory: Any = torch.get_device_module(device).memory
    # torch resets the settings that a call omits.
    memory._set_allocator_settings(settings.replace("expandable_segments:True", "expandable_segments:False"))
    try:
        yield
    finally:
        memory._set_allocator_settings(settings)


def _open_device_memory(handle: Mapping[str, Any], device: torch.device) -> Receiver:
    """Open the tensor of a `DeviceMemory` sender in this process.

    `device` is the device of the sender in this process, which can have another index there: a server sees only its own
    devices.
    """
    number = handle.get("device") if device.index is None else device.index
    arguments = decode_device_handle({**handle, "device": number})
    try:
        return Receiver(device, rebuild_cuda_tensor(*arguments))
    except RuntimeError as error:
        raise RolloutError(
            f"cannot open the shared device memory of the trainer on {device} ({error}); both processes must run "
            "on this machine, as the same user, and see the same device"
        ) from error


_DEVICE_NUMBERS = (
    "offset", "device", "storage_bytes", "storage_offset_bytes", "reference_offset", "event_sync_required",
)  # fmt: skip
_DEVICE_BYTES = ("storage_handle", "reference_handle", "event_handle")


def encode_device_handle(arguments: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments with which torch opens a shared uint8 vector as a JSON-serializable dict.

    The receiver may get the handle over HTTP, so it contains numbers and byte strings instead of torch's pickle, which
    could run code.
    """
    _, size, _, offset, _, _, device, storage, num_bytes, start, _, reference, reference_offset, event, sync = arguments
    numbers = map(int, (offset, device, num_bytes, start, reference_offset, sync))
    handles = (base64.b64encode(value).decode() for value in (storage, reference, event))
    names = ("means", "size", *_DEVICE_NUMBERS, *_DEVICE_BYTES)
    return dict(zip(names, ("device_memory", size[0], *numbers, *handles), strict=True))


def decode_device_handle(handle: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of `encode_device_handle`. Raise RolloutError if the handle has other entries."""
    try:
        size, numbers = int(handle["size"]), {name: int(handle[name]) for name in _DEVICE_NUMBERS}
        handles = {name: base64.b64decode(handle[name], validate=True) for name in _DEVICE_BYTES}
    except (KeyError, TypeError, ValueError) as error:
        raise RolloutError(
            f"the handle of shared device memory is invalid ({type(error).__name__}: {error}); install the same "
            "version of camshaft on both sides"
        ) from error
    return (
        Tensor, torch.Size([size]), (1,), numbers["offset"], torch.UntypedStorage, torch.uint8, numbers["device"],
        handles["storage_handle"], numbers["storage_bytes"], numbers["storage_offset_bytes"], False,
        handles["reference_handle"], numbers["reference_offset"], handles["event_handle"],
        bool(numbers["event_sync_required"]),
    )  # fmt: skip


class Broadcast(Sender):
    """Broadcast in a separate process group, in which the sender is rank 0 and the receivers are ranks 1 and up."""

    def __init__(self, device: torch.device, size: int, host: str, receivers: int = 1, seconds: float = BUCKET_SECONDS):
        self.buffers = tuple(torch.empty(size, dtype=torch.uint8, device=device) for _ in range(BUFFERS))
        self._host, self._world, self._seconds = host, receivers + 1, seconds
        self._store: Any = create_store(host, None, timedelta(seconds=seconds))
        self._group: Any = None

    def handle(self) -> dict[str, Any]:
        return {
            "means": "broadcast",
            "host": self._host,
            "port": self._store.port,
            "world": self._world,
            "size": len(self.buffers[0]),
            "device": self.buffers[0].device.type,
            "seconds": self._seconds,
        }

    def connect(self) -> None:
        self._group = _create_group(self._store, 0, self._world, self.buffers[0].device, self._seconds)

    def push(self, number: int, num_bytes: int) -> None:
        _broadcast(self._group, self.buffers[number][:num_bytes], self._seconds)

    def close(self) -> None:
        self._group = None


class BroadcastReceiver(Receiver):
    """A receiving rank of a `Broadcast`. The constructor waits until all ranks are connected.

    A broadcast from device memory arrives on `device`, and a broadcast from host memory in host memory.
    """

    def __init__(self, handle: Mapping[str, Any], rank: int, device: torch.device):
        self._seconds = float(handle["seconds"])
        wait = timedelta(seconds=self._seconds)
        try:
            store: Any = TCPStore(handle["host"], handle["port"], is_master=False, timeout=wait)
        except (RuntimeError, ValueError) as error:
            raise RolloutError(
                f"the sender of the weights at {handle['host']}:{handle['port']} does not answer: {error}; check that "
                "the port is reachable from this machine"
            ) from error
        self.device = torch.device("cpu") if handle["device"] == "cpu" else device
        self._buffer = torch.empty(handle["size"], dtype=torch.uint8, device=self.device)
        self._group = _create_group(store, rank, handle["world"], self.device, self._seconds)

    def pull(self, number: int, num_bytes: int) -> Tensor:
        bucket = self._buffer[:num_bytes]  # one buffer suffices: a bucket is read before the next one is pulled
        _broadcast(self._group, bucket, self._seconds)
        return bucket


def _create_group(store: Any, rank: int, world: int, device: torch.device, seconds: float) -> Any:
    """Create a process group without `init_process_group`, because both sides already have a default group."""
    backend = dist.get_default_backend_for_device(device)
    if backend not in ("gloo", "nccl"):
        raise RolloutError(f"a weight broadcast requires gloo or nccl, but device={device} uses {backend}")
    prefixed = PrefixStore("weights", store)
    try:
        if backend == "gloo":
            return dist.ProcessGroupGloo(prefixed, rank, world, timedelta(seconds=seconds))
        return dist.ProcessGroupNCCL(prefixed, rank, world)  # pyright: ignore[reportCallIssue]
    except RuntimeError as error:
        raise RolloutError(
            f"the {world} processes of the weight broadcast did not connect: {error}; check that they can reach "
            "each other"
        ) from error


def _broadcast(group: Any, data: Tensor, seconds: float) -> None:
    wait = timedelta(seconds=seconds)
    try:
        group.broadcast(data, 0, wait).wait(wait)
        synchronize(data.device)
    except RuntimeError as error:
        raise RolloutError(f"the weight broadcast failed: {error}; check that all its processes are alive") from error


def open_sender(device: torch.device, size: int) -> Sender:
    """Open a sender for a receiver on this machine. Buckets have `size` bytes and are on `device`."""
    return SharedMemory(size) if device.type == "cpu" else DeviceMemory(device, size)


def open_receiver(handle: Mapping[str, Any], rank: int = 1, device: torch.device | str = "cpu") -> Receiver:
    """Open the receiving end of the transport that `handle` describes.

    `device` is the device of this process. Only a broadcast uses `rank`. Shared memory is host memory.
    """
    means = handle["means"]
    if means == "shared_memory":
        return Receiver(torch.device("cpu"), open_memory(handle))
    if means == "device_memory":
        return _open_device_memory(handle, torch.device(device))
    if means == "broadcast":
        return BroadcastReceiver(handle, rank, torch.device(device))
    raise RolloutError(f"unknown weight transport '{means}'; install the same version of camshaft on both sides")
