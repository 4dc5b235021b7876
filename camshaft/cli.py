"""The command line: one command, sub-commands, nothing heavy imported before it is needed.

    camshaft ppo key=value ...            train with PPO and its kin   (= python -m camshaft.trainer.main_ppo)
    camshaft sft key=value ...            supervised fine-tuning       (= python -m camshaft.trainer.main_sft)
    camshaft config explain KEY           what a key means, its default, what it takes
    camshaft check-engine pkg.mod:Class   prove an engine against the contract

Errors of ours are one message on stderr and exit status 2 (a wrong config or argument) or 1 (all else);
a trace is shown only for errors that nobody foresaw.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from camshaft import __version__
from camshaft.errors import CamshaftError, ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except CamshaftError as error:
        sys.stderr.write(f"camshaft: {type(error).__name__}: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["ppo"]:
        from camshaft.trainer import main_ppo

        return main_ppo.main(arguments[1:])
    if arguments[:1] == ["sft"]:
        from camshaft.trainer import main_sft

        return main_sft.main(arguments[1:])
    options = _parser().parse_args(arguments)
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="camshaft",
        description="Reinforcement-learning post-training of language models on one training-engine interface.",
    )
    parser.add_argument("--version", action="version", version=f"camshaft {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    commands.add_parser("ppo", help="train with PPO and its kin: camshaft ppo key=value ...", add_help=False)
    commands.add_parser("sft", help="supervised fine-tuning: camshaft sft key=value ...", add_help=False)
    _config_commands(commands.add_parser("config", help="explain or list the keys of the config"))
    check = commands.add_parser("check-engine", help="prove an engine against the contract")
    check.add_argument("engine", metavar="NAME|pkg.module:Class", help="an engine of ours or anybody's")
    check.add_argument("--rule", help="only rules whose name contains this")
    check.set_defaults(run=_check_engine)
    return parser


def _config_commands(config: argparse.ArgumentParser) -> None:
    actions = config.add_subparsers(required=True, metavar="ACTION")
    explain = actions.add_parser("explain", help="what one key means")
    explain.add_argument("key", help="dotted, for instance algorithm.kl_ctrl.kl_coef")
    show = actions.add_parser("show", help="all keys with their defaults and comments")
    docs = actions.add_parser("docs", help="write the reference page of all keys")
    docs.add_argument("--out", required=True, help="the Markdown file to write")
    for action in (explain, show, docs):
        action.add_argument("--trainer", choices=("ppo", "sft"), default="ppo", help="whose config (default: ppo)")
    explain.set_defaults(run=_explain)
    show.set_defaults(run=_show)
    docs.set_defaults(run=_docs)


def _explain(options: argparse.Namespace) -> int:
    from camshaft.config import explain

    sys.stdout.write(explain(options.key, options.trainer) + "\n")
    return 0


def _show(options: argparse.Namespace) -> int:
    from camshaft.config import show

    sys.stdout.write(show(options.trainer) + "\n")
    return 0


def _docs(options: argparse.Namespace) -> int:
    from pathlib import Path

    from camshaft.config import reference_page

    Path(options.out).write_text(reference_page(), encoding="utf-8")
    return 0


def _check_engine(options: argparse.Namespace) -> int:
    """A line per rule as it is done; exit status 1 if one does not hold."""
    import tempfile

    from rich.console import Console

    from camshaft.engine import engine_class
    from camshaft.engine.contract import RULES, Finding, check_engine

    console = Console(highlight=False)
    rules = [rule for rule in RULES if (options.rule or "") in rule.name]
    if not rules:
        raise ConfigError(f"no rule's name contains '{options.rule}'; rules: {', '.join(r.name for r in RULES)}")
    found = engine_class(options.engine)
    console.print(f"{found.__module__}:{found.__name__} against {len(rules)} rules of the engine contract")

    def report(finding: Finding) -> None:
        name = f"{finding.rule.name:<34}"
        if finding.problem is None:
            console.print(f"[green]holds[/]   {name} {finding.rule.meaning.splitlines()[0]}", soft_wrap=True)
        else:
            console.print(f"[red]BROKEN[/]  {name}", soft_wrap=True)
            console.print(f"        {finding.problem}", markup=False, soft_wrap=True)

    with tempfile.TemporaryDirectory() as folder:
        findings = check_engine(found, folder, report, rules)
    broken = sum(finding.problem is not None for finding in findings)
    console.print(f"{len(findings) - broken} of {len(findings)} rules hold")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
