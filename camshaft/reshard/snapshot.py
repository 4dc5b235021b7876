"""Weights of an engine in host memory, from which rollouts in other processes of the machine load them.

    publisher = Publisher(engine, writes=rank == 0)
    publisher.dtypes = rollout.sync_dtypes(publisher.source_dtypes())     # once
    snapshot = publisher.publish(version)                                 # on all ranks of the engine
    sync = receive(snapshot, rollout)                                     # in any number of processes of the machine
    sync = receive(publisher.portable(), rollout)                         # on other machines

`publish` writes all weights once, in the dtypes of the rollout, and returns. The engine can then train: a snapshot does
not change until `publish` has been called as many times as there are `snapshots`, by default once. The sender computes
digests of the weights while it writes them, and `receive` compares them with those that the rollout computes after it
has loaded the weights. A snapshot that was overwritten while it was read, or that holds weights of another version, is
thereby an error. On other machines, the caller transfers the bytes of a portable snapshot.

If the rollout loads adapters, `publish_base` writes the base weights once, to memory that nothing overwrites, for
`receive_base`, and `publish` writes only the adapter.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from camshaft.config.engine import LoRAConfig
from camshaft.engine import BaseEngine
from camshaft.errors import GeneratorError, RolloutError
from camshaft.models.lora import apply_scaling
from camshaft.reshard.hybrid import Sync, SyncState, Weights, verified_sync
from camshaft.rollout import Assembler, BaseRollout, Bucket, HostMemory, open_memory, pack_buckets
from camshaft.rollout.base import load_with_version

SEGMENT = 2**26
"""Bytes by which the memory of a snapshot grows."""


@dataclass(frozen=True)
class Snapshot:
    """Description of published weights, which is sent to their readers."""

    version: int
    machine: str
    """Identifier of the machine whose memory contains the weights."""
    memory: dict[str, Any]
    """Handle of the memory."""
    buckets: list[Bucket]
    """Position of each weight. Bucket i is segment i of the memory."""
    digests: dict[str, int]
    """Digests of the weights, by name, computed while they were written."""
    num_bytes: int
    check_seconds: float
    """Time that the sender has spent on digests."""
    is_adapter: bool = False
    """True if the rollout adds the weights to the base weights that it has received before."""
    content: np.ndarray | None = None
    """Bytes of the memory in a portable snapshot, which processes on any machine can read."""

    def is_readable(self) -> bool:
        """Return False if the memory has been freed, or its process has ended."""
        try:
            return self.content is not None or bool(len(open_memory(self.memory)))
        except RolloutError:
            return False

    def weights(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield a copy of each weight on `device`."""
        memory = open_memory(self.memory) if self.content is None else torch.from_numpy(self.content)
        segments, assembler = memory.split(SEGMENT), Assembler(device)
        for bucket in self.buckets:
            yield from assembler.unpack(bucket.pieces, segments[bucket.buffer][: bucket.num_bytes])
        assembler.finish()


class Publisher:
    """Writes the weights of an engine to host memory. Every rank of the engine has one."""

    def __init__(self, engine: BaseEngine, writes: bool, snapshots: int = 1, lora: LoRAConfig | None = None):
        """Set `writes` on one rank of each machine whose processes read the weights, and on rank 0.

        Each publication overwrites the oldest of `snapshots`, whose readers must have finished. Set `lora` to that of
        the engine if the rollout loads adapters.
        """
        self.engine, self.writes, self.snapshots, self.lora = engine, writes, snapshots, lora
        self.dtypes: Mapping[str, torch.dtype] = {}
        """Dtype in which each weight is written, by name."""
        self._memories: deque[SnapshotMemory] = deque()
        """Memories of the snapshots, the one of the last publication at the end."""
        self._base_memory: SnapshotMemory | None = None
        self._published: Snapshot | None = None

    def source_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype in which the engine stores each weight, by name. All ranks of the engine must call it."""
        dtypes: dict[str, torch.dtype] = {}

        def record(name: str, tensor: Tensor) -> torch.dtype:
            return dtypes.setdefault(name, tensor.dtype)

        with self.engine.share_weights():
            with contextlib.nullcontext() if self.lora is None else self.engine.disable_adapter():
                for _ in self.engine.named_weights(dtype_of=record):
                    pass
            for name, tensor in () if self.lora is None else self.engine.named_weights(adapter_only=True):
                record(name, tensor)
        return dtypes

    def publish(self, version: int) -> Snapshot | None:
        """Write all weights, or the adapter if the rollout loads adapters, and return the snapshot.

        It is None on a rank that does not write. All ranks must call this.
        """
        with self.engine.share_weights():
            if self.lora is None:
                return self._write(self.engine.named_weights(dtype_of=self._dtype_of), version)
            adapter = apply_scaling(self.engine.named_weights(adapter_only=True), self.lora)
            return self._write(((name, tensor.to(self.dtypes[name])) for name, tensor in adapter), version)

    def publish_base(self) -> Snapshot | None:
        """Write the weights without the adapter as version 0, and return the snapshot. All ranks must call this."""
        with self.engine.share_weights(), self.engine.disable_adapter():
            return self._write(self.engine.named_weights(dtype_of=self._dtype_of), 0, is_base=True)

    def _write(self, weights: Weights, version: int, is_base: bool = False) -> Snapshot | None:
        if not self.writes:
            for _ in weights:
                pass
            return None
        if is_base:
            memory = self._base_memory = SnapshotMemory()
        else:
            is_full = len(self._memories) == self.snapshots
            memory = self._memories.popleft() if is_full else SnapshotMemory()
            self._memories.append(memory)
        is_adapter = self.lora is not None and not is_base
        self._published = replace(memory.snapshot(iter(weights), version), is_adapter=is_adapter)
        return self._published

    def _dtype_of(self, name: str, _: Tensor) -> torch.dtype:
        return self.dtypes[name]

    def portable(self) -> Snapshot:
        """Return the snapshot that was published last, with its bytes. This requires `writes`."""
        assert self._published is not None
        used = SEGMENT * (len(self._published.buckets) - 1) + self._published.buckets[-1].num_bytes
        return replace(self._published, content=open_memory(self._published.memory)[:used].numpy())


class SnapshotMemory:
    """Host memory of a snapshot, which grows while the first one is written to it."""

    def __init__(self) -> None:
        self._memory = HostMemory()
        self.segments = [self._memory.extend(SEGMENT)]

    def snapshot(self, weights: Iterator[tuple[str, Tensor]], version: int = 0) -> Snapshot:
        """Write weights, and return their snapshot."""
        sync = Sync(version)
        buckets = list(self.write(sync.record(weights)))
        handle = self._memory.handle()
        return Snapshot(version, machine_id(), handle, buckets, sync.digests, sync.bytes, sync.check_seconds)

    def close(self) -> None:
        """Free the memory when no process reads it any more."""
        self.segments.clear()
        self._memory.close()

    def write(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[Bucket]:
        """Write one bucket after the other, each to a segment of its own."""
        for number, bucket in enumerate(pack_buckets(weights, self.segments)):
            yield bucket
            if number + 1 == len(self.segments):  # before the packer selects the next segment
                self.segments.append(self._memory.extend(SEGMENT))


def receive(snapshot: Snapshot, rollout: BaseRollout) -> Sync:
    """Load a snapshot on this machine, or a portable one, into `rollout`, which stays awake, and verify its weights.

    With an adapter, this includes the base weights, which `receive_base` has loaded.
    """
    start = time.perf_counter()
    _check_machine(snapshot)
    device = rollout.config.device
    load = rollout.load_adapter if snapshot.is_adapter else rollout.load_weights
    with verified_sync(rollout, device, snapshot.version) as sync:
        load_with_version(rollout, load, snapshot.weights(torch.device(device)), version=snapshot.version)
        if snapshot.is_adapter:
            sync.digests.update(SyncState.of(rollout).base or {})
        sync.digests.update(snapshot.digests)
    sync.bytes, sync.check_seconds = snapshot.num_bytes, sync.check_seconds + snapshot.check_seconds
    sync.seconds = time.perf_counter() - start
    return sync


def receive_base(snapshot: Snapshot, rollout: BaseRollout) -> None:
    """Load the base weights of adapters into `rollout`. `receive` verifies them with each adapter."""
    _check_machine(snapshot)
    rollout.wake_up()
    weights = snapshot.weights(torch.device(rollout.config.device))
    load_with_version(rollout, rollout.load_weights, weights, version=snapshot.version)
    SyncState.of(rollout).base = snapshot.digests


def _check_machine(snapshot: Snapshot) -> None:
    if snapshot.content is None and snapshot.machine != machine_id():
        raise GeneratorError(
            f"the published weights are on machine {snapshot.machine}, and this rollout is on {machine_id()}; it was "
            "probably started again on another machine"
        )


def machine_id() -> str:
    """Return an identifier of this machine, or of this container, whose processes can open each other's memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
