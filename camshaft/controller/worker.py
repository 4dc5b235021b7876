"""The base class of roles, and what a rank knows of its place.

    class Critic(Worker):
        def __init__(self, config): ...          # self.rank, self.world, self.device are known here
        @property
        def seat(self) -> Seat: return self.engine.seat

A role can be built by hand, without a controller: it then is rank 0 of 1. Backends of the controller
build it with `build_worker`, and ranks that form a group meet through `init_process_group`.
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
class Place:
    """What a backend of the controller tells one rank."""

    rank: int = 0
    world: int = 1
    device: str = "cpu"
    """The accelerator that is this rank's to use, "cuda:1" say; "cpu" where there is none."""
    timeout: float = 3600.0
    """Seconds that a collective may take."""
    local_rank: int = 0
    local_world: int = 1
    """The rank among those of its pool on its machine, and how many these are."""
    beside: int = 0
    """Ranks of other pools that share the cores of its machine."""
    address: str = "127.0.0.1"
    """Of its machine, as the others reach it."""
    pool: str = "workers"
    log_folder: str | None = None
    """Where what the process writes goes; None: where the driver's goes."""


class Worker:
    """A role: a plain class with some methods that the driver may call (`@register`)."""

    place: Place = Place()
    """Set on the instance before `__init__`, so that a role need not call `super().__init__()`."""

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world(self) -> int:
        return self.place.world

    @property
    def device(self) -> str:
        return self.place.device

    @property
    def seat(self) -> Seat:
        """Data-parallel over all ranks, unless a role says otherwise. Read before every call that splits a batch."""
        return Seat(rank=self.rank, world=self.world, dp_rank=self.rank, dp_size=self.world)

    def seat_for(self, method: str) -> Seat:
        """The seat by which a call of `method` is split; a role made of several engines may have several."""
        return self.seat


def build_worker(role_class: type[R], place: Place, args: Sequence[Any], kwargs: Mapping[str, Any]) -> R:
    """`role_class(*args, **kwargs)` at `place`."""
    role = role_class.__new__(role_class)
    role.place = place
    role.__init__(*args, **kwargs)
    return role


def open_store(place: Place) -> tuple[TCPStore, str]:
    """A store that the ranks can meet through, in this process, and its address."""
    wait = timedelta(seconds=place.timeout)
    store = TCPStore(place.address, 0, place.world, is_master=True, timeout=wait, wait_for_workers=False)
    return store, f"tcp://{place.address}:{store.port}"


def init_process_group(place: Place, rendezvous: str, store: TCPStore | None = None) -> None:
    """Meet the other ranks at `rendezvous`, an init_method of torch.distributed; `store` if it is in this process."""
    device = torch.device(place.device)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)  # a barrier uses the current one
    wait = timedelta(seconds=place.timeout)
    if store is None and rendezvous.startswith("tcp://"):
        host, port = rendezvous.removeprefix("tcp://").rsplit(":", 1)
        store = TCPStore(host, int(port), place.world, is_master=False, timeout=wait)
    dist.init_process_group(
        backend_for(device),
        init_method=rendezvous if store is None else None,
        store=store,
        rank=place.rank,
        world_size=place.world,
        timeout=wait,
    )
