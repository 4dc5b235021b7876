"""Rules of a contract, which are checked one by one against an implementation of an interface.

    RULES = make_rules(greedy_is_exact, seeds_are_respected, ...)    # functions of a harness
    for verdict in run_rules(RULES, lambda number: EngineHarness(cls, folder)): ...

A rule is a function that takes a harness. Its docstring states the requirement, and its name appears in reports. If the
implementation breaks the rule, the function raises `Violation` with a description of the observed behavior. The
contracts of engines, rollouts and controllers consist of such rules.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Harness = TypeVar("Harness")


class Violation(Exception):
    """Raised by a rule that an implementation breaks; the message describes the observed behavior."""


class NotClaimed(Exception):
    """Raised by a rule about a feature that an implementation refuses; the message says how."""


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
class Verdict:
    """Result of checking one rule. `problem` describes the violation or error; None if the rule holds."""

    rule: Rule[Any]
    problem: str | None
    not_claimed: str | None = None
    """Reason why the rule does not concern the implementation; None if it does."""


def make_rules(*checks: Callable[[Harness], None]) -> tuple[Rule[Harness], ...]:
    """Create one rule from each function, with the function's name."""
    return tuple(Rule(check.__name__.replace("_", " "), check) for check in checks)


def run_rules(
    rules: Sequence[Rule[Harness]], make_harness: Callable[[int], Harness], implementation: type | None = None
) -> Iterator[Verdict]:
    """Check each rule on a new harness, `make_harness(number of the rule)`, and yield its verdict.

    An error in a rule is its verdict and does not stop the other rules. `implementation` is the checked class.
    """
    for number, rule in enumerate(rules):
        problem = find_problem(lambda number=number, rule=rule: rule.check(make_harness(number)), implementation)
        yield Verdict(rule, problem)


def check_claimed(rule: Rule[Harness], harness: Harness) -> Verdict:
    """Check a rule that may concern a feature which the implementation does not claim to have."""
    try:
        return Verdict(rule, find_problem(lambda: rule.check(harness)))
    except NotClaimed as reason:
        return Verdict(rule, None, str(reason))


def rule_table(rules: Sequence[Rule[Any]]) -> str:
    """Return a Markdown table of the names and meanings of `rules`; `tools/rule_tables.py` writes it to the docs."""
    return "".join(["| rule | meaning |\n|---|---|\n", *(f"| {rule.name} | {rule.meaning} |\n" for rule in rules)])


def find_problem(action: Callable[[], Any], implementation: type | None = None) -> str | None:
    """Run `action`; return a description of the violation or error it raises, or None if it raises none.

    The description of an error contains the innermost frame in the code of the class `implementation`.
    """
    try:
        action()
    except NotClaimed:
        raise
    except Violation as violation:
        return str(violation)
    except Exception as error:
        frame = None if implementation is None else innermost_frame(error, implementation)
        return f"{type(error).__name__}: {error}" + ("" if frame is None else f" ({frame})")
    return None


def innermost_frame(error: Exception, implementation: type) -> str | None:
    """Return the innermost frame of an error that is in the code of a class, as 'file:line in function', or None.

    The code of a class is its package. If no frame is in this package, the packages of its base classes are searched.
    """
    frames = list(traceback.walk_tb(error.__traceback__))[::-1]
    for cls in implementation.__mro__:
        package = cls.__module__.partition(".")[0]
        for frame, line in frames:
            module = frame.f_globals.get("__name__", "")
            if module.partition(".")[0] == package and not module.startswith("camshaft.contracts."):
                return f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_qualname}"
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
