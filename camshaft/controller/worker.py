"""Roles, their registered methods, and the dispatch of calls to ranks.

    class Critic(Worker):
        def __init__(self, config): ...          # self.rank, self.world and self.device are already set
        @property
        def seat(self) -> Seat: return self.engine.seat

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def compute_values(self, data: DataProto) -> DataProto: ...

    calls = scatter(mode, seats, args, kwargs)     # one (args, kwargs) per rank, None for a rank without a call
    result = gather(mode, seats, results)

A role constructed directly, without a controller, is rank 0 of 1. Backends of the controller construct roles with
`build_worker`.

`scatter` and `gather` are pure functions of the ranks' seats, so all backends of the controller share them and no
training backend needs an extra mode. A call through a `WorkerGroup` returns the type that the method declares; only
ALL_TO_ALL differs, because it takes and returns one entry per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import FunctionType
from typing import Any, TypeVar

from camshaft.dataproto import DataProto
from camshaft.errors import BatchError
from camshaft.seat import Seat

R = TypeVar("R", bound="Worker")
F = TypeVar("F", bound=Callable[..., Any])
Call = tuple[tuple[Any, ...], dict[str, Any]]

RANKS = "ranks"
"""Key in the meta_info of a merged result: list of the meta_info of each dp_rank."""
_MODE = "__dispatch_mode__"


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Placement of one rank: its numbers, device, machine and log folder."""

    rank: int = 0
    world: int = 1
    device: str = "cpu"
    """Device of this rank, such as "cuda:1" or "cpu"."""
    timeout: float = 3600.0
    """Time limit of a collective, in seconds."""
    local_rank: int = 0
    local_world: int = 1
    """Index among the ranks of the pool on this machine, and their number."""
    other_ranks: int = 0
    """Number of ranks of other pools that share the cores of this machine."""
    address: str = "127.0.0.1"
    """Address of this machine, as reached by other machines."""
    pool: str = "workers"
    log_folder: str | None = None
    """Folder for the output of this process; None: the output goes to that of the driver."""


class Worker:
    """Base class of roles. The driver can call the methods that are decorated with `@register`."""

    rank_info: RankInfo = RankInfo()
    """Set on the instance before `__init__`, so that a role does not have to call `super().__init__()`."""

    @property
    def rank(self) -> int:
        return self.rank_info.rank

    @property
    def world(self) -> int:
        return self.rank_info.world

    @property
    def device(self) -> str:
        return self.rank_info.device

    @property
    def seat(self) -> Seat:
        """Position of this rank in the data-parallel layout; by default every rank has its own slice.

        The controller reads it before a call that splits a batch.
        """
        return Seat(rank=self.rank, world=self.world, dp_rank=self.rank, dp_size=self.world)

    def seat_for(self, method: str) -> Seat:
        """Return the seat for calls of `method`; a role with several engines may have several seats."""
        return self.seat


def build_worker(role_class: type[R], rank_info: RankInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> R:
    """Construct `role_class(*args, **kwargs)` with `rank_info` set before `__init__` runs."""
    role = role_class.__new__(role_class)
    role.rank_info = rank_info
    role.__init__(*args, **kwargs)
    return role


# -- dispatch --------------------------------------------------------------------------------------


class Dispatch(Enum):
    """Dispatch mode of a method: the arguments of each rank, and the result on the driver."""

    ONE_TO_ALL = "one_to_all"
    """Every rank gets the same arguments; the result is that of rank 0, which hides the layout from the caller."""
    RANK_ZERO = "rank_zero"
    """Only rank 0 runs."""
    ALL_TO_ALL = "all_to_all"
    """Each argument is a list with one entry per rank; the result is the list of all results."""
    DP_COMPUTE_PROTO = "dp_compute_proto"
    """Every DataProto is split into dp_size equal parts, and a rank gets part dp_rank; other arguments go to all ranks.
    The results of the collecting ranks are concatenated in the order of dp_rank. The meta_info is that of dp_rank 0,
    plus, with several parts, the list of all under `RANKS`. Such a method returns a DataProto, or None on all ranks."""


def register(dispatch_mode: Dispatch) -> Callable[[F], F]:
    """Make a method of a role callable from the driver. An override without the decorator keeps the mode."""

    def mark(function: F) -> F:
        # Stored in the function's dict, which functools.wraps copies, so that other decorators can wrap it.
        vars(function)[_MODE] = dispatch_mode
        return function

    return mark


def registered(role_class: type) -> dict[str, Dispatch]:
    """Return the methods of a role that the driver can call, with their dispatch modes."""
    return {
        name: vars(value)[_MODE]
        for base in reversed(role_class.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, FunctionType) and _MODE in vars(value)
    }


def scatter(mode: Dispatch, seats: Sequence[Seat], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call | None]:
    """Split a call into one call per rank; ranks with equal calls share one object."""
    world = len(seats)
    if mode is Dispatch.ONE_TO_ALL:
        return [(args, kwargs)] * world
    if mode is Dispatch.RANK_ZERO:
        return [(args, kwargs), *[None] * (world - 1)]
    if mode is Dispatch.ALL_TO_ALL:
        for argument, value in [*enumerate(args), *kwargs.items()]:
            _check_entries(argument, value, world)
        return [(tuple(a[rank] for a in args), {k: v[rank] for k, v in kwargs.items()}) for rank in range(world)]
    dp_size = len(_collectors(seats))
    if not any(isinstance(value, DataProto) for value in (*args, *kwargs.values())):
        raise BatchError("a DP_COMPUTE_PROTO method splits its DataProto arguments; the call has none")
    split_args = [_parts(index, value, dp_size) for index, value in enumerate(args)]
    split_kwargs = {name: _parts(name, value, dp_size) for name, value in kwargs.items()}
    calls = [(tuple(p[i] for p in split_args), {k: p[i] for k, p in split_kwargs.items()}) for i in range(dp_size)]
    return [calls[seat.dp_rank] for seat in seats]


def result_slot(mode: Dispatch, seat: Seat) -> int | None:
    """Return the index of this rank's part in the merged result; None for a rank that `gather` does not read."""
    if mode is Dispatch.ALL_TO_ALL:
        return seat.rank
    if mode is Dispatch.DP_COMPUTE_PROTO:
        return seat.dp_rank if seat.collects else None
    return 0 if seat.rank == 0 else None


def gather(mode: Dispatch, seats: Sequence[Seat], results: Sequence[Any]) -> Any:
    """Merge one result per rank into the result of the call."""
    if mode is Dispatch.ALL_TO_ALL:
        return list(results)
    if mode is not Dispatch.DP_COMPUTE_PROTO:
        return results[0]
    ranks = _collectors(seats)
    parts = [results[rank] for rank in ranks]
    if all(part is None for part in parts):
        return None
    for rank, part in zip(ranks, parts, strict=True):
        if not isinstance(part, DataProto):
            raise BatchError(
                f"a DP_COMPUTE_PROTO method returned {type(part).__name__} on rank {rank}; return a DataProto (numbers "
                "go into its meta_info), or None on all ranks"
            )
    if len(parts) == 1:
        return parts[0]
    return DataProto.concat(parts).with_meta(**{RANKS: [part.meta_info for part in parts]})


def _collectors(seats: Sequence[Seat]) -> list[int]:
    """Return the collecting rank of each dp_rank; raises unless the seats agree and cover each dp_rank exactly once."""
    collectors: dict[int, list[int]] = {dp_rank: [] for dp_rank in range(seats[0].dp_size)}
    for rank, seat in enumerate(seats):
        if (seat.rank, seat.world, seat.dp_size) != (rank, len(seats), seats[0].dp_size):
            raise BatchError(f"rank {rank} of {len(seats)} has a seat that does not match its group: {seat}")
        if seat.collects:
            collectors[seat.dp_rank].append(rank)
    for dp_rank, ranks in collectors.items():
        if len(ranks) != 1:
            raise BatchError(f"dp_rank {dp_rank} needs exactly one collecting rank, but has {len(ranks)}: {ranks}")
    return [ranks[0] for ranks in collectors.values()]


def _parts(argument: int | str, value: Any, dp_size: int) -> list[Any]:
    if not isinstance(value, DataProto) or dp_size == 1:
        return [value] * dp_size
    rows = len(value)
    if rows % dp_size:
        raise BatchError(
            f"argument {argument!r} has {rows} rows, which do not divide among {dp_size} data-parallel ranks "
            f"({rows} = {dp_size} x {rows // dp_size} + {rows % dp_size}); `batch, added = "
            f"batch.pad_to_divisor({dp_size})` adds {-rows % dp_size} rows, `result.unpad(added)` removes them"
        )
    return value.chunk(dp_size)


def _check_entries(argument: int | str, value: Any, world: int) -> None:
    if not isinstance(value, list) or len(value) != world:
        got = f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
        raise BatchError(
            f"ALL_TO_ALL: argument {argument!r} must be a list with one entry for each of {world} ranks; got {got}"
        )
