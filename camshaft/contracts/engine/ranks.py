"""The engine contract on several ranks, for `camshaft check-engine --ranks N`.

    for finding in check_engine_on_ranks(FSDPEngine, 4, folder, always={"options": {"fsdp_size": 2}}): ...

Every rank runs every rule, in processes that serve several rules. A broken rule, a crash or a hang on one rank ends
the processes; the next rule starts new ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from camshaft.contracts.engine.harness import EngineHarness
from camshaft.contracts.engine.suite import RULES, construction_problem
from camshaft.contracts.rules import Finding, Rule, Violation
from camshaft.controller import Dispatch, Options, Pool, PoolSpec, Worker, register, spawn
from camshaft.controller.local import process_pool
from camshaft.engine import BaseEngine
from camshaft.errors import WorkerError

SECONDS = 300.0
"""Time limit of one rule."""
RULES_PER_PROCESS = 30
"""Rules that run in the same processes: each engine leaves a process group with open files behind."""


class RuleRanks(contextlib.AbstractContextManager["RuleRanks"]):
    """A pool of processes that check rules on engine classes; torch is imported once for all rules."""

    def __init__(self, world: int, device: str = "cpu", name: str = "engine"):
        # Ranks choose their own device; the config of an engine names only its type.
        self._spec, self._device = PoolSpec(name, ranks_per_node=world), device
        self._pool: Pool | None = None
        self._checker: _Checker
        self._checked = 0

    def problem(
        self, rule: str, engine_class: type[BaseEngine], folder: str, always: Mapping[str, Any] | None = None
    ) -> str | None:
        """Check the rule of this name; return the problem, or None. `folder` and `always` as in `EngineHarness`."""
        try:
            if self._checked == RULES_PER_PROCESS:
                self._end()
            if self._pool is None:
                self._checked = 0
                self._pool = process_pool(self._spec, Options(timeout=SECONDS, preload=(__name__,)))
                self._checker = spawn(_Checker, pool=self._pool, name=self._spec.name, timeout=SECONDS)
            self._checked += 1
            self._checker.check(rule, engine_class, folder, self._device, dict(always or {}))
        except WorkerError as error:
            self._pool = None
            return str(error.__cause__) if isinstance(error.__cause__, Violation) else str(error)
        return None

    def _end(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def __exit__(self, *_: object) -> None:
        self._end()


class _Checker(Worker):
    """One rank."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check(
        self, rule: str, engine_class: type[BaseEngine], folder: str, device: str, always: dict[str, Any]
    ) -> None:
        """Raise `Violation` if the rule does not hold."""
        harness = EngineHarness(engine_class, folder, device, always)
        next(candidate for candidate in RULES if candidate.name == rule).check(harness)


def check_engine_on_ranks(
    engine_class: type[BaseEngine],
    world: int,
    folder: str,
    rules: Sequence[Rule[EngineHarness]] = RULES,
    device: str = "cpu",
    always: Mapping[str, Any] | None = None,
) -> Iterator[Finding]:
    """Check the rules in the scratch folder `folder`, and yield each finding.

    A class that cannot be constructed gives one finding, before any process starts.
    """
    problem = construction_problem(engine_class, folder, device, always)
    if problem is not None:
        yield Finding(RULES[0], problem)
        return
    with RuleRanks(world, device, engine_class.__name__) as ranks:
        for number, rule in enumerate(rules):
            yield Finding(rule, ranks.problem(rule.name, engine_class, f"{folder}/{number:02d}", always))
