"""Checks the engine contract on several ranks, for `camshaft check-engine --ranks N`.

    for verdict in check_engine_on_ranks(FSDPEngine, 4, folder, common_fields={"options": {"fsdp_size": 2}}): ...

Every rank runs every rule. The processes are reused for several rules, because starting them is slow. After a broken
rule, a crash or a hang on one rank, the processes are shut down and the next rule starts new ones.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from camshaft.contracts.engine.harness import EngineHarness
from camshaft.contracts.engine.suite import RULES, construction_problem
from camshaft.contracts.rules import Rule, Verdict, Violation
from camshaft.controller import Dispatch, Options, Pool, PoolSpec, Worker, register, spawn
from camshaft.controller.local import process_pool
from camshaft.engine import BaseEngine
from camshaft.errors import WorkerError

RULE_TIMEOUT = 300.0
"""Time limit of one rule in seconds."""
RULES_PER_PROCESS = 30
"""Number of rules after which new processes are started. Each layout leaves process groups with open files."""


class RuleRanks(contextlib.AbstractContextManager["RuleRanks"]):
    """A pool of `world` processes that check rules on engine classes. Torch is imported once for all rules."""

    def __init__(self, world: int, device: str = "cpu", name: str = "engine"):
        # Each rank selects its device, so the engine config contains only the device type.
        self._spec, self._device = PoolSpec(name, ranks_per_node=world), device
        self._pool: Pool | None = None
        self._checker: _Checker
        self._num_checked = 0

    def find_problem(
        self, rule: str, engine_class: type[BaseEngine], folder: str, common_fields: Mapping[str, Any] | None = None
    ) -> str | None:
        """Check the rule named `rule` on all ranks; return a description of the problem, or None.

        `folder` and `common_fields` are those of `EngineHarness`.
        """
        try:
            if self._num_checked == RULES_PER_PROCESS:
                self._shut_down()
            if self._pool is None:
                self._num_checked = 0
                self._pool = process_pool(self._spec, Options(timeout=RULE_TIMEOUT, preload=(__name__,)))
                self._checker = spawn(_Checker, pool=self._pool, name=self._spec.name, timeout=RULE_TIMEOUT)
            self._num_checked += 1
            self._checker.check(rule, engine_class, folder, self._device, dict(common_fields or {}))
        except WorkerError as error:
            self._shut_down()
            return str(error.__cause__) if isinstance(error.__cause__, Violation) else str(error)
        return None

    def _shut_down(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def __exit__(self, *_: object) -> None:
        self._shut_down()


class _Checker(Worker):
    """Checks rules in one process of `RuleRanks`."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check(
        self, rule: str, engine_class: type[BaseEngine], folder: str, device: str, common_fields: dict[str, Any]
    ) -> None:
        """Raise `Violation` if the engine breaks the rule."""
        try:
            harness = EngineHarness(engine_class, folder, device, common_fields)
            next(candidate for candidate in RULES if candidate.name == rule).check(harness)
        finally:
            collect_engines()


def collect_engines() -> None:
    """Delete engines that are no longer used, whose process groups have threads, connections and open files."""
    gc.collect()
    if not gc.get_freeze_count():
        gc.freeze()  # the imported modules, which make each collection slow


def check_engine_on_ranks(
    engine_class: type[BaseEngine],
    world: int,
    folder: str,
    rules: Sequence[Rule[EngineHarness]] = RULES,
    device: str = "cpu",
    common_fields: Mapping[str, Any] | None = None,
) -> Iterator[Verdict]:
    """Check `rules` on `world` ranks and yield the verdict of each; `folder` is a scratch folder.

    If the class cannot be constructed or supports only one rank, yield a single verdict without starting a process.
    """
    if world > 1 and not engine_class.capabilities.multiple_ranks:
        problem = (
            f"{engine_class.__name__} supports only one rank (capabilities.multiple_ranks=False), but {world} were "
            "requested; check it on one rank"
        )
    else:
        problem = construction_problem(engine_class, folder, device, common_fields)
    if problem is not None:
        yield Verdict(RULES[0], problem)
        return
    with RuleRanks(world, device, engine_class.__name__) as ranks:
        for number, rule in enumerate(rules):
            yield Verdict(rule, ranks.find_problem(rule.name, engine_class, f"{folder}/{number:02d}", common_fields))
