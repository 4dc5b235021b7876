"""Published weights of `camshaft serve`, in the host memory of each machine and in files.

    versions = PublishedVersions(folder, max_in_memory=8)
    versions.add("v1", engine.named_weights())     # on all ranks
    versions.load("v1", rollout)                   # on any rank

    received = ReceivedVersions(folder)            # in a process of another pool
    received.add("v1", versions.snapshots("v1"))
    received.load("v1", rollout)

A version never changes. One rank of each machine writes its weights to memory that the other processes of the machine
map. Beyond `max_in_memory`, the least recently used versions are in files of `folder`, which all machines share, and
are read from there. The files of an earlier process are kept, because the name of a version never has other weights.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from camshaft import storage
from camshaft.engine import Group, on_every_rank, on_rank_zero
from camshaft.errors import CheckpointError, RolloutError
from camshaft.reshard import Snapshot, SnapshotMemory, load_verified, machine_id, receive
from camshaft.rollout import BaseRollout

VERSIONS = "versions"
"""Folder of the weights in the folder of the server."""
FILE = "model.safetensors"
VERSION = "version"
"""Kind of the folders with published weights."""


class LostWeightsError(RolloutError):
    """The weights are not in memory, because the process that had them has ended, and they are not in a file."""


class PublishedVersions:
    """Published weights by name. All ranks have the same ones, and call each method but `load` together."""

    def __init__(self, folder: Path, max_in_memory: int, group: Group = None, writes: bool = True):
        """`group` connects the ranks. Set `writes` on one rank of each machine."""
        self.folder, self.max_in_memory, self.group, self.writes = folder, max_in_memory, group, writes
        self._memories: dict[str, SnapshotMemory] = {}
        """Memories of the versions in memory that this rank has written."""
        self._in_memory: OrderedDict[str, dict[str, Snapshot]] = OrderedDict()
        """Snapshots of the versions in memory, by machine."""
        self._count = 0
        """Number of versions that have been added to memory."""
        self._in_files = set(on_rank_zero(group, self._find_files))

    def _find_files(self) -> list[str]:
        for leftover in self.folder.glob("*"):
            storage.remove_unfinished(leftover)
        return [path.name for path in self.folder.glob("*") if _is_version(path)]

    def __contains__(self, name: str) -> bool:
        return name in self._in_memory or name in self._in_files

    def add(self, name: str, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Copy weights to memory. All ranks pass the same ones, which they may gather together."""
        self._release(name)
        self._count += 1
        snapshots = on_every_rank(self.group, lambda: self._copy(name, weights))
        self._in_memory[name] = {found.machine: found for found in snapshots if found is not None}
        while len(self._in_memory) > self.max_in_memory:
            oldest = next(iter(self._in_memory))
            self.write(oldest)
            self._release(oldest)

    def _copy(self, name: str, weights: Iterator[tuple[str, Tensor]]) -> Snapshot | None:
        """Write weights to memory, if this rank writes."""
        if not self.writes:
            for _ in weights:
                pass
            return None
        self._memories[name] = SnapshotMemory()
        try:
            return self._memories[name].snapshot(weights, self._count)
        except BaseException:
            self._release(name)
            for _ in weights:  # the other ranks go on gathering them
                pass
            raise

    def snapshots(self, name: str) -> list[Snapshot]:
        """Return the snapshots of a version, one for each machine with ranks. There are none if it is in a file."""
        return list(self._in_memory.get(name, {}).values())

    def load(self, name: str, rollout: BaseRollout) -> None:
        """Load weights into a rollout, and verify them."""
        if name in self._in_memory:
            self._in_memory.move_to_end(name)
            receive(self._in_memory[name][machine_id()], rollout)
        elif name in self._in_files:
            _load_file(self.folder / name, rollout)
        else:
            raise RolloutError(f"the weights {name} have been released")

    def write(self, name: str) -> None:
        """Write weights to a file, so that they survive the process."""
        if name in self._in_memory and name not in self._in_files:
            on_rank_zero(self.group, lambda: self._write(name))
            self._in_files.add(name)

    def _write(self, name: str) -> None:
        with storage.new_folder(self._path(name), kind=VERSION) as folder:
            save_file(dict(self._in_memory[name][machine_id()].weights(torch.device("cpu"))), folder / FILE)

    def remove(self, name: str) -> None:
        self._release(name)
        if name in self._in_files:
            self._in_files.discard(name)
            on_rank_zero(self.group, lambda: storage.remove(self._path(name)))

    def retain(self, names: Collection[str]) -> None:
        """Remove all weights but these."""
        for name in {*self._in_memory, *self._in_files}.difference(names):
            self.remove(name)

    def _release(self, name: str) -> None:
        """Free the memory of weights."""
        self._in_memory.pop(name, None)
        memory = self._memories.pop(name, None)
        if memory is not None:
            memory.close()

    def _path(self, name: str) -> Path:
        return self.folder / name


class ReceivedVersions:
    """Weights that the ranks of another pool have published. Each rank has one."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._snapshots: dict[str, Snapshot | None] = {}
        """Snapshot of each version in the memory of this machine. None: it is in a file."""

    def add(self, name: str, snapshots: Sequence[Snapshot]) -> None:
        """Make weights known, with the snapshots of all machines."""
        self._snapshots[name] = next((found for found in snapshots if found.machine == machine_id()), None)

    def load(self, name: str, rollout: BaseRollout) -> None:
        """Load weights into a rollout, and verify them. Raise `LostWeightsError` if they are gone."""
        snapshot = self._snapshots.get(name)
        if snapshot is not None:
            try:
                receive(snapshot, rollout)
                return
            except RolloutError:
                if snapshot.is_readable():  # the memory has not been freed, so this is another error
                    raise
        if not _is_version(self.folder / name):  # to which weights are written before their memory is freed
            raise LostWeightsError(f"the weights {name} are neither in memory nor in a file; publish them again")
        _load_file(self.folder / name, rollout)

    def remove(self, name: str) -> None:
        self._snapshots.pop(name, None)


def _load_file(folder: Path, rollout: BaseRollout) -> None:
    load_verified(iter(load_file(folder / FILE).items()), rollout, "cpu")


def _is_version(folder: Path) -> bool:
    with contextlib.suppress(CheckpointError):
        return storage.is_complete(folder) and storage.read_manifest(folder)["facts"].get("kind") == VERSION
    return False
