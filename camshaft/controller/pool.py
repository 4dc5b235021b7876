"""Pools: processes with a device each, in which roles live together.

    with pool(PoolSpec(ranks_per_node=2)) as devices:
        actor = spawn(Actor, config, pool=devices)
        critic = spawn(Critic, config, pool=devices)       # in the same two processes

    with pools([PoolSpec("a", ranks_per_node=2), PoolSpec("b")], backend="ray") as (a, b): ...

A backend turns specs into running pools: `local.py` on this machine, `ray.py` on a cluster. What a pool offers to the
proxies of `group.py` is `Pool`; `InProcess` is the pool of one rank that is this process, `processes.py` all others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, Generic, TypeVar

from camshaft.controller.dispatch import Call, Dispatch, gather, place
from camshaft.controller.resources import PoolSpec
from camshaft.controller.worker import Place, Worker, build_worker
from camshaft.errors import ConfigError, WorkerError
from camshaft.plugins import import_attribute
from camshaft.seat import Seat

T = TypeVar("T")

BACKENDS = {"local": "camshaft.controller.local:start", "ray": "camshaft.controller.ray:start"}
"""Each is a function from specs and `Options` to the running pools, in order; it starts all of them or none."""


@dataclass(frozen=True)
class Options:
    """How a backend starts pools."""

    timeout: float = 3600.0
    """Seconds that a call may take; collectives inside give up a little later."""
    log_folder: str | None = None
    """Where the workers' output goes, a file for each; None: where the driver's goes."""
    preload: tuple[str, ...] = ()
    """Modules of the roles to come, which workers may import before they are asked for."""
    ray_init: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `ray.init`, for the backend of that name."""


@dataclass(frozen=True)
class Launch:
    """Which role to start."""

    role_class: type[Worker]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    """How errors and logs call it."""
    timeout: float
    """Seconds that building the role, or one call, may take."""


Answers = Callable[[], Iterator[tuple[int, Any]]]
"""Gives (rank, what it answered) in the order in which the ranks answer, from the first on each time it is called."""


class Pending(Generic[T]):
    """The result of a call that may still be running."""

    def __init__(self, mode: Dispatch, seats: Sequence[Seat], answers: Answers):
        self._mode, self._seats = mode, seats
        self._answers: Answers | None = answers
        self._value: T

    def parts(self) -> Iterator[tuple[int, T]]:
        """Each part of the result when its rank has answered, with its place: in a data-parallel call, its dp_rank.

        Raises what the call raised. `result` gives the same parts as one, and has let go of them then.
        """
        assert self._answers is not None, "the parts come before the result"
        for rank, answer in self._answers():
            number = place(self._mode, self._seats[rank])
            if number is not None:
                yield number, answer

    def result(self) -> T:
        """Wait for it; raises what the call raised."""
        if self._answers is not None:
            found = dict(self._answers())
            self._value = gather(self._mode, self._seats, [found.get(rank) for rank in range(len(self._seats))])
            self._answers = None
        return self._value


class Pool(ABC):
    """Running processes."""

    def __init__(self, spec: PoolSpec):
        self.spec = spec

    @property
    def world_size(self) -> int:
        return self.spec.world_size

    @abstractmethod
    def build(self, launch: Launch) -> int:
        """Build a role on every rank; the number by which it is called."""

    @abstractmethod
    def seats(self, key: int, method: str) -> list[Seat]:
        """The seat of each rank for a call of `method`, now."""

    @abstractmethod
    def submit(self, key: int, method: str, calls: Sequence[Call | None], keep: Sequence[bool]) -> Answers:
        """Run `method` on every rank that has a call, after what the rank was asked before.

        Returns what waits for the answers; a rank that is not kept answers None.
        """

    @abstractmethod
    def drop(self, key: int) -> None:
        """End a role; the processes go on."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the processes and leave none behind; a second time does nothing."""


class InProcess(Pool):
    """One rank: roles are objects of this process, and what they raise is raised by the call."""

    def __init__(self, spec: PoolSpec, device: str):
        super().__init__(spec)
        self._place = Place(device=device, pool=spec.name)
        self._roles: list[tuple[str, Worker | None]] = []

    def build(self, launch: Launch) -> int:
        role = build_worker(launch.role_class, self._place, launch.args, launch.kwargs)
        self._roles.append((launch.name, role))
        return len(self._roles) - 1

    def seats(self, key: int, method: str) -> list[Seat]:
        return [self._running(key).seat_for(method)]

    def submit(self, key: int, method: str, calls: Sequence[Call | None], keep: Sequence[bool]) -> Answers:
        (call,) = calls
        assert call is not None
        args, kwargs = call
        result = methodcaller(method, *args, **kwargs)(self._running(key))
        return lambda: iter([(0, result)])

    def drop(self, key: int) -> None:
        self._roles[key] = self._roles[key][0], None

    def shutdown(self) -> None:
        for key in range(len(self._roles)):
            self.drop(key)

    def _running(self, key: int) -> Worker:
        name, role = self._roles[key]
        if role is None:
            raise WorkerError(f"{name} was shut down; spawn it again")
        return role


def start_pools(specs: Sequence[PoolSpec], backend: str = "local", options: Options | None = None) -> list[Pool]:
    """All pools, running, or an error that says which has no place; who starts them ends them."""
    for spec in specs:
        if spec.world_size < 1:
            raise ConfigError(f"world_size={spec.world_size}: a role needs at least one rank")
    if backend not in BACKENDS:
        raise ConfigError(f"there is no controller backend '{backend}'; known: {', '.join(BACKENDS)}")
    start: Callable[[Sequence[PoolSpec], Options], list[Pool]] = import_attribute(BACKENDS[backend])
    return start(specs, options or Options())


@contextmanager
def pools(specs: Sequence[PoolSpec], backend: str = "local", options: Options | None = None) -> Iterator[list[Pool]]:
    """`start_pools` for the length of a block."""
    started = start_pools(specs, backend, options)
    try:
        yield started
    finally:
        for one in started:
            one.shutdown()


@contextmanager
def pool(spec: PoolSpec, backend: str = "local", options: Options | None = None) -> Iterator[Pool]:
    """One pool for the length of a block."""
    with pools([spec], backend, options) as (one,):
        yield one
