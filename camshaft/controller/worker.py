"""Roles, their registered methods, and the dispatch of calls to ranks.

    class Critic(Worker):
        def __init__(self, config): ...          # self.rank, self.world and self.device are already set
        @property
        def seat(self) -> Seat: return self.engine.seat

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def compute_values(self, data: DataProto) -> DataProto: ...

    calls = scatter(mode, seats, args, kwargs)     # (args, kwargs) for each rank, or None for ranks that do not run
    result = gather(mode, seats, results)

A role that is constructed directly, without a controller, is rank 0 of 1. Backends use `build_worker`.

`scatter` and `gather` are pure functions of the ranks' seats. All backends of the controller share them, and no
training backend requires an additional mode. A call through a `WorkerGroup` returns the type that the method declares,
except with ALL_TO_ALL, which takes and returns one entry per rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
"""Key in the meta_info of a merged result that holds the list of the meta_info of each dp_rank."""
_MODE = "__dispatch_mode__"
_KEEPS_SEATS = "__keeps_seats__"


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Placement of one rank in its pool and on its machine."""

    rank: int = 0
    world: int = 1
    device: str = "cpu"
    """Device of this rank, such as "cuda:1" or "cpu"."""
    timeout: float = 3600.0
    """Time limit of a collective, in seconds."""
    local_rank: int = 0
    """Index among the ranks of the pool on this machine."""
    local_world: int = 1
    """Number of ranks of the pool on this machine."""
    other_ranks: int = 0
    """Number of ranks of other pools that share the cores of this machine."""
    address: str = "127.0.0.1"
    """Address at which other machines reach this machine."""
    pool: str = "workers"
    """Name of the pool."""
    log_folder: str | None = None
    """Folder for the output of this process. If None, this process shares the output of the driver."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """Secrets of the config, which are masked in the log. Those of the environment are known to each process."""


class Worker:
    """Base class of roles. The driver can call the methods that are decorated with `@register`."""

    rank_info: RankInfo = RankInfo()
    """Placement of this rank. It is set before `__init__`, so a role does not have to call `super().__init__()`."""

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
        """Position of this rank in the data-parallel layout. By default, every rank gets a different slice of a batch.

        The controller reads the seat before each call that splits a batch.
        """
        return Seat(rank=self.rank, world=self.world, dp_rank=self.rank, dp_size=self.world)

    def seat_for(self, method: str) -> Seat:
        """Return the seat for calls of `method`. A role with several engines may have a different seat for each."""
        return self.seat


def build_worker(role_class: type[R], rank_info: RankInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> R:
    """Construct `role_class(*args, **kwargs)` with `rank_info` set before `__init__` runs."""
    role = role_class.__new__(role_class)
    role.rank_info = rank_info
    role.__init__(*args, **kwargs)
    return role


# -- dispatch --------------------------------------------------------------------------------------


class Dispatch(Enum):
    """Dispatch mode of a method. It determines the arguments of each rank and the result on the driver."""

    ONE_TO_ALL = "one_to_all"
    """Every rank gets the same arguments. The result is that of rank 0, which hides the layout from the caller."""
    RANK_ZERO = "rank_zero"
    """Only rank 0 runs the method."""
    ALL_TO_ALL = "all_to_all"
    """Each argument is a list with one entry per rank. The result is the list of the results of all ranks."""
    DP_COMPUTE_PROTO = "dp_compute_proto"
    """Every DataProto argument is split into dp_size equal parts, and a rank gets the part of its dp_rank. Other
    arguments are passed to all ranks. The method must return a DataProto, or None on all ranks. The results of the
    collecting ranks are concatenated in the order of dp_rank. The meta_info of the result is that of dp_rank 0; with
    several parts, it also contains the list of the meta_info of all parts under `RANKS`."""


def register(dispatch_mode: Dispatch, keeps_seats: bool = False) -> Callable[[F], F]:
    """Make a method of a role callable from the driver. An override inherits the mode if it has no decorator.

    The driver asks for the seats of the ranks again after a call that is not split by them, because it may have changed
    them, and waits for the calls in progress. Set `keeps_seats` for a method that never does.
    """

    def mark(function: F) -> F:
        # functools.wraps copies the function's dict, so the mode survives other decorators.
        vars(function)[_MODE], vars(function)[_KEEPS_SEATS] = dispatch_mode, keeps_seats
        return function

    return mark


def registered_methods(role_class: type) -> dict[str, Dispatch]:
    """Return the dispatch mode of each method of a role that the driver can call, by name."""
    return _marks(role_class, _MODE)


def seat_keeping_methods(role_class: type) -> frozenset[str]:
    """Return the names of the registered methods that never change the seats of a role."""
    return frozenset(name for name, keeps_seats in _marks(role_class, _KEEPS_SEATS).items() if keeps_seats)


def _marks(role_class: type, mark: str) -> dict[str, Any]:
    """Return what `register` has noted under `mark` for each method, by name. A subclass has precedence."""
    return {
        name: vars(value)[mark]
        for base in reversed(role_class.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, FunctionType) and mark in vars(value)
    }


def scatter(mode: Dispatch, seats: Sequence[Seat], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call | None]:
    """Split a call into one call per rank. Ranks with equal calls share one object."""
    world = len(seats)
    if mode is Dispatch.ONE_TO_ALL:
        return [(args, kwargs)] * world
    if mode is Dispatch.RANK_ZERO:
        return [(args, kwargs), *[None] * (world - 1)]
    if mode is Dispatch.ALL_TO_ALL:
        for argument, value in [*enumerate(args), *kwargs.items()]:
            _check_entries(argument, value, world)
        split = [(tuple(a[rank] for a in args), {k: v[rank] for k, v in kwargs.items()}) for rank in range(world)]
        shared: dict[tuple[int, ...], Call] = {}
        return [shared.setdefault(tuple(map(id, (*call[0], *call[1].values()))), call) for call in split]
    dp_size = len(_collectors(seats))
    if not any(isinstance(value, DataProto) for value in (*args, *kwargs.values())):
        raise BatchError("a call of a DP_COMPUTE_PROTO method has no DataProto argument; pass at least one DataProto")
    split_args = [_split_argument(index, value, dp_size) for index, value in enumerate(args)]
    split_kwargs = {name: _split_argument(name, value, dp_size) for name, value in kwargs.items()}
    calls = [(tuple(p[i] for p in split_args), {k: p[i] for k, p in split_kwargs.items()}) for i in range(dp_size)]
    return [calls[seat.dp_rank] for seat in seats]


def result_slot(mode: Dispatch, seat: Seat) -> int | None:
    """Return the index of a rank's part in the merged result, or None if `gather` ignores the result of the rank."""
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
                f"a DP_COMPUTE_PROTO method returned {type(part).__name__} on rank {rank}; return a DataProto on "
                "every rank, or None on every rank"
            )
    if len(parts) == 1:
        return parts[0]
    return DataProto.concat(parts).with_meta(**{RANKS: [part.meta_info for part in parts]})


def _collectors(seats: Sequence[Seat]) -> list[int]:
    """Return the collecting rank of each dp_rank.

    Raise `BatchError` unless the seats are consistent and each dp_rank has exactly one collecting rank.
    """
    collectors: dict[int, list[int]] = {dp_rank: [] for dp_rank in range(seats[0].dp_size)}
    for rank, seat in enumerate(seats):
        if (seat.rank, seat.world, seat.dp_size) != (rank, len(seats), seats[0].dp_size):
            raise BatchError(
                f"the seat of rank {rank} of {len(seats)} does not match its group: {seat}; return the same world and "
                "dp_size on all ranks, and each rank's own number as its rank"
            )
        if seat.collects:
            collectors[seat.dp_rank].append(rank)
    for dp_rank, ranks in collectors.items():
        if len(ranks) != 1:
            raise BatchError(
                f"dp_rank {dp_rank} needs exactly one collecting rank, but has {len(ranks)}: {ranks}; set collects in "
                "the seat of exactly one of its ranks"
            )
    return [ranks[0] for ranks in collectors.values()]


def _split_argument(argument: int | str, value: Any, dp_size: int) -> list[Any]:
    if not isinstance(value, DataProto) or dp_size == 1:
        return [value] * dp_size
    rows = len(value)
    if rows % dp_size:
        raise BatchError(
            f"argument {argument!r} has {rows} rows, which is not divisible by {dp_size} data-parallel ranks "
            f"({rows} = {dp_size} x {rows // dp_size} + {rows % dp_size}); `batch, added = "
            f"batch.pad_to_divisor({dp_size})` adds {-rows % dp_size} rows and `result.unpad(added)` removes them"
        )
    return value.chunk(dp_size)


def _check_entries(argument: int | str, value: Any, world: int) -> None:
    kind: type[object] = value.__class__
    if not issubclass(kind, list) or len(value) != world:
        got = f"a list of {len(value)}" if issubclass(kind, list) else kind.__name__
        raise BatchError(
            f"ALL_TO_ALL: argument {argument!r} must be a list with one entry for each of {world} ranks; got {got}"
        )
