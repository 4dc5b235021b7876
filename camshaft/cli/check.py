"""`camshaft check-engine` and `camshaft check-rollout`: check a backend against the contract of its interface.

camshaft check-engine fsdp --ranks 4 --option fsdp_size=2
camshaft check-engine my_package.engine:MyEngine --rule gradient
camshaft check-rollout torch
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from camshaft.errors import ConfigError

if TYPE_CHECKING:
    from camshaft.contracts.rules import Rule, Verdict

Check = Callable[[str, Sequence["Rule"], str], "Iterator[Verdict]"]
"""(scratch folder, rules, device) -> one verdict per rule."""
_SHOWN = {"holds": "[green]holds [/]", "broken": "[red]BROKEN[/]", "not claimed": "[yellow]no    [/]"}
"""States of rules in a report."""


def engine(argv: Sequence[str]) -> int:
    """Check an engine, and return exit status 1 if it breaks a rule."""
    parser = _parser("engine")
    parser.add_argument(
        "--ranks", type=_count, default=0, help="number of processes to start (default: use this process)"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="entry of EngineConfig.options, for example fsdp_size=2; can be repeated",
    )
    options = parser.parse_args(argv)
    from camshaft.config.command import parse_options
    from camshaft.contracts.engine.ranks import check_engine_on_ranks
    from camshaft.contracts.engine.suite import RULES, check_engine
    from camshaft.engine import engine_class

    common_fields = {"options": parse_options(options.option)} if options.option else {}
    backend = engine_class(options.name)

    def check(folder: str, rules: Sequence[Rule], device: str) -> Iterator[Verdict]:
        if options.ranks:
            return check_engine_on_ranks(backend, options.ranks, folder, rules, device, common_fields)
        return check_engine(backend, folder, rules, device, common_fields=common_fields)

    return _report(backend, RULES, check, options)


def rollout(argv: Sequence[str]) -> int:
    """Check a rollout backend, and return exit status 1 if it breaks a rule."""
    options = _parser("rollout").parse_args(argv)
    from camshaft.contracts.rollout.suite import RULES, check_rollout
    from camshaft.rollout import rollout_class

    backend = rollout_class(options.name)
    return _report(backend, RULES, partial(check_rollout, backend), options)


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise ValueError(text)
    return count


def _parser(kind: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"camshaft check-{kind}", description=f"Check a backend against the contract for {kind}s."
    )
    parser.add_argument("name", metavar="NAME|pkg.module:Class", help="built-in name, or import path of a custom class")
    add_report_options(parser)
    parser.add_argument("--device", default="cpu", help="device to run on (default: cpu)")
    return parser


def _report(backend: type, rules: Sequence[Rule], check: Check, options: argparse.Namespace) -> int:
    """Check the selected rules in a scratch folder, and return the exit status."""

    def verdicts(selected: Sequence[Rule]) -> Iterator[Verdict]:
        with tempfile.TemporaryDirectory() as folder:
            yield from check(folder, selected, options.device)

    return report(f"{backend.__module__}:{backend.__name__}", rules, verdicts, options)


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `report` reads."""
    parser.add_argument("--rule", default="", help="check only the rules whose names contain this text")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def report(
    subject: str,
    rules: Sequence[Rule],
    check: Callable[[Sequence[Rule]], Iterator[Verdict]],
    options: argparse.Namespace,
) -> int:
    """Check the selected rules, print each result and its duration when it is available, and return the exit status."""
    from rich.console import Console

    selected_rules = [rule for rule in rules if options.rule in rule.name]
    if not selected_rules:
        names = ", ".join(rule.name for rule in rules)
        raise ConfigError(f"--rule {options.rule} matches no rule; use a part of one of these names: {names}")
    console = Console(highlight=False, quiet=options.json)
    console.print(f"{subject} against {len(selected_rules)} rules", markup=False, soft_wrap=True)
    results = list[dict[str, Any]]()
    start = previous = time.perf_counter()
    for verdict in check(selected_rules):
        now = time.perf_counter()
        seconds, previous = now - previous, now
        state = "broken" if verdict.problem is not None else "holds" if verdict.not_claimed is None else "not claimed"
        detail = verdict.problem or verdict.not_claimed or verdict.rule.meaning
        results.append({"rule": verdict.rule.name, "state": state, "detail": detail, "seconds": round(seconds, 2)})
        console.print(f"{_SHOWN[state]} {seconds:5.1f} s  {verdict.rule.name}", soft_wrap=True)
        console.print(f"        {detail}", markup=False, style="dim", soft_wrap=True)
    counts = Counter(result["state"] for result in results)
    others = f", {counts['not claimed']} are not claimed" if counts["not claimed"] else ""
    console.print(f"{counts['holds']} of {len(results)} rules hold{others} ({time.perf_counter() - start:.1f} s)")
    if options.json:
        sys.stdout.write(json.dumps({"subject": subject, "rules": results}, indent=1) + "\n")
    return 1 if counts["broken"] else 0
