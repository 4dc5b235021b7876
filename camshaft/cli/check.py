"""`camshaft check-engine` and `camshaft check-rollout`: check a backend against the contract of its interface.

camshaft check-engine fsdp --ranks 4 --option fsdp_size=2
camshaft check-engine my_package.engine:MyEngine --rule gradient
camshaft check-rollout torch
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from camshaft.errors import ConfigError

if TYPE_CHECKING:
    from camshaft.contracts.rules import Rule, Verdict

Check = Callable[[str, Sequence["Rule"], str], "Iterator[Verdict]"]
"""(scratch folder, rules, device) -> one verdict per rule."""


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
    parser.add_argument("--rule", default="", help="check only the rules whose names contain this text")
    parser.add_argument("--device", default="cpu", help="device to run on (default: cpu)")
    return parser


def _report(backend: type, rules: Sequence[Rule], check: Check, options: argparse.Namespace) -> int:
    """Check the selected rules, print each result and its duration when it is available, and return the exit status."""
    from rich.console import Console

    console = Console(highlight=False)
    selected_rules = [rule for rule in rules if options.rule in rule.name]
    if not selected_rules:
        names = ", ".join(rule.name for rule in rules)
        raise ConfigError(f"--rule {options.rule} matches no rule; use a part of one of these names: {names}")
    title = f"{backend.__module__}:{backend.__name__} against {len(selected_rules)} rules"
    console.print(title, markup=False, soft_wrap=True)
    num_passed = 0
    start = previous = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for verdict in check(folder, selected_rules, options.device):
            now = time.perf_counter()
            seconds, previous = f"{now - previous:5.1f} s", now
            num_passed += verdict.problem is None
            state = "[green]holds [/]" if verdict.problem is None else "[red]BROKEN[/]"
            console.print(f"{state} {seconds}  {verdict.rule.name}", soft_wrap=True)
            detail = verdict.problem or verdict.rule.meaning
            console.print(f"        {detail}", markup=False, style="dim", soft_wrap=True)
    console.print(f"{num_passed} of {len(selected_rules)} rules hold ({time.perf_counter() - start:.1f} s)")
    return 0 if num_passed == len(selected_rules) else 1
