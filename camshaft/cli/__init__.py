"""The command line: one command, sub-commands, nothing heavy imported before it is needed.

    camshaft ppo key=value ...            train with PPO and its kin   (= python -m camshaft.trainer.main_ppo)
    camshaft sft key=value ...            supervised fine-tuning       (= python -m camshaft.trainer.main_sft)
    camshaft rm key=value ...             train a reward model         (= python -m camshaft.trainer.main_rm)
    camshaft generate key=value ...       responses to the prompts of a parquet file
    camshaft check-data key=value ...     what camshaft ppo would find in its data, before anything is started
    camshaft eval key=value ...           scores of such responses, as a table
    camshaft export CHECKPOINT FOLDER     the model of a checkpoint as a Hugging Face folder
    camshaft config explain KEY           what a key means, its default, what it takes
    camshaft metrics explain NAME         what a metric means
    camshaft check-engine pkg.mod:Class   prove an engine against its contract; check-rollout likewise
    camshaft checkpoints FOLDER           which steps of a run are on disk, and which are whole
    camshaft parity --engine A --rollout B --model FOLDER     do the two agree, and if not, why?

Errors of ours are one message on stderr and exit status 2 (a wrong config or argument) or 1 (all else);
a trace is shown only for errors that nobody foresaw.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from camshaft import __version__
from camshaft.cli.metrics import add_arguments as add_metrics_arguments
from camshaft.errors import CamshaftError, ConfigError, tell

if TYPE_CHECKING:
    from camshaft.contracts.rules import Finding, Rule


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, "")  # my_engine:MyEngine is found in the folder one stands in, as with python -m
    try:
        return _run(arguments)
    except CamshaftError as error:
        return tell(error)


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["ppo"]:
        from camshaft.trainer import main_ppo

        return main_ppo.main(arguments[1:])
    if arguments[:1] == ["sft"]:
        from camshaft.trainer import main_sft

        return main_sft.main(arguments[1:])
    if arguments[:1] == ["rm"]:
        from camshaft.trainer import main_rm

        return main_rm.main(arguments[1:])
    if arguments[:1] == ["generate"]:
        from camshaft.trainer import main_generation

        return main_generation.main(arguments[1:])
    if arguments[:1] == ["check-data"]:
        from camshaft.trainer import main_check_data

        return main_check_data.main(arguments[1:])
    if arguments[:1] == ["eval"]:
        from camshaft.trainer import main_eval

        return main_eval.main(arguments[1:])
    if arguments[:1] == ["export"]:
        from camshaft.cli import export

        return export.main(arguments[1:])
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
    commands.add_parser("rm", help="train a reward model: camshaft rm key=value ...", add_help=False)
    generate = "responses to the prompts of a parquet file: camshaft generate key=value ..."
    commands.add_parser("generate", help=generate, add_help=False)
    look = "look at the data and the scoring function of a run: camshaft check-data key=value ..."
    commands.add_parser("check-data", help=look, add_help=False)
    scores = "score the responses of a parquet file: camshaft eval key=value ..."
    commands.add_parser("eval", help=scores, add_help=False)
    commands.add_parser("export", help="the model of a checkpoint as a Hugging Face folder", add_help=False)
    _config_commands(commands.add_parser("config", help="explain or list the keys of the config"))
    add_metrics_arguments(commands.add_parser("metrics", help="explain or list what runs log"))
    for what, run in (("engine", _check_engine), ("rollout", _check_rollout)):
        check = commands.add_parser(f"check-{what}", help=f"prove one {what} against the contract of all")
        check.add_argument("name", metavar="NAME|pkg.module:Class", help="one of ours, or anybody's")
        check.add_argument("--rule", default="", help="only rules whose name contains this")
        check.add_argument("--device", default="cpu", help="where to run it (default: cpu)")
        check.set_defaults(run=run)
        if what == "engine":
            check.add_argument("--ranks", type=int, default=0, help="on so many processes (default: in this one)")
            check.add_argument(
                "--option",
                action="append",
                default=[],
                metavar="KEY=VALUE",
                help="an entry of EngineConfig.options, as often as needed: --option fsdp_size=2",
            )
    _parity_command(commands)
    says = "the steps of a run that are on disk: whole or broken, size, age, best"
    checkpoints = commands.add_parser("checkpoints", help=says, description=says)
    checkpoints.add_argument("folder", metavar="FOLDER", help="trainer.default_local_dir of the run")
    checkpoints.set_defaults(run=_checkpoints)
    return parser


def _parity_command(commands: Any) -> None:
    says = "do a training engine and a generator agree on log-probs, and if not, why?"
    parity = commands.add_parser(
        "parity",
        help=says,
        description=f"{says} Both are built on a model folder, in this process; the generator gets the engine's "
        "weights and answers prompts, the engine computes the log-probs of the answers again; where these agree and "
        "the engine's weights are not bfloat16, once more after an update. Exit status 0: no difference above the "
        "limit; 1: there is one, with its likely cause; 2: a wrong argument.",
        epilog="For instance: camshaft parity --engine fsdp --rollout torch --model models/tiny --temperature 0.7",
    )
    sizes = {
        "--prompts": (8, "how many prompts"),
        "--prompt-length": (32, "the longest one; of a longer one the end is taken"),
        "--response-length": (32, "most tokens of a response"),
        "--seed": (0, "of random prompts and of sampling"),
        "--top-k": (0, "sample from the so many likeliest tokens; 0 is all"),
    }
    dtypes = ("float32", "bfloat16", "float64")
    pair = parity.add_argument_group("the pair")
    pair.add_argument("--engine", required=True, metavar="NAME", help="fsdp, reference, ..., or pkg.mod:Class")
    pair.add_argument("--rollout", required=True, metavar="NAME", help="torch, hf, vllm, ..., or pkg.mod:Class")
    pair.add_argument("--model", required=True, metavar="FOLDER", help="a Hugging Face folder with weights")
    pair.add_argument("--device", default="cpu", help="where both run (default: cpu)")
    pair.add_argument("--dtype", choices=dtypes, default="float32", help="of the engine (default: float32)")
    pair.add_argument("--rollout-dtype", choices=dtypes, default="float32", help="of the rollout (default: float32)")
    options = {"--option": "an entry of the engine's options: --option mixed_precision.param_dtype=bfloat16"}
    options["--engine-kwarg"] = "an entry of the rollout's engine_kwargs; both as often as needed"
    for name, help_text in options.items():
        pair.add_argument(name, action="append", default=[], metavar="KEY=VALUE", help=help_text)
    pair.add_argument("--trust-remote-code", action="store_true", help="run code of the model folder")
    tried = parity.add_argument_group("what it is tried with")
    tried.add_argument("--data", metavar="FILE", help="a parquet file of prompts (default: random tokens)")
    tried.add_argument("--tokenizer", metavar="FOLDER", help="of the prompts, compared with that of --model")
    for name, (default, meaning) in sizes.items():
        tried.add_argument(name, type=int, default=default, metavar="N", help=f"{meaning} (default: {default})")
    for name, meaning in {"--temperature": "of sampling; 0 is greedy", "--top-p": "probability to sample from"}.items():
        tried.add_argument(name, type=float, default=1.0, metavar="X", help=f"{meaning} (default: 1.0)")
    limit = "largest difference of log-probs that counts as agreement (default: 0.001, which float32 keeps to)"
    parity.add_argument("--limit", type=float, default=1e-3, metavar="X", help=limit)
    parity.set_defaults(run=_parity)


def _parity(options: argparse.Namespace) -> int:
    from camshaft.cli.parity import run

    return run(options)


def _checkpoints(options: argparse.Namespace) -> int:
    from camshaft.cli.checkpoints import run

    return run(options)


def _config_commands(config: argparse.ArgumentParser) -> None:
    actions = config.add_subparsers(required=True, metavar="ACTION")
    explain = actions.add_parser("explain", help="what one key means")
    explain.add_argument("key", help="dotted, for instance algorithm.kl_ctrl.kl_coef")
    show = actions.add_parser("show", help="all keys with their defaults and comments")
    docs = actions.add_parser("docs", help="write the reference page of all keys")
    docs.add_argument("--out", required=True, help="the Markdown file to write")
    for action in (explain, show, docs):
        known = ("ppo", "sft", "rm", "generate", "eval")
        action.add_argument("--trainer", choices=known, default="ppo", help="whose config (default: ppo)")
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
    from functools import partial

    from camshaft.cli.check import check_engine_on_ranks
    from camshaft.config.command import as_tree
    from camshaft.contracts.engine.suite import RULES, check_engine
    from camshaft.engine import engine_class

    always = {"options": as_tree(options.option)} if options.option else {}
    if options.ranks:

        def check(found: type, folder: str, chosen: Sequence[Rule], device: str) -> Iterator[Finding]:
            return check_engine_on_ranks(found, options.ranks, folder, chosen, device, always)

        return _check(engine_class(options.name), RULES, check, options)
    return _check(engine_class(options.name), RULES, partial(check_engine, always=always), options)


def _check_rollout(options: argparse.Namespace) -> int:
    from camshaft.contracts.rollout.suite import RULES, check_rollout
    from camshaft.rollout import rollout_class

    return _check(rollout_class(options.name), RULES, check_rollout, options)


def _check(
    found: type, rules: Sequence[Rule], check: Callable[..., Iterator[Finding]], options: argparse.Namespace
) -> int:
    """A line per rule as it is done; exit status 1 if one does not hold."""
    import tempfile

    from rich.console import Console

    console = Console(highlight=False)
    chosen = [rule for rule in rules if options.rule in rule.name]
    if not chosen:
        known = ", ".join(rule.name for rule in rules)
        raise ConfigError(f"no rule's name contains '{options.rule}'; rules: {known}")
    title = f"{found.__module__}:{found.__name__} against {len(chosen)} rules"
    console.print(title, markup=False, soft_wrap=True)
    broken = 0
    with tempfile.TemporaryDirectory() as folder:
        for finding in check(found, folder, chosen, options.device):
            broken += finding.problem is not None
            word = "[green]holds [/]" if finding.problem is None else "[red]BROKEN[/]"
            console.print(f"{word}  {finding.rule.name}", soft_wrap=True)
            console.print(
                f"        {finding.problem or finding.rule.meaning}", markup=False, style="dim", soft_wrap=True
            )
    console.print(f"{len(chosen) - broken} of {len(chosen)} rules hold")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
