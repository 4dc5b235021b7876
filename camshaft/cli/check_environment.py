"""`camshaft check-environment`: check an environment before a run, or play it by hand."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from camshaft.agents.check.findings import Report, check_environment, make_starts
from camshaft.agents.check.manual import play_by_hand
from camshaft.agents.messages import make_spec
from camshaft.agents.pool import EnvironmentPool
from camshaft.config import PPOConfig
from camshaft.config.load import MISSING_MODEL, load_part
from camshaft.errors import ConfigError
from camshaft.masking import printable, remember_arguments

_COLORS = {"prompt": "dim", "sampled": "bold green", "observation": "cyan"}

Rows = list[dict[str, Any]] | None


def main(argv: Sequence[str]) -> int:
    """Check an environment, and return exit status 1 if there are findings."""
    options = _parser().parse_intermixed_args(argv)
    remember_arguments(argv)
    targets = [word for word in options.words if "=" not in word]
    overrides = [word for word in options.words if "=" in word]
    if targets:
        overrides.append(f"environment={json.dumps(targets)}")
    config = load_part(PPOConfig, overrides)
    section = config.actor_rollout_ref.rollout.multi_turn
    if section.agent is not None:
        raise ConfigError("agent is a program; this command checks environments and tools. Remove agent=")
    if not section.environment and not section.tools:
        raise ConfigError("no environment is given; write camshaft check-environment file.py:Class")
    rows: Rows = None
    if config.data.train_files:
        from camshaft.agents.check.inputs import read_rows_of  # imports torch

        rows = read_rows_of(config.data, limit=10)
    if options.play:
        return _play(config, rows)
    has_others = config.needs_function() or config.reward_model.enable
    report = check_environment(section, rows=rows, has_other_rewards=has_others)
    lines: list[tuple[str, str]] = []
    if config.actor_rollout_ref.model.path != MISSING_MODEL and report.spec is not None:
        lines = _check_template(config, report)
    _print(report, lines)
    return int(bool(report.findings))


def _check_template(config: PPOConfig, report: Report) -> list[tuple[str, str]]:
    """Check the chat template of the model. Return the parts of a row, with the kinds of their tokens."""
    from camshaft.agents.bridge import Bridge
    from camshaft.agents.check.inputs import check_template, mask_parts
    from camshaft.models.loader import load_tokenizer

    section = config.actor_rollout_ref.rollout.multi_turn
    tokenizer = load_tokenizer(config.tokenizer_path(), config.data.trust_remote_code, config.data.chat_template)
    bridge = Bridge(tokenizer, config.data.chat_template_kwargs, section.format)
    episode = check_template(report, bridge, section)
    return [] if episode is None else list(mask_parts(episode, tokenizer))


def _print(report: Report, parts: Sequence[tuple[str, str]]) -> None:
    """Print the parts of a row in colors, the notes, the findings and a summary."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, soft_wrap=True)
    for kind, text in parts:
        console.print(Text(f"{kind:>11} | {printable(repr(text)[1:-1])}", style=_COLORS[kind]))
    for note in report.notes:
        console.print(f"- {_lines(note)}")
    for finding in report.findings:
        console.print(Text(f"! {_lines(finding)}", style="red"))
    count = len(report.findings)
    found = "OK: no findings" if not count else f"FAILED: {count} finding{'s' if count > 1 else ''}"
    console.print(
        f"{found} ({len(report.episodes)} episodes, {report.num_calls} calls with repetitions, {report.seconds:.1f} s)"
    )


def _play(config: PPOConfig, rows: Rows) -> int:
    """Let a person play an episode, and return exit status 1 if the environment fails."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    has_others = config.needs_function() or config.reward_model.enable
    pool = EnvironmentPool(make_spec(config.actor_rollout_ref.rollout.multi_turn, (), has_others), 1)
    try:
        pool.spec = pool.spec.described(pool.check())
        start = make_starts(pool.spec, rows)[0]
        for message in start.row["prompt"]:
            if message["content"]:
                console.print(printable(f"{message['role']}: {message['content']}"))
        is_whole = play_by_hand(pool, start, input, lambda text: console.print(_lines(text)))
    finally:
        pool.close()
    return int(not is_whole)


def _lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="camshaft check-environment",
        usage="camshaft check-environment FILE:Class [model=FOLDER] [data=FILE] [--play] [key=value ...]",
        description="Play ten episodes three times with random answers, or random calls of the tools, in processes as "
        "in training. Reports what is not deterministic, state that reset does not clear, failures with their lines, "
        "invalid rewards and observations, episodes that do not end, slow calls, missing columns, and tools without "
        "types or docstring. With model=, also what the chat template does with the history, the longest observation, "
        "and a row with its mask.",
        epilog="key=value accepts the arguments of camshaft ppo, such as tools=file.py:f,g, max_turns=8 and "
        "actor_rollout_ref.rollout.multi_turn.environment_kwargs.level=2. Those that the check does not need have no "
        "effect. Exit status: 0 without findings, 1 with findings, 2 if an argument is invalid.",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="FILE:Class|key=value",
        help="file.py:Class, package.module:Class or the name of an entry point, one or several; model=FOLDER with a "
        "tokenizer; data=FILE with the columns that reset requires",
    )
    parser.add_argument("--play", action="store_true", help="play an episode by hand: type the answers")
    return parser
