"""Contracts as suites: rules that are tried one by one on somebody's class, each told as held or broken.

    RULES = rules_of(greedy_is_exact, seeds_are_honoured, ...)       # functions of a bench
    for finding in run_rules(RULES, lambda number: EngineHarness(cls, folder)): ...

What a rule proves is the docstring of its function, its name is what a report shows, and it raises
`Violation` with what it saw. The contracts of engines and rollouts are made of these.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Bench = TypeVar("Bench")


class Violation(Exception):
    """A rule does not hold; the text says what was seen."""


@dataclass(frozen=True)
class Rule(Generic[Bench]):
    """One promise of an interface."""

    name: str
    check: Callable[[Bench], None]

    @property
    def meaning(self) -> str:
        """What it proves, on one line."""
        return " ".join((inspect.getdoc(self.check) or "").split())


@dataclass(frozen=True)
class Finding:
    """What one rule found: nothing wrong, or what."""

    rule: Rule[Any]
    problem: str | None


def rules_of(*checks: Callable[[Bench], None]) -> tuple[Rule[Bench], ...]:
    """A rule per function, named after it."""
    return tuple(Rule(check.__name__.replace("_", " "), check) for check in checks)


def run_rules(rules: Sequence[Rule[Bench]], bench: Callable[[int], Bench]) -> Iterator[Finding]:
    """Try each rule on a bench of its own; one that crashes is broken, and the others still run."""
    for number, rule in enumerate(rules):
        try:
            rule.check(bench(number))
            yield Finding(rule, None)
        except Violation as violation:
            yield Finding(rule, str(violation))
        except Exception as error:
            yield Finding(rule, f"{type(error).__name__}: {error}")


def expect(holds: bool, problem: str) -> None:
    if not holds:
        raise Violation(problem)


def expect_error(action: Callable[[], Any], told: str, problem: str, kind: type[Exception] = Exception) -> None:
    """`action` must raise a `kind` whose message contains `told`; else `problem` is what is wrong."""
    try:
        action()
    except kind as error:
        expect(told in str(error), f"the error does not mention '{told}': {error}")
        return
    raise Violation(problem)
