"""How a call on the driver becomes calls on the ranks, and their results one result.

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto: ...

    calls = scatter(mode, seats, args, kwargs)     # one (args, kwargs) per rank, None for a rank left alone
    result = gather(mode, seats, results)

Both are pure and read nothing but the ranks' seats, so every backend of the controller shares them and
no training backend needs a mode of its own. A call through a proxy has the type that the method
declares; only ALL_TO_ALL differs, because there the driver holds one entry per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from types import FunctionType
from typing import Any, TypeVar

from camshaft.dataproto import DataProto
from camshaft.errors import BatchError
from camshaft.seat import Seat

F = TypeVar("F", bound=Callable[..., Any])
Call = tuple[tuple[Any, ...], dict[str, Any]]

RANKS = "ranks"
"""Key of a merged result's meta_info: the meta_info of each dp_rank."""
_MODE = "__dispatch_mode__"


class Dispatch(Enum):
    """What each rank receives, and what the driver gets back."""

    ONE_TO_ALL = "one_to_all"
    """Every rank gets the same arguments; the result is that of rank 0, so that the caller never sees the layout."""
    RANK_ZERO = "rank_zero"
    """Rank 0 alone runs; the others are left alone."""
    ALL_TO_ALL = "all_to_all"
    """Each argument is a list with one entry per rank; the result is the list of all results."""
    DP_COMPUTE_PROTO = "dp_compute_proto"
    """Every DataProto is cut into dp_size equal parts and a rank gets part dp_rank, other arguments go to
    all; the results of the ranks that collect are put together in the order of dp_rank, with the
    meta_info of dp_rank 0 and, where they are several, all of theirs as a list under `RANKS`.
    Such a method returns a DataProto, or None on all ranks."""


def register(dispatch_mode: Dispatch) -> Callable[[F], F]:
    """Make a method of a role callable from the driver. An override without it keeps the mode."""

    def mark(function: F) -> F:
        # In the function's own dict: functools.wraps copies it, so other decorators may come on top.
        vars(function)[_MODE] = dispatch_mode
        return function

    return mark


def registered(role_class: type) -> dict[str, Dispatch]:
    """The methods of a role that the driver may call, and how."""
    return {
        name: vars(value)[_MODE]
        for base in reversed(role_class.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, FunctionType) and _MODE in vars(value)
    }


def scatter(mode: Dispatch, seats: Sequence[Seat], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call | None]:
    """What each rank is called with; ranks that get the same share one object."""
    world = len(seats)
    if mode is Dispatch.ONE_TO_ALL:
        return [(args, kwargs)] * world
    if mode is Dispatch.RANK_ZERO:
        return [(args, kwargs), *[None] * (world - 1)]
    if mode is Dispatch.ALL_TO_ALL:
        for place, value in [*enumerate(args), *kwargs.items()]:
            _check_entries(place, value, world)
        return [(tuple(a[rank] for a in args), {k: v[rank] for k, v in kwargs.items()}) for rank in range(world)]
    dp_size = len(_collectors(seats))
    if not any(isinstance(value, DataProto) for value in (*args, *kwargs.values())):
        raise BatchError("a DP_COMPUTE_PROTO method splits its DataProto arguments, and the call has none")
    split_args = [_parts(place, value, dp_size) for place, value in enumerate(args)]
    split_kwargs = {name: _parts(name, value, dp_size) for name, value in kwargs.items()}
    calls = [(tuple(p[i] for p in split_args), {k: p[i] for k, p in split_kwargs.items()}) for i in range(dp_size)]
    return [calls[seat.dp_rank] for seat in seats]


def place(mode: Dispatch, seat: Seat) -> int | None:
    """Which part of the call's result this rank gives; None for a rank that `gather` does not read."""
    if mode is Dispatch.ALL_TO_ALL:
        return seat.rank
    if mode is Dispatch.DP_COMPUTE_PROTO:
        return seat.dp_rank if seat.collects else None
    return 0 if seat.rank == 0 else None


def gather(mode: Dispatch, seats: Sequence[Seat], results: Sequence[Any]) -> Any:
    """The one result of a call, from one result per rank."""
    if mode is Dispatch.ALL_TO_ALL:
        return list(results)
    if mode is not Dispatch.DP_COMPUTE_PROTO:
        return results[0]
    ranks = _collectors(seats)
    kept = [results[rank] for rank in ranks]
    if all(result is None for result in kept):
        return None
    for rank, result in zip(ranks, kept, strict=True):
        if not isinstance(result, DataProto):
            raise BatchError(
                f"a DP_COMPUTE_PROTO method returned {type(result).__name__} on rank {rank}; such a method returns "
                "a DataProto, or None on all ranks (numbers go into its meta_info)"
            )
    if len(kept) == 1:
        return kept[0]
    return DataProto.concat(kept).with_meta(**{RANKS: [part.meta_info for part in kept]})


def _collectors(seats: Sequence[Seat]) -> list[int]:
    """The rank that collects for each dp_rank; the seats must agree and cover each exactly once."""
    collectors: dict[int, list[int]] = {dp_rank: [] for dp_rank in range(seats[0].dp_size)}
    for rank, seat in enumerate(seats):
        if (seat.rank, seat.world, seat.dp_size) != (rank, len(seats), seats[0].dp_size):
            raise BatchError(f"rank {rank} of {len(seats)} states a seat that does not fit its group: {seat}")
        if seat.collects:
            collectors[seat.dp_rank].append(rank)
    for dp_rank, ranks in collectors.items():
        if len(ranks) != 1:
            raise BatchError(
                f"dp_rank {dp_rank} must have exactly one rank whose seat collects, but has {len(ranks)}: {ranks}"
            )
    return [ranks[0] for ranks in collectors.values()]


def _parts(place: int | str, value: Any, dp_size: int) -> list[Any]:
    if not isinstance(value, DataProto) or dp_size == 1:
        return [value] * dp_size
    rows = len(value)
    if rows % dp_size:
        raise BatchError(
            f"argument {place!r} has {rows} rows, which do not divide among {dp_size} data-parallel ranks "
            f"({rows} = {dp_size} x {rows // dp_size} + {rows % dp_size}); `batch, added = "
            f"batch.pad_to_divisor({dp_size})` adds {-rows % dp_size} rows, `result.unpad(added)` takes them back"
        )
    return value.chunk(dp_size)


def _check_entries(place: int | str, value: Any, world: int) -> None:
    if not isinstance(value, list) or len(value) != world:
        got = f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
        raise BatchError(
            f"ALL_TO_ALL: argument {place!r} must be a list with one entry for each of {world} ranks: {got}"
        )
