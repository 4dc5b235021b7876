"""Controller backends with one fault each, and the rules of the contract that detect it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from camshaft.controller import Options, Pool, PoolSpec
from camshaft.controller.group import RoleSpec
from camshaft.controller.local import LocalPool
from camshaft.controller.process_pool import Request
from camshaft.controller.worker import Call
from camshaft.errors import WorkerError
from camshaft.seat import Seat

Start = Callable[[Sequence[PoolSpec], Options], list[Pool]]


def start_all(pool_class: type[LocalPool], specs: Sequence[PoolSpec], options: Options) -> list[Pool]:
    pools = [pool_class(spec, options) for spec in specs]
    for pool in pools:
        pool.start()
    for pool in pools:
        pool.join_ranks()
    return list(pools)


# -- results ---------------------------------------------------------------------------------------


class ReversedAnswers(LocalPool):
    """Assign the answers of a call to the ranks in reverse order."""

    def answers(self, request: Request) -> Iterator[tuple[int, Any]]:
        answers = list(super().answers(request))
        if request.method.startswith("seat_for"):
            yield from answers
            return
        yield from zip((rank for rank, _ in answers), (answer for _, answer in reversed(answers)), strict=True)


class StaleAnswers(LocalPool):
    """Return the previous answer of a method."""

    def __init__(self, spec: PoolSpec, options: Options):
        super().__init__(spec, options)
        self.previous: dict[str, list[tuple[int, Any]]] = {}

    def answers(self, request: Request) -> Iterator[tuple[int, Any]]:
        answers = list(super().answers(request))
        yield from self.previous.get(request.method, answers)
        self.previous[request.method] = answers


class LateAnswers(LocalPool):
    """Return the answers when all ranks have answered."""

    def build(self, role: RoleSpec) -> int:
        return super().build(replace(role, timeout=2))  # the rule waits for the first answer

    def answers(self, request: Request) -> Iterator[tuple[int, Any]]:
        yield from list(super().answers(request))


class BlockingSubmit(LocalPool):
    """Wait for the answers before `submit` returns."""

    def submit(self, key: int, method: str, calls: Sequence[Call | None], send_result: Sequence[bool]) -> Request:
        request = super().submit(key, method, calls, send_result)
        dict(request)
        return request


class CallsEveryRank(LocalPool):
    """Call ranks that have no call, too."""

    def submit(self, key: int, method: str, calls: Sequence[Call | None], send_result: Sequence[bool]) -> Request:
        call = next(call for call in calls if call is not None)
        return super().submit(key, method, [one or call for one in calls], send_result)


# -- layout ----------------------------------------------------------------------------------------


class OwnSeats(LocalPool):
    """Give each rank its own slice of the rows."""

    def seats(self, key: int, method: str) -> list[Seat]:
        return [Seat(rank, self.world_size, rank, self.world_size) for rank in range(self.world_size)]


class EarlySeats(LocalPool):
    """Read the seats when a role is built."""

    def build(self, role: RoleSpec) -> int:
        key = super().build(role)
        self.seats(key, "scale")
        return key


class KeepsDroppedRoles(LocalPool):
    """Leave a role usable that was shut down."""

    def drop(self, key: int) -> None:
        pass


# -- errors ----------------------------------------------------------------------------------------


class TerseErrors(LocalPool):
    """Raise errors without the rank, the method and the cause."""

    def answers(self, request: Request) -> Iterator[tuple[int, Any]]:
        try:
            yield from super().answers(request)
        except WorkerError:
            raise WorkerError("a worker failed") from None


class RepeatedErrors(LocalPool):
    """Raise an error that contains the traceback twice."""

    def answers(self, request: Request) -> Iterator[tuple[int, Any]]:
        try:
            yield from super().answers(request)
        except WorkerError as error:
            raise WorkerError(f"{error}\n{error}") from error


class IgnoresBuildErrors(LocalPool):
    """Return from `build` although the role cannot be built."""

    def build(self, role: RoleSpec) -> int:
        try:
            return super().build(role)
        except WorkerError:
            return 0


class EndsOnInvalidCalls(LocalPool):
    """End the pool if an argument cannot be sent."""

    def submit(self, key: int, method: str, calls: Sequence[Call | None], send_result: Sequence[bool]) -> Request:
        try:
            return super().submit(key, method, calls, send_result)
        except WorkerError:
            self.shutdown()
            raise


class NoStacks(LocalPool):
    """Report late ranks without their stacks."""

    def create_processes(self) -> None:
        super().create_processes()
        for process in self.processes:
            process.stacks = str


class IgnoresDeaths(LocalPool):
    """Wait for the answer of a dead rank until the time limit."""

    def build(self, role: RoleSpec) -> int:
        return super().build(replace(role, timeout=2))

    def _check_alive(self) -> None:
        pass


class IgnoresOtherPools(LocalPool):
    """Wait for one pool without monitoring the others."""

    def build(self, role: RoleSpec) -> int:
        return super().build(replace(role, timeout=2))

    def _poll_if_unattended(self) -> None:
        pass


class ForgetsState(LocalPool):
    """Start again without the state of the roles."""

    def _start_again(self, unfinished: Sequence[Request]) -> None:
        self._restored = {name: call for name, call in self._restored.items() if "init_model" in name}
        super()._start_again(unfinished)


class RepeatsAnswers(LocalPool):
    """Pass all answers to the listener again after a restart."""

    def _start_again(self, unfinished: Sequence[Request]) -> None:
        for request in unfinished:
            if request.listener is not None:
                request.answers.clear()
        super()._start_again(unfinished)


class CountsAllRestarts(LocalPool):
    """Limit the restarts of the whole run."""

    def _store(self, request: Request, rank: int, value: Any) -> None:
        restarts = self._num_restarts
        super()._store(request, rank, value)
        self._num_restarts = restarts


class RestartsOnceMore(LocalPool):
    """Start again more often than is allowed."""

    def _may_restart(self) -> bool:
        return self._num_restarts <= self.spec.max_restarts


# -- processes -------------------------------------------------------------------------------------


class IgnoresShutdown(LocalPool):
    """Ignore the first shutdown; the harness shuts the pool down again."""

    ignored = False

    def shutdown(self) -> None:
        if self.ignored:
            super().shutdown()
        self.ignored = True


class SurvivesErrors(LocalPool):
    """Leave the processes running after an error, until the shutdown."""

    def terminate(self, reason: str) -> None:
        if "failed" in reason:
            self._end_reason = reason
        else:
            super().terminate(reason)

    def shutdown(self) -> None:
        self._end_reason = ""
        super().terminate("it was shut down")


def without_process_group(specs: Sequence[PoolSpec], options: Options) -> list[Pool]:
    """Start pools whose ranks are in no process group."""
    pools = [LocalPool(spec, options) for spec in specs]
    for pool in pools:
        pool.start()
    return list(pools)


def with_all_cores(specs: Sequence[PoolSpec], options: Options) -> list[Pool]:
    """Start each pool as if it were the only one on the machine."""
    return start_all(LocalPool, specs, options)


def without_log_files(specs: Sequence[PoolSpec], options: Options) -> list[Pool]:
    """Start pools that write their output to that of the driver."""
    return start_all(LocalPool, specs, Options(timeout=options.timeout, preload=options.preload))


DETECTED_BY: dict[type[LocalPool] | Start, tuple[str, ...]] = {
    ReversedAnswers: ("rows keep their order", "parts make the result"),
    StaleAnswers: ("calls run in order", "small answers do not overtake"),
    LateAnswers: ("parts arrive early",),
    BlockingSubmit: ("pools run at once",),
    CallsEveryRank: ("modes choose ranks",),
    OwnSeats: ("seats split and merge", "parts follow seats"),
    EarlySeats: ("seats are read late",),
    KeepsDroppedRoles: ("roles share processes",),
    TerseErrors: (
        "exceptions reach the driver", "pending calls raise", "failures after a part are errors", "results must pickle",
        "killed ranks are errors", "suspended ranks do not block",
    ),
    RepeatedErrors: ("equal failures are one error",),
    IgnoresBuildErrors: ("construction errors are raised by spawn",),
    EndsOnInvalidCalls: ("wrong batches leave the ranks intact",),
    NoStacks: ("late ranks are reported",),
    IgnoresDeaths: ("deaths between calls are detected",),
    IgnoresOtherPools: ("deaths end waits for other pools", "listeners hear parts early"),
    ForgetsState: ("restorable pools start again",),
    RepeatsAnswers: ("restorable pools start again",),
    CountsAllRestarts: ("restorable pools start again",),
    RestartsOnceMore: ("restarts in a row are limited",),
    IgnoresShutdown: ("shutdown leaves no process",),
    SurvivesErrors: ("errors leave no process",),
    without_process_group: ("ranks share a process group",),
    with_all_cores: ("pools share the cores",),
    without_log_files: ("output goes to log files",),
}  # fmt: skip
"""The rules that detect each fault."""

RAISES: dict[type[LocalPool] | Start, str] = {
    LateAnswers: "no answer from rank.s. 0 of 2",
    EarlySeats: "call init_model first",
    CountsAllRestarts: "restarts of the pool",
    EndsOnInvalidCalls: "its workers have ended .it was shut down",
    without_process_group: "process group has not been initialized",
}
"""Messages of the faults that end a rule with a WorkerError instead of a Violation."""

FAULTS: list[tuple[str, Start, str, str | None]] = [
    (fault.__name__, partial(start_all, fault) if isinstance(fault, type) else fault, rule, RAISES.get(fault))
    for fault, rules in DETECTED_BY.items()
    for rule in rules
]
"""Name of the fault, backend, name of the rule, and message of the WorkerError, if the rule raises one."""
