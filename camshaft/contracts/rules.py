"""Rules of a contract, which are checked one by one against an implementation of an interface.

    RULES = make_rules(greedy_is_exact, seeds_are_respected, ...)    # functions of a harness
    for finding in run_rules(RULES, lambda number: EngineHarness(cls, folder)): ...

A rule is a function that takes a harness. Its docstring states the requirement, and its name appears in reports. If the
implementation breaks the rule, the function raises `Violation` with a description of the observed behavior. The
contracts of engines, rollouts and controllers consist of such rules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Harness = TypeVar("Harness")


class Violation(Exception):
    """Raised by a rule that an implementation breaks; the message describes the observed behavior."""


@dataclass(frozen=True)
class Rule(Generic[Harness]):
    """One requirement of an interface, and the function that checks it."""

    name: str
    check: Callable[[Harness], None]

    @property
    def meaning(self) -> str:
        """The requirement as one line of text, from the docstring of `check`."""
        return " ".join((inspect.getdoc(self.check) or "").split())


@dataclass(frozen=True)
class Finding:
    """Result of checking one rule. `problem` describes the violation or error; None if the rule holds."""

    rule: Rule[Any]
    problem: str | None


def make_rules(*checks: Callable[[Harness], None]) -> tuple[Rule[Harness], ...]:
    """Create one rule from each function, with the function's name."""
    return tuple(Rule(check.__name__.replace("_", " "), check) for check in checks)


def run_rules(rules: Sequence[Rule[Harness]], make_harness: Callable[[int], Harness]) -> Iterator[Finding]:
    """Check each rule on a new harness, `make_harness(number of the rule)`, and yield its finding.

    An error in one rule becomes a finding and does not stop the other rules.
    """
    for number, rule in enumerate(rules):
        yield Finding(rule, find_problem(lambda number=number, rule=rule: rule.check(make_harness(number))))


def rule_table(rules: Sequence[Rule[Any]]) -> str:
    """Return a Markdown table of the names and meanings of `rules`; `tools/rule_tables.py` writes it to the docs."""
    return "".join(["| rule | meaning |\n|---|---|\n", *(f"| {rule.name} | {rule.meaning} |\n" for rule in rules)])


def find_problem(action: Callable[[], Any]) -> str | None:
    """Run `action`; return a description of the violation or error it raises, or None if it raises none."""
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
    """Raise `Violation` unless `action` raises an error of class `kind` whose message contains `phrase`.

    The message of the violation is `problem` if no such error is raised.
    """
    try:
        action()
    except kind as error:
        expect(phrase in str(error), f"the error does not mention '{phrase}': {error}")
        return
    raise Violation(problem)
