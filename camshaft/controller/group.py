"""The proxy: roles on many ranks that look like one role to the driver.

    critic = spawn(CriticWorker, config, world_size=2)
    critic.update_critic(batch)        # go-to-definition opens CriticWorker; a misspelt method is a type error
    shutdown(critic)

    with workers(CriticWorker, config) as critic: ...

A backend turns a `Launch` into `Ranks`: `local.py` here, more beside it in `BACKENDS`. The proxy does the
rest (which methods exist, split, merge) once for all of them.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

from camshaft.controller.dispatch import Call, Dispatch, gather, keeps, registered, scatter
from camshaft.controller.worker import Worker
from camshaft.errors import ConfigError
from camshaft.plugins import import_attribute
from camshaft.seat import Seat

R = TypeVar("R", bound=Worker)

BACKENDS = {"local": "camshaft.controller.local:start"}
"""Each is a function from a `Launch` to the running `Ranks`."""


@dataclass(frozen=True)
class Launch:
    """Which role to start, on how many ranks."""

    role_class: type[Worker]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    world_size: int
    name: str
    """How errors and logs call it."""
    timeout: float
    """Seconds that building the role, or one call, may take."""


class Ranks(ABC):
    """The running ranks of one role, as a backend offers them."""

    @abstractmethod
    def seats(self, method: str) -> list[Seat]:
        """The seat of each rank for a call of `method`, now."""

    @abstractmethod
    def call(self, method: str, calls: Sequence[Call | None], keep: Sequence[bool]) -> list[Any]:
        """Run `method` on every rank that has a call; its result, or None for a rank that is not kept."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the ranks and leave no process behind; a second time does nothing."""


class Proxy:
    """Stands for the role on the driver: each registered method is split, run on the ranks and merged."""

    __slots__ = ("_launch", "_modes", "_ranks")

    def __init__(self, ranks: Ranks, launch: Launch):
        self._ranks = ranks
        self._launch = launch
        self._modes = registered(launch.role_class)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self._modes:
            raise AttributeError(_not_callable(self._launch.role_class, name, list(self._modes)))
        return partial(self._call, name)

    def __dir__(self) -> list[str]:
        return sorted(self._modes)

    def __repr__(self) -> str:
        return f"<{self._launch.name}: {self._launch.role_class.__name__} on {self._launch.world_size} rank(s)>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} lives on the driver and cannot be copied or sent to a worker")

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        mode = self._modes[name]
        world = self._launch.world_size
        # A role may know its seat only after it has built its model, so other modes must not ask for it.
        split = mode is Dispatch.DP_COMPUTE_PROTO
        seats = self._ranks.seats(name) if split else [Seat(rank=rank, world=world) for rank in range(world)]
        calls = scatter(mode, seats, args, kwargs)
        return gather(mode, seats, self._ranks.call(name, calls, keeps(mode, seats)))


def spawn(
    role_class: type[R],
    *args: Any,
    world_size: int = 1,
    backend: str = "local",
    name: str | None = None,
    timeout: float = 3600.0,
    **kwargs: Any,
) -> R:
    """Build `role_class(*args, **kwargs)` on `world_size` ranks; the proxy has the role's static type.

    `timeout` bounds, in seconds, building the role and each call on another process. One local rank lives
    in this process: calls are plain calls, arguments are not copied, exceptions arrive as they were raised.
    """
    if world_size < 1:
        raise ConfigError(f"world_size={world_size}: a role needs at least one rank")
    if backend not in BACKENDS:
        raise ConfigError(f"there is no controller backend '{backend}'; known: {', '.join(BACKENDS)}")
    launch = Launch(role_class, args, kwargs, world_size, name or role_class.__name__, timeout)
    start: Callable[[Launch], Ranks] = import_attribute(BACKENDS[backend])
    return cast(R, Proxy(start(launch), launch))


def shutdown(*roles: Worker) -> None:
    """End what `spawn` started; ended roles may be named again."""
    for role in roles:
        if not isinstance(role, Proxy):
            raise TypeError(f"shutdown takes what spawn returned, not {type(role).__name__}")
        role._ranks.shutdown()


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
