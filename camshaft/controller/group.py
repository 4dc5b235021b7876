"""The proxy: roles on many ranks that look like one role to the driver.

    critic = spawn(CriticWorker, config, world_size=2)
    critic.update_critic(batch)        # go-to-definition opens CriticWorker; a misspelt method is a type error
    shutdown(critic)

    with workers(CriticWorker, config) as critic: ...

    values = submit(critic.compute_values, batch)      # does not wait: Pending[DataProto]
    scores = reward_model.compute_rm_score(batch)      # meanwhile, in another pool
    for dp_rank, part in values.parts(): ...           # as the ranks answer, if that is of use
    batch = batch.union(values.result())

A role lives in a pool (`pool.py`), in one of its own unless it is given one. The proxy does what is the same for all
pools: which methods exist, split, merge.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

from camshaft.controller.dispatch import Dispatch, place, registered, scatter
from camshaft.controller.pool import Launch, Options, Pending, Pool, start_pools
from camshaft.controller.resources import PoolSpec
from camshaft.controller.worker import Worker
from camshaft.errors import ConfigError
from camshaft.seat import Seat

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=Worker)


class Method:
    """A method of a role, as the proxy shows it: called, or submitted."""

    __slots__ = ("_mode", "_name", "_proxy")

    def __init__(self, proxy: Proxy, name: str, mode: Dispatch):
        self._proxy, self._name, self._mode = proxy, name, mode

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.submit(*args, **kwargs).result()

    def submit(self, *args: Any, **kwargs: Any) -> Pending[Any]:
        mode, pool, key = self._mode, self._proxy._pool, self._proxy._key
        if mode is Dispatch.DP_COMPUTE_PROTO:
            seats = self._proxy._seats_for(self._name)
        else:
            # A role may know its seat only after it has built its model, so other modes must not ask for it; and
            # such a call may be the one that changes it.
            self._proxy._seats.clear()
            seats = [Seat(rank=rank, world=pool.world_size) for rank in range(pool.world_size)]
        calls = scatter(mode, seats, args, kwargs)
        keep = [place(mode, seat) is not None for seat in seats]
        return Pending(mode, seats, pool.submit(key, self._name, calls, keep))


class Proxy:
    """Stands for the role on the driver: each registered method is split, run on the ranks and merged."""

    __slots__ = ("_key", "_launch", "_modes", "_own_pool", "_pool", "_seats")

    def __init__(self, pool: Pool, launch: Launch, own_pool: bool):
        self._pool, self._launch, self._own_pool = pool, launch, own_pool
        self._modes = registered(launch.role_class)
        self._seats: dict[str, list[Seat]] = {}
        self._key = pool.build(launch)

    def __getattr__(self, name: str) -> Method:
        if name not in self._modes:
            raise AttributeError(_not_callable(self._launch.role_class, name, list(self._modes)))
        return Method(self, name, self._modes[name])

    def __dir__(self) -> list[str]:
        return sorted(self._modes)

    def __repr__(self) -> str:
        return f"<{self._launch.name}: {self._launch.role_class.__name__} on {self._pool.world_size} rank(s)>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} lives on the driver and cannot be copied or sent to a worker")

    def _seats_for(self, name: str) -> list[Seat]:
        if name not in self._seats:
            self._seats[name] = self._pool.seats(self._key, name)
        return self._seats[name]


def spawn(
    role_class: type[R],
    *args: Any,
    world_size: int | None = None,
    backend: str | None = None,
    pool: Pool | None = None,
    name: str | None = None,
    timeout: float = 3600.0,
    **kwargs: Any,
) -> R:
    """Build `role_class(*args, **kwargs)` on every rank of `pool`; the proxy has the role's static type.

    Without `pool` the role gets one of its own, of `world_size` ranks. `timeout` bounds, in seconds, building the role
    and each call on another process. One local rank lives in this process: calls are plain calls, arguments are not
    copied, exceptions arrive as they were raised.
    """
    launch = Launch(role_class, args, kwargs, name or role_class.__name__, timeout)
    if pool is not None:
        if world_size is not None or backend is not None:
            raise ConfigError(
                f"{launch.name} is to live in a pool, whose world_size and backend are not for spawn to say"
            )
        return cast(R, Proxy(pool, launch, own_pool=False))
    ranks = 1 if world_size is None else world_size
    spec = PoolSpec(launch.name, ranks_per_node=ranks, roles=(launch.name,))
    (own,) = start_pools([spec], backend or "local", Options(timeout=timeout, preload=(role_class.__module__,)))
    try:
        return cast(R, Proxy(own, launch, own_pool=True))
    except BaseException:
        own.shutdown()
        raise


def submit(method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Pending[T]:
    """Start a call of a role's method and come back at once; calls of one pool run in the order of their start.

    A role in this process has no other time to run than now: its call is over when `submit` returns.
    """
    if not isinstance(method, Method):
        raise TypeError(f"submit takes a method of what spawn returned, not {method!r}")
    return method.submit(*args, **kwargs)


def shutdown(*roles: Worker) -> None:
    """End what `spawn` started; ended roles may be named again. A pool that was given goes on."""
    for role in roles:
        if not isinstance(role, Proxy):
            raise TypeError(f"shutdown takes what spawn returned, not {type(role).__name__}")
        if role._own_pool:
            role._pool.shutdown()
        else:
            role._pool.drop(role._key)


@contextmanager
def workers(role_class: type[R], *args: Any, **kwargs: Any) -> Iterator[R]:
    """`spawn` for the length of a block; takes the same arguments."""
    role = spawn(role_class, *args, **kwargs)
    try:
        yield role
    finally:
        shutdown(role)


def _not_callable(role_class: type, name: str, known: list[str]) -> str:
    """One sentence for whoever asked a proxy for something that the driver cannot call."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"registered: {', '.join(known) or 'none'}"
    if name in dir(role_class):
        return f"{role_class.__name__}.{name} is not decorated with @register(dispatch_mode=...) for the driver; {hint}"
    return f"{role_class.__name__} has no method '{name}'; {hint}"
