"""Rules of a contract, checked one by one against an implementation.

    RULES = rules_of(greedy_is_exact, seeds_are_honoured, ...)       # functions of a harness
    for finding in run_rules(RULES, lambda number: EngineHarness(cls, folder)): ...

A rule is a function of a harness. Its docstring is its meaning, its name is shown in reports, and it raises
`Violation` with a description of what it observed. The contracts of engines and rollouts consist of such rules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Harness = TypeVar("Harness")


class Violation(Exception):
    """A broken rule, with a description of what was observed."""


@dataclass(frozen=True)
class Rule(Generic[Harness]):
    """One requirement of an interface."""

    name: str
    check: Callable[[Harness], None]

    @property
    def meaning(self) -> str:
        """The requirement, on one line."""
        return " ".join((inspect.getdoc(self.check) or "").split())


@dataclass(frozen=True)
class Finding:
    """Result of one rule; `problem` is None if the rule holds."""

    rule: Rule[Any]
    problem: str | None


def rules_of(*checks: Callable[[Harness], None]) -> tuple[Rule[Harness], ...]:
    """Make one rule of each function, named after it."""
    return tuple(Rule(check.__name__.replace("_", " "), check) for check in checks)


def run_rules(rules: Sequence[Rule[Harness]], harness_of: Callable[[int], Harness]) -> Iterator[Finding]:
    """Check each rule on a new harness. An error in one rule is a finding and does not stop the others."""
    for number, rule in enumerate(rules):
        yield Finding(rule, problem_of(lambda number=number, rule=rule: rule.check(harness_of(number))))


def problem_of(action: Callable[[], Any]) -> str | None:
    """Run `action`; return a description of its violation or error, None if it succeeds."""
    try:
        action()
    except Violation as violation:
        return str(violation)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def expect(holds: bool, problem: str) -> None:
    """Raise `Violation(problem)` unless `holds`."""
    if not holds:
        raise Violation(problem)


def expect_error(action: Callable[[], Any], phrase: str, problem: str, kind: type[Exception] = Exception) -> None:
    """Raise `Violation(problem)` unless `action` raises a `kind`, and a `Violation` if its message lacks `phrase`."""
    try:
        action()
    except kind as error:
        expect(phrase in str(error), f"the error does not mention '{phrase}': {error}")
        return
    raise Violation(problem)
