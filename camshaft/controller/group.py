"""Pools of ranks, and worker groups that run a role on the ranks of a pool.

    critic = spawn(CriticWorker, config, world_size=2)
    critic.update_critic(batch)        # type checkers treat `critic` as a CriticWorker
    shutdown(critic)

    with pools([PoolSpec("a", ranks_per_node=2), PoolSpec("b")], backend="ray") as (a, b):
        actor = spawn(Actor, config, pool=a)
        critic = spawn(Critic, config, pool=a)             # in the same two processes
        values = submit(critic.compute_values, batch)      # returns a Pending[DataProto] immediately
        scores = spawn(Scorer, pool=b).score(batch)        # runs at the same time in the other pool
        batch = batch.union(values.result())

A pool has one process per rank, each with one device. A `WorkerGroup` splits the arguments of a call according to the
seats of its ranks, runs the method on the ranks and merges the results. `InProcessPool` is a pool of a single rank in
the driver's own process. `process_pool.py` contains the base class of all other pools. `local.py` and `ray.py` contain
the backends that start them.
"""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import methodcaller
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar, cast

from camshaft.controller.resources import PoolSpec
from camshaft.controller.worker import (
    Call,
    Dispatch,
    RankInfo,
    Worker,
    build_worker,
    gather,
    registered_methods,
    result_slot,
    scatter,
    seat_keeping_methods,
)
from camshaft.errors import ConfigError, WorkerError
from camshaft.plugins import import_attribute
from camshaft.seat import Seat
from camshaft.subprocesses import Limit, limit_waits

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=Worker)

BACKENDS = {"local": "camshaft.controller.local:start", "ray": "camshaft.controller.ray_environment:start"}
"""Import path of each backend, by name. A backend is a function that takes pool specs and `Options` and returns the
running pools in the same order. It starts all of them or none."""


@dataclass(frozen=True)
class Options:
    """Options with which a backend starts pools."""

    timeout: float = 3600.0
    """Time limit of a call, in seconds. Collectives inside the call time out a little later."""
    setting: str = "Options(timeout=...)"
    """Name of the setting that determines `timeout`, for messages."""
    limits: Mapping[str, Limit] = field(default_factory=dict[str, Limit])
    """Limits of the methods whose limit is not `timeout`, by method name."""
    log_folder: str | None = None
    """Folder for the output of the workers, with one file per rank. If None, workers share the output of the driver."""
    preload: tuple[str, ...] = ()
    """Modules that worker processes may import while they start."""
    import_main: bool = True
    """Import the main module of the driver in local worker processes, so that roles can be classes of it."""
    restored: tuple[str, ...] = ()
    """Methods that set the state of a role. A pool that starts again repeats the last call of each."""
    ray_init: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of `ray.init`. Only the backend `ray` reads them."""

    def limit(self, method: str) -> Limit:
        """Return the time limit of calls of a method."""
        return self.limits.get(method) or Limit(self.timeout, f"{self.setting}={self.timeout:g}")

    def longest_timeout(self) -> float:
        """Return the time limit of the slowest method, in seconds."""
        return max(self.timeout, *(limit.seconds for limit in self.limits.values()), 0.0)


@dataclass(frozen=True)
class RoleSpec:
    """Specification of a role to build: its class, arguments, name and time limit."""

    role_class: type[Worker]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    """Name of the role in errors and logs."""
    timeout: float | None
    """Time limit, in seconds, for building the role and for each call. If None, the options of the pool apply."""

    def limit(self, method: str, options: Options) -> Limit:
        """Return the time limit of calls of a method in a pool with these options."""
        if self.timeout is None:
            return options.limit(method)
        return Limit(self.timeout, f"spawn(..., timeout={self.timeout:g})")


Answers = Iterable[tuple[int, Any]]
"""Pairs of rank and result in the order in which the ranks answer. It can be iterated several times."""
Listener = Callable[[int, Any], None]
"""Function that is called with the rank and the result of each answer."""


class LateAnswers(ABC):
    """Answers that arrive after the call was submitted."""

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[int, Any]]: ...

    @abstractmethod
    def listen(self, listener: Listener) -> None:
        """Call `listener` with each answer as soon as it is there."""


class Pending(Generic[T]):
    """The result of a call that may still be running."""

    def __init__(self, mode: Dispatch, seats: Sequence[Seat], answers: Answers):
        self._mode, self._seats = mode, seats
        self._answers: Answers | None = answers
        self._value: T

    def parts(self) -> Iterator[tuple[int, T]]:
        """Yield the index and the value of each part of the result as soon as its rank answers.

        The index is the dp_rank in a data-parallel call. Raise the error of the call if it fails. Call this before
        `result`, which releases the parts.
        """
        assert self._answers is not None, "parts() was called after result()"
        for rank, answer in self._answers:
            slot = result_slot(self._mode, self._seats[rank])
            if slot is not None:
                yield slot, answer

    def listen(self, listener: Callable[[int, T], None]) -> None:
        """Call `listener` with the index and the value of each part, as `parts` yields them, when it arrives.

        Parts arrive while the driver waits for this call or for any other one. Call this before `result`.
        """
        assert self._answers is not None, "listen() was called after result()"

        def on_answer(rank: int, answer: Any) -> None:
            slot = result_slot(self._mode, self._seats[rank])
            if slot is not None:
                listener(slot, answer)

        if isinstance(self._answers, LateAnswers):
            self._answers.listen(on_answer)
        else:
            for rank, answer in self._answers:
                on_answer(rank, answer)

    def result(self) -> T:
        """Wait for the result and return it. Raise the error of the call if it fails."""
        if self._answers is not None:
            answers = dict(self._answers)
            self._value = gather(self._mode, self._seats, [answers.get(rank) for rank in range(len(self._seats))])
            self._answers = None
        return self._value


class Pool(ABC):
    """A set of running ranks. Each rank may hold several roles."""

    def __init__(self, spec: PoolSpec):
        self.spec = spec
        self.busy_seconds = [0.0] * spec.world_size
        """Time for which each rank has executed requests, if the ranks are other processes."""

    @property
    def world_size(self) -> int:
        return self.spec.world_size

    @abstractmethod
    def build(self, role: RoleSpec) -> int:
        """Build a role on every rank and return its key, which identifies it in other methods."""

    @abstractmethod
    def seats(self, key: int, method: str) -> list[Seat]:
        """Return the current seat of each rank for a call of `method`."""

    @abstractmethod
    def submit(self, key: int, method: str, calls: Sequence[Call | None], send_result: Sequence[bool]) -> Answers:
        """Run `method` on every rank whose call is not None, after the earlier requests of that rank.

        Return without waiting if the ranks are other processes. A rank sends None instead of its result if its entry
        of `send_result` is False.
        """

    @abstractmethod
    def drop(self, key: int) -> None:
        """Delete a role. The processes keep running."""

    @abstractmethod
    def shutdown(self) -> None:
        """End all processes of the pool. Calling it again has no effect."""


class InProcessPool(Pool):
    """A pool of one rank in this process. Roles are local objects, and their exceptions propagate unchanged."""

    def __init__(self, spec: PoolSpec, device: str, options: Options):
        super().__init__(spec)
        self._rank_info = RankInfo(device=device, pool=spec.name)
        self._options = options
        self._roles: list[tuple[RoleSpec, Worker | None]] = []

    def build(self, role: RoleSpec) -> int:
        with limit_waits(role.limit("__init__", self._options)):
            self._roles.append((role, build_worker(role.role_class, self._rank_info, role.args, role.kwargs)))
        return len(self._roles) - 1

    def seats(self, key: int, method: str) -> list[Seat]:
        return [self._get_role(key).seat_for(method)]

    def submit(self, key: int, method: str, calls: Sequence[Call | None], send_result: Sequence[bool]) -> Answers:
        (call,) = calls
        assert call is not None
        args, kwargs = call
        with limit_waits(self._roles[key][0].limit(method, self._options)):
            return [(0, methodcaller(method, *args, **kwargs)(self._get_role(key)))]

    def drop(self, key: int) -> None:
        self._roles[key] = self._roles[key][0], None

    def shutdown(self) -> None:
        for key in range(len(self._roles)):
            self.drop(key)

    def _get_role(self, key: int) -> Worker:
        spec, role = self._roles[key]
        if role is None:
            raise WorkerError(f"role {spec.name} was shut down; spawn it again")
        return role


@dataclass(frozen=True)
class SpawnedRole:
    """A role that has been built on the ranks of a pool."""

    pool: Pool
    spec: RoleSpec
    owns_pool: bool
    """True if the pool ends with the role."""
    key: int
    modes: Mapping[str, Dispatch]
    """Dispatch mode of each registered method."""
    keeps_seats: frozenset[str]
    """Names of the registered methods that never change the seats."""
    seats: dict[str, list[Seat]] = field(default_factory=dict[str, list[Seat]])
    """Seats of the ranks by method name, read at the first call that needs them."""


class WorkerGroup:
    """The workers of one role, one on each rank of a pool. It has the registered methods of the role.

    `spawn` returns a group typed as its role. Accessing a registered method returns a `GroupMethod`. Accessing any
    other attribute but `spawned` raises an error.
    """

    __slots__ = ("spawned",)

    def __init__(self, pool: Pool, role: RoleSpec, owns_pool: bool):
        methods = registered_methods(role.role_class), seat_keeping_methods(role.role_class)
        self.spawned = SpawnedRole(pool, role, owns_pool, pool.build(role), *methods)

    def __getattr__(self, name: str) -> "GroupMethod":
        modes = self.spawned.modes
        if name not in modes:
            raise AttributeError(_not_registered(self.spawned.spec.role_class, name, list(modes)))
        return GroupMethod(self.spawned, name, modes[name])

    def __dir__(self) -> list[str]:
        return sorted(self.spawned.modes)

    def __repr__(self) -> str:
        role, pool = self.spawned.spec, self.spawned.pool
        return f"<{role.name}: {role.role_class.__name__} on {pool.world_size} rank(s)>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be copied or sent to a worker; use it only in the driver")


class GroupMethod:
    """A registered method of a worker group, which can be called or passed to `submit`."""

    __slots__ = ("mode", "name", "role")

    def __init__(self, role: SpawnedRole, name: str, mode: Dispatch):
        self.role, self.name, self.mode = role, name, mode

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return submit(self, *args, **kwargs).result()


def spawn(
    role_class: type[R],
    *args: Any,
    world_size: int | None = None,
    backend: str | None = None,
    pool: Pool | None = None,
    name: str | None = None,
    timeout: float | None = None,
    **kwargs: Any,
) -> R:
    """Build `role_class(*args, **kwargs)` on every rank of `pool` and return the `WorkerGroup`, typed as the role.

    Without `pool`, start a new pool of `world_size` ranks that the role does not share. `timeout` is the time limit, in
    seconds, for building the role and for each call in another process. If it is None, the options of the pool apply.
    A single local rank runs in this process, so arguments are not copied and exceptions propagate unchanged.
    """
    role = RoleSpec(role_class, args, kwargs, name or role_class.__name__, timeout)
    if pool is not None:
        if world_size is not None or backend is not None:
            raise ConfigError(
                f"{role.name}: spawn() got pool together with world_size or backend, which the pool determines; pass "
                "only pool"
            )
        return cast(R, WorkerGroup(pool, role, owns_pool=False))
    ranks = 1 if world_size is None else world_size
    spec = PoolSpec(role.name, ranks_per_node=ranks, roles=(role.name,))
    options = Options(preload=(role_class.__module__,))
    if timeout is not None:
        options = replace(options, timeout=timeout, setting="spawn(timeout=...)")
    (new_pool,) = start_pools([spec], backend or "local", options)
    try:
        return cast(R, WorkerGroup(new_pool, role, owns_pool=True))
    except BaseException:
        new_pool.shutdown()
        raise


def submit(method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Pending[T]:
    """Start a call of a worker group's method and return its pending result.

    Calls on one pool run in the order of submission. On an `InProcessPool`, the call ends before `submit` returns.
    """
    if not isinstance(method, GroupMethod):
        raise TypeError(f"submit() got {method!r}; pass a method of a spawned role, such as critic.compute_values")
    role, mode = method.role, method.mode
    if mode is Dispatch.DP_COMPUTE_PROTO:
        seats = _seats_of(method)
    else:
        # A role may have no seats before its model is built, so these modes do not read them. Calls may change them.
        if method.name not in role.keeps_seats:
            role.seats.clear()
        seats = [Seat(rank=rank, world=role.pool.world_size) for rank in range(role.pool.world_size)]
    calls = scatter(mode, seats, args, kwargs)
    send_result = [result_slot(mode, seat) is not None for seat in seats]
    return Pending(mode, seats, role.pool.submit(role.key, method.name, calls, send_result))


def _seats_of(method: GroupMethod) -> list[Seat]:
    """Return the seats of the ranks for a method. Unless they are known, this waits for the calls of the pool."""
    if method.name not in method.role.seats:
        method.role.seats[method.name] = method.role.pool.seats(method.role.key, method.name)
    return method.role.seats[method.name]


def prepare_call(method: Callable[..., Any]) -> None:
    """Read the seats of a method now, so that a later `submit` does not wait for the calls in progress."""
    if isinstance(method, GroupMethod) and method.mode is Dispatch.DP_COMPUTE_PROTO:
        _seats_of(method)


def pools_of(roles: Iterable[Worker]) -> dict[str, Pool]:
    """Return the pools of spawned roles by name."""
    groups = (role.spawned for role in roles if isinstance(role, WorkerGroup))
    return {group.pool.spec.name: group.pool for group in groups}


def shutdown(*roles: Worker) -> None:
    """End spawned roles and the pools that `spawn` started for them. Calling it again has no effect."""
    for role in roles:
        if not isinstance(role, WorkerGroup):
            raise TypeError(f"shutdown() got {type(role).__name__}; pass roles returned by spawn()")
        spawned = role.spawned
        if spawned.owns_pool:
            spawned.pool.shutdown()
        else:
            spawned.pool.drop(spawned.key)


@contextmanager
def workers(role_class: type[R], *args: Any, **kwargs: Any) -> Generator[R]:
    """Spawn a role for a `with` block. The arguments are those of `spawn`."""
    role = spawn(role_class, *args, **kwargs)
    try:
        yield role
    finally:
        shutdown(role)


def start_pools(specs: Sequence[PoolSpec], backend: str = "local", options: Options | None = None) -> list[Pool]:
    """Start all pools or none. The caller must shut them down."""
    for spec in specs:
        if spec.world_size < 1:
            raise ConfigError(f"pool '{spec.name}' has world_size={spec.world_size}; use at least 1 rank")
    if backend not in BACKENDS:
        raise ConfigError(f"unknown controller backend '{backend}'; use one of: {', '.join(BACKENDS)}")
    start: Callable[[Sequence[PoolSpec], Options], list[Pool]] = import_attribute(BACKENDS[backend])
    return start(specs, options or Options())


@contextmanager
def pools(specs: Sequence[PoolSpec], backend: str = "local", options: Options | None = None) -> Generator[list[Pool]]:
    """Start pools for a `with` block."""
    running_pools = start_pools(specs, backend, options)
    try:
        yield running_pools
    finally:
        for running_pool in running_pools:
            running_pool.shutdown()


@contextmanager
def pool(spec: PoolSpec, backend: str = "local", options: Options | None = None) -> Generator[Pool]:
    """Start one pool for a `with` block."""
    with pools([spec], backend, options) as (running_pool,):
        yield running_pool


def _not_registered(role_class: type, name: str, methods: list[str]) -> str:
    """Return an error message that states why the driver cannot call `name`."""
    close = difflib.get_close_matches(name, methods, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"registered methods: {', '.join(methods) or 'none'}"
    if name in dir(role_class):
        reason = "is not decorated with @register(dispatch_mode=...), so the driver cannot call it"
        return f"{role_class.__name__}.{name} {reason}; {hint}"
    return f"{role_class.__name__} has no method '{name}'; {hint}"
