"""The rules of the Tinker contract, and the check of a server against them.

    for verdict in check_tinker(Target(url, key, base="models/tiny", folder="models/tiny")): ...

A rule is a function of a harness. Its docstring states the requirement, and reports show its name. A verdict whose
`not_claimed` is set is about a feature that the server refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from camshaft.contracts.rules import Rule, Verdict, check_claimed, make_rules
from camshaft.contracts.tinker import handshake, losses, order, sampling, scoring, states, updates
from camshaft.contracts.tinker.harness import Target, TinkerHarness

RULES: tuple[Rule[TinkerHarness], ...] = make_rules(
    *handshake.CHECKS,
    *losses.CHECKS,
    *updates.CHECKS,
    *order.CHECKS,
    *sampling.CHECKS,
    *scoring.CHECKS,
    *states.CHECKS,
)


def check_tinker(target: Target, rules: Sequence[Rule[TinkerHarness]] = RULES) -> Iterator[Verdict]:
    """Check the rules one after another and yield a verdict for each. Their sessions end with them."""
    for rule in rules:
        with TinkerHarness(target) as harness:
            verdict = check_claimed(rule, harness)
        yield verdict
