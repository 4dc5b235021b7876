"""Controller backends that each break a rule of the contract: local pools with one fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from camshaft.controller import Options, Pool, PoolSpec
from camshaft.controller.local import LocalPool
from camshaft.controller.process_pool import Request
from camshaft.controller.worker import Call
from camshaft.errors import WorkerError
from camshaft.seat import Seat


def start_all(pool_class: type[LocalPool], specs: Sequence[PoolSpec], options: Options) -> list[Pool]:
    pools = [pool_class(spec, options) for spec in specs]
    for pool in pools:
        pool.start()
    for pool in pools:
        pool.join_ranks()
    return list(pools)


class Reversed(LocalPool):
    def answers(self, request: Request) -> Iterator[tuple[int, Any]]:
        answers = list(super().answers(request))
        if request.method.startswith("seat_for"):
            yield from answers
            return
        yield from zip((rank for rank, _ in answers), (answer for _, answer in reversed(answers)), strict=True)


class Blocking(LocalPool):
    def submit(self, key: int, method: str, calls: Sequence[Call | None], send_result: Sequence[bool]) -> Request:
        request = super().submit(key, method, calls, send_result)
        dict(request)
        return request


class EagerSeats(LocalPool):
    def seats(self, key: int, method: str) -> list[Seat]:
        return [Seat(rank, self.world_size, rank, self.world_size) for rank in range(self.world_size)]


class EveryRank(LocalPool):
    def submit(self, key: int, method: str, calls: Sequence[Call | None], send_result: Sequence[bool]) -> Request:
        call = next(call for call in calls if call is not None)
        return super().submit(key, method, [one or call for one in calls], send_result)


class Terse(LocalPool):
    def answers(self, request: Request) -> Iterator[tuple[int, Any]]:
        try:
            yield from super().answers(request)
        except WorkerError:
            raise WorkerError("a worker failed") from None


class Lenient(LocalPool):
    def drop(self, key: int) -> None:
        """Do not drop the role."""


class Leaky(LocalPool):
    ignored = False

    def shutdown(self) -> None:
        """Ignore the first call; the harness calls again."""
        if self.ignored:
            super().shutdown()
        self.ignored = True


def reversed_answers(specs: Sequence[PoolSpec], options: Options) -> list[Pool]:
    return start_all(Reversed, specs, options)


def blocking_submit(specs: Sequence[PoolSpec], options: Options) -> list[Pool]:
    return start_all(Blocking, specs, options)


def eager_seats(specs: Sequence[PoolSpec], options: Options) -> list[Pool]:
    return start_all(EagerSeats, specs, options)


def every_rank(specs: Sequence[PoolSpec], options: Options) -> list[Pool]:
    return start_all(EveryRank, specs, options)


def terse_errors(specs: Sequence[PoolSpec], options: Options) -> list[Pool]:
    return start_all(Terse, specs, options)


def undropped_roles(specs: Sequence[PoolSpec], options: Options) -> list[Pool]:
    return start_all(Lenient, specs, options)


def leaked_processes(specs: Sequence[PoolSpec], options: Options) -> list[Pool]:
    return start_all(Leaky, specs, options)


def no_logs(specs: Sequence[PoolSpec], options: Options) -> list[Pool]:
    return start_all(LocalPool, specs, Options(timeout=options.timeout, preload=options.preload))


CAUGHT_BY = {
    reversed_answers: "rows keep their order",
    blocking_submit: "pools run at once",
    eager_seats: "seats split and merge",
    every_rank: "modes choose ranks",
    terse_errors: "exceptions reach the driver",
    undropped_roles: "roles share processes",
    leaked_processes: "shutdown leaves no process",
    no_logs: "output goes to log files",
}
"""The rule that detects each fault."""
