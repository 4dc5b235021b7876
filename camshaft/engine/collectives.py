"""What all ranks of a group learn together: one rank's result, or its error on every rank.

    folder = on_rank_zero(group, lambda: storage.begin(target))
    sizes = on_every_rank(group, lambda: write(folder / f"rank_{rank}"))     # in the order of ranks

A rank that failed alone would leave the others waiting for it. Here every rank comes to the exchange, and
then every rank raises the same error. `group` is a process group whose backend moves CPU objects (gloo), or
None for one process without torch.distributed. Results and errors cross it pickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from camshaft.errors import EngineError

T = TypeVar("T")
Group = dist.ProcessGroup | None


def seat_in(group: Group) -> tuple[int, int]:
    """(rank in `group`, its size)."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def on_rank_zero(group: Group, action: Callable[[], T]) -> T:
    """What `action` gives on rank 0 of `group`, on every rank; the other ranks do not run it."""
    if group is None:
        return action()
    rank, _ = seat_in(group)
    told: list[Any] = [_try(action) if rank == 0 else None]
    own = told[0]
    dist.broadcast_object_list(told, src=dist.get_global_rank(group, 0), group=group)
    return _value(told[0] if own is None else own)


def on_every_rank(group: Group, action: Callable[[], T]) -> list[T]:
    """What `action` gives on each rank, on every rank; the error of the lowest rank that has one."""
    if group is None:
        return [action()]
    rank, size = seat_in(group)
    told: list[Any] = [None] * size
    own = _try(action)
    dist.all_gather_object(told, own, group=group)
    told[rank] = own  # with its traceback
    return [_value(outcome) for outcome in told]


def _try(action: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return action(), None
    except Exception as error:
        return None, _portable(error)


def _portable(error: Exception) -> Exception:
    """`error`, or its text where another process could not unpickle it: a lost error is a hang."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return EngineError(f"{type(error).__name__}: {error}")
    return error


def _value(outcome: tuple[Any, Exception | None]) -> Any:
    value, error = outcome
    if error is not None:
        raise error
    return value
