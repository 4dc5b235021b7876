"""The base class of roles, the placement of a rank, and the process group of a pool.

    class Critic(Worker):
        def __init__(self, config): ...          # self.rank, self.world and self.device are already set
        @property
        def seat(self) -> Seat: return self.engine.seat

A role constructed directly, without a controller, is rank 0 of 1. Backends of the controller construct roles with
`build_worker` and join the ranks of a pool with `init_process_group`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from camshaft.device import backend_for
from camshaft.seat import Seat

R = TypeVar("R", bound="Worker")


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Placement of one rank: its numbers, device, machine and log folder."""

    rank: int = 0
    world: int = 1
    device: str = "cpu"
    """Device of this rank, such as "cuda:1" or "cpu"."""
    timeout: float = 3600.0
    """Time limit of a collective, in seconds."""
    local_rank: int = 0
    local_world: int = 1
    """Index among the ranks of the pool on this machine, and their number."""
    other_ranks: int = 0
    """Number of ranks of other pools that share the cores of this machine."""
    address: str = "127.0.0.1"
    """Address of this machine, as reached by other machines."""
    pool: str = "workers"
    log_folder: str | None = None
    """Folder for the output of this process; None: the output goes to that of the driver."""


class Worker:
    """Base class of roles. The driver can call the methods that are decorated with `@register`."""

    rank_info: RankInfo = RankInfo()
    """Set on the instance before `__init__`, so that a role does not have to call `super().__init__()`."""

    @property
    def rank(self) -> int:
        return self.rank_info.rank

    @property
    def world(self) -> int:
        return self.rank_info.world

    @property
    def device(self) -> str:
        return self.rank_info.device

    @property
    def seat(self) -> Seat:
        """Position of this rank in the data-parallel layout; by default every rank has its own slice.

        The controller reads it before a call that splits a batch.
        """
        return Seat(rank=self.rank, world=self.world, dp_rank=self.rank, dp_size=self.world)

    def seat_for(self, method: str) -> Seat:
        """Return the seat for calls of `method`; a role with several engines may have several seats."""
        return self.seat


def build_worker(role_class: type[R], rank_info: RankInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> R:
    """Construct `role_class(*args, **kwargs)` with `rank_info` set before `__init__` runs."""
    role = role_class.__new__(role_class)
    role.rank_info = rank_info
    role.__init__(*args, **kwargs)
    return role


def open_store(rank_info: RankInfo) -> tuple[TCPStore, str]:
    """Start the rendezvous store of a pool in this process, on a free port; returns the store and its address."""
    timeout = timedelta(seconds=rank_info.timeout)
    store = TCPStore(rank_info.address, 0, rank_info.world, is_master=True, timeout=timeout, wait_for_workers=False)
    return store, f"tcp://{rank_info.address}:{store.port}"


def init_process_group(rank_info: RankInfo, rendezvous: str, store: TCPStore | None = None) -> None:
    """Join the ranks of a pool in the default process group.

    `rendezvous` is an init_method of torch.distributed; `store` is its store if that runs in this process.
    """
    device = torch.device(rank_info.device)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)  # barriers run on the current device
    timeout = timedelta(seconds=rank_info.timeout)
    if store is None and rendezvous.startswith("tcp://"):
        host, port = rendezvous.removeprefix("tcp://").rsplit(":", 1)
        store = TCPStore(host, int(port), rank_info.world, is_master=False, timeout=timeout)
    dist.init_process_group(
        backend_for(device),
        init_method=rendezvous if store is None else None,
        store=store,
        rank=rank_info.rank,
        world_size=rank_info.world,
        timeout=timeout,
    )
