"""Collectives for Python results: broadcast or gather values, and raise one rank's error on every rank.

    folder = on_rank_zero(group, lambda: storage.begin(target))
    sizes = on_every_rank(group, lambda: write(folder / f"rank_{rank}"))     # one result per rank, in rank order

If one rank raises an error before a collective, the other ranks wait for it forever. These functions exchange the error
instead and raise it on every rank. `group` is a process group with a CPU backend (gloo), or None for a single process
without torch.distributed. Results and errors are pickled.
"""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from camshaft.errors import EngineError

T = TypeVar("T")
Group = dist.ProcessGroup | None


def rank_and_size(group: Group) -> tuple[int, int]:
    """Return (rank in `group`, size of `group`)."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def on_rank_zero(group: Group, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 of `group` and return its result on every rank."""
    if group is None:
        return action()
    rank, _ = rank_and_size(group)
    local_outcome = _try(action) if rank == 0 else None
    received: list[Any] = [local_outcome]
    dist.broadcast_object_list(received, src=dist.get_global_rank(group, 0), group=group)
    return _unwrap(received[0] if local_outcome is None else local_outcome)


def on_every_rank(group: Group, action: Callable[[], T]) -> list[T]:
    """Run `action` on every rank and return the results of all ranks, in rank order.

    If ranks raise errors, every rank raises the error of the lowest of them.
    """
    if group is None:
        return [action()]
    rank, size = rank_and_size(group)
    outcomes: list[Any] = [None] * size
    local_outcome = _try(action)
    dist.all_gather_object(outcomes, local_outcome, group=group)
    outcomes[rank] = local_outcome  # the local error keeps its traceback; an unpickled one has none
    return [_unwrap(outcome) for outcome in outcomes]


def _try(action: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return action(), None
    except Exception as error:
        return None, _make_picklable(error)


def _make_picklable(error: Exception) -> Exception:
    """Return `error`, or an `EngineError` with its text if it cannot be pickled.

    Without the replacement, the exchange would fail on this rank and the other ranks would hang.
    """
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return EngineError(f"{type(error).__name__}: {error}")
    return error


def _unwrap(outcome: tuple[Any, Exception | None]) -> Any:
    value, error = outcome
    if error is not None:
        raise error
    return value
