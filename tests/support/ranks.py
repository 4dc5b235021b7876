"""Run functions on gloo ranks.

    def all_sum(value: float) -> float:              # at the top level of a test module or of support
        total = torch.tensor(value)
        torch.distributed.all_reduce(total)
        return total.item()

    assert run_ranks(all_sum, 2, 1.5) == [3.0, 3.0]

Ranks are processes of the fork server, with one thread each. An exception of a rank is raised in the test, with the
rank's traceback as a note. `run_ranks` starts new ranks. Functions without lasting side effects run faster on ranks
that all tests of this process share, because models, DTensor and FSDP initialize themselves once:

    assert run_warm_ranks(all_sum, 2, 1.5) == [3.0, 3.0]
"""

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from camshaft.contracts.engine.ranks import collect_engines
from camshaft.controller import Dispatch, Options, PoolSpec, Worker, register, spawn
from camshaft.controller.local import LocalPool, process_pool
from camshaft.errors import WorkerError

# Ranks import a test module as tests.unit... from the root of the checkout.
ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


def world_group() -> torch.distributed.ProcessGroup:
    """Return the default process group of this rank."""
    group = torch.distributed.group.WORLD
    assert group is not None
    return group


class _Runner(Worker):
    def __init__(self) -> None:
        torch.set_num_threads(1)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        try:
            return function(*args)
        finally:
            collect_engines()


IDLE_SECONDS = 20.0
"""Time after which shared ranks that nobody calls are shut down. The threads of their groups poll."""
CALLS_PER_PROCESS = 100
"""Number of calls after which shared ranks are replaced, because process groups of tests leave threads and files."""


class Ranks(contextlib.AbstractContextManager["Ranks"]):
    """Ranks that run several functions."""

    def __init__(self) -> None:
        self._pools: dict[int, LocalPool] = {}
        self._num_calls: Counter[int] = Counter()
        self._last_calls: dict[int, float] = {}

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
        """Run a function as `run_ranks` does; after an error the next function gets new ranks."""
        try:
            if self._num_calls[world_size] == CALLS_PER_PROCESS:
                self._shut_down(world_size)
            if world_size not in self._pools:
                options = Options(timeout=timeout, preload=(__name__,))
                self._pools[world_size] = process_pool(PoolSpec(function.__name__, ranks_per_node=world_size), options)
            self._num_calls[world_size] += 1
            pool = self._pools[world_size]
            runner: Any = spawn(_Runner, pool=pool, name=function.__name__, timeout=timeout)  # takes one entry per rank
            results = runner.run([function] * world_size, [args] * world_size)
            self._last_calls[world_size] = time.monotonic()
            return results
        except WorkerError as error:
            self._shut_down(world_size)
            if error.__cause__ is None:
                raise
            error.__cause__.add_note(str(error))
            raise error.__cause__ from None

    def end_idle(self) -> None:
        """Shut down the ranks that have been called last before `IDLE_SECONDS`."""
        for world_size in list(self._pools):
            if time.monotonic() - self._last_calls[world_size] > IDLE_SECONDS:
                self._shut_down(world_size)

    def _shut_down(self, world_size: int) -> None:
        del self._num_calls[world_size]
        if pool := self._pools.pop(world_size, None):
            pool.shutdown()

    def __exit__(self, *_: object) -> None:
        for world_size in list(self._pools):
            self._shut_down(world_size)


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Run `function(*args)` on each rank of a gloo group; returns the results in the order of ranks."""
    with Ranks() as ranks:
        return ranks.run(function, world_size, *args, timeout=timeout)


WARM_RANKS = Ranks()
"""Ranks that all tests of this process share, which `tests/conftest.py` shuts down."""


def run_warm_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Run a function without lasting side effects as `run_ranks` does, on ranks that have run other functions."""
    return WARM_RANKS.run(function, world_size, *args, timeout=timeout)
