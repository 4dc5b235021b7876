"""The engine contract tried on a group of ranks: what `camshaft check-engine --ranks N` runs.

    for finding in check_engine_on_ranks(FSDPEngine, 4, folder, always={"options": {"fsdp_size": 2}}): ...

Every rank runs every rule, in processes that live on from rule to rule. A rank that finds a rule broken, crashes
or hangs ends them all; the next rule gets new ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from camshaft.contracts.engine.harness import EngineHarness
from camshaft.contracts.engine.suite import RULES
from camshaft.contracts.rules import Finding, Rule, Violation
from camshaft.controller import Dispatch, Options, Pool, PoolSpec, Worker, register, spawn
from camshaft.controller.local import processes
from camshaft.engine import BaseEngine
from camshaft.errors import WorkerError

SECONDS = 300.0
"""What one rule may take."""
TOGETHER = 30
"""Rules that the same processes try: of each engine that they build a process group stays behind, with open files."""


class RuleRanks(contextlib.AbstractContextManager["RuleRanks"]):
    """Processes that try rules on engine classes; torch and the libraries get warm in them once."""

    def __init__(self, world: int, device: str = "cpu", name: str = "engine"):
        # A rank's own device comes with its place; the name of the kind is what an engine's config holds.
        self._spec, self._device = PoolSpec(name, ranks_per_node=world), device
        self._pool: Pool | None = None
        self._bench: _Bench
        self._tried = 0

    def problem(
        self, rule: str, engine_class: type[BaseEngine], folder: str, always: Mapping[str, Any] | None = None
    ) -> str | None:
        """What is wrong with the rule of this name, or None; `folder` and `always` as for `EngineHarness`."""
        try:
            if self._tried == TOGETHER:
                self._end()
            if self._pool is None:
                self._tried = 0
                self._pool = processes(self._spec, Options(timeout=SECONDS, preload=(__name__,)))
                self._bench = spawn(_Bench, pool=self._pool, name=self._spec.name, timeout=SECONDS)
            self._tried += 1
            self._bench.check(rule, engine_class, folder, self._device, dict(always or {}))
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


class _Bench(Worker):
    """One rank's bench."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check(
        self, rule: str, engine_class: type[BaseEngine], folder: str, device: str, always: dict[str, Any]
    ) -> None:
        """Raise `Violation` if the rule does not hold."""
        harness = EngineHarness(engine_class, folder, device, always)
        next(known for known in RULES if known.name == rule).check(harness)


def check_engine_on_ranks(
    engine_class: type[BaseEngine],
    world: int,
    folder: str,
    rules: Sequence[Rule[EngineHarness]] = RULES,
    device: str = "cpu",
    always: Mapping[str, Any] | None = None,
) -> Iterator[Finding]:
    """Try the rules in `folder` (a scratch place), each finding as it is made."""
    with RuleRanks(world, device, engine_class.__name__) as ranks:
        for number, rule in enumerate(rules):
            yield Finding(rule, ranks.problem(rule.name, engine_class, f"{folder}/{number:02d}", always))
