"""The harness of the controller contract, which starts pools of the tested backend, and helpers of the rules."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from camshaft.contracts.controller.roles import Toy
from camshaft.contracts.rules import Violation, expect
from camshaft.controller import Options, Pool, PoolSpec, Worker, spawn
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import WorkerError
from camshaft.subprocesses import is_running

R = TypeVar("R", bound=Worker)
Start = Callable[[Sequence[PoolSpec], Options], list[Pool]]
"""A controller backend: a function that starts all pools or none."""


class ControllerHarness:
    """Harness for one backend, with a scratch folder. Each rule gets a new folder."""

    worlds = (1, 2, 4)
    """Sizes of the pools on which `each_world` runs a rule."""

    def __init__(self, start: Start, folder: str | Path):
        self.start, self.folder = start, Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def pools(self, *sizes: int, max_restarts: int = 0, **options: Any) -> Iterator[list[Pool]]:
        """Start one pool for each size with these `Options`, and shut all of them down on exit."""
        specs = [
            PoolSpec(f"pool{number}", ranks_per_node=size, max_restarts=max_restarts)
            for number, size in enumerate(sizes)
        ]
        pools = self.start(specs, Options(timeout=60, preload=(Toy.__module__,), **options))
        try:
            yield pools
        finally:
            for pool in pools:
                pool.shutdown()

    @contextlib.contextmanager
    def role(self, role_class: type[R] = Toy, world: int = 2, timeout: float = 60, **options: Any) -> Iterator[R]:
        """Build a role on a new pool of `world` ranks."""
        with self.pools(world) as (pool,):
            yield spawn(role_class, pool=pool, timeout=timeout, **options)

    @contextlib.contextmanager
    def each_world(self, role_class: type[R] = Toy, **options: Any) -> Iterator[Iterator[tuple[int, R]]]:
        """Yield an iterator of (world, role) over the sizes in `worlds`. A role ends before the next one is built."""
        with contextlib.ExitStack() as stack:

            def roles() -> Iterator[tuple[int, R]]:
                for world in self.worlds:
                    stack.close()
                    yield world, stack.enter_context(self.role(role_class, world, **options))

            yield roles()

    def allow_answer(self, rank: int, error: str = "") -> str:
        """Let a rank return from `Toy.wait_for_file`, or raise KeyError(error) if `error` is not empty.

        Return the folder, which is the argument of `Toy.wait_for_file`.
        """
        draft = self.folder / "draft"
        draft.write_text(error)
        draft.rename(self.folder / str(rank))
        return str(self.folder)


def eight_rows() -> DataProto:
    """Return a batch of eight rows. Row i has the tokens 0, ..., i % 3 - 1 and the uid `u<i>`."""
    tokens = Ragged.from_rows([torch.arange(row % 3).float() for row in range(8)], dtype=torch.float32)
    return DataProto.from_dict({"tokens": tokens, "uid": uids(0, 8)})


def uids(first: int, end: int) -> list[str]:
    """Return the uids of the rows from `first` up to but excluding `end`."""
    return [f"u{i}" for i in range(first, end)]


def expect_equal(value: Any, expected: Any, subject: str) -> None:
    """Raise `Violation` unless the values are equal."""
    expect(value == expected, f"{subject}: got {value!r}, expected {expected!r}")


def expect_worker_error(action: Callable[[], Any], *phrases: str) -> WorkerError:
    """Return the `WorkerError` that `action` raises. Raise `Violation` unless its message contains all `phrases`."""
    try:
        action()
    except WorkerError as error:
        for phrase in phrases:
            expect(phrase in str(error), f"the error does not contain '{phrase}': {error}")
        return error
    raise Violation(f"no WorkerError was raised, expected one with {phrases}")


def expect_ended(pids: Iterable[int], seconds: float = 2.0) -> None:
    """Raise `Violation` if any of the processes still runs after `seconds`."""
    deadline = time.monotonic() + seconds
    running_pids = [pid for pid in pids if is_running(pid)]
    while running_pids and time.monotonic() < deadline:
        time.sleep(0.02)
        running_pids = [pid for pid in running_pids if is_running(pid)]
    expect(not running_pids, f"processes still run after {seconds:g} s: {running_pids}")


@contextlib.contextmanager
def expect_faster(seconds: float) -> Iterator[None]:
    """Raise `Violation` if the `with` block takes `seconds` or longer."""
    begin = time.monotonic()
    yield
    duration = time.monotonic() - begin
    expect(duration < seconds, f"the call took {duration:.1f} s, expected less than {seconds:g} s")
