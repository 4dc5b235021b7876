"""Checks of the data and the reward function of a PPO run, for `camshaft check-data`.

    status = check_data(config)        # a PPOConfig

Tokenizer, files and reward function are loaded by the functions of a run, with the same errors; no model is loaded.
The exit status is 0 if the run can start, and 1 if it cannot or the reward function fails. The last line gives the
result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from camshaft.config import CustomRewardConfig, PPOConfig
from camshaft.data import (
    OPTIONAL,
    PromptOptions,
    StatefulLoader,
    TokenizedPrompts,
    build_prompt_set,
    count_repeated,
    count_shared,
    data_files,
    read_prompts,
    summarize_files,
    summarize_lengths,
)
from camshaft.data.chat import render_prompt
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import CamshaftError
from camshaft.models.loader import load_tokenizer
from camshaft.rewards.manager import RewardResult
from camshaft.trainer.build import prompt_files, prompt_options
from camshaft.trainer.scoring import build_rewards, check_scorable
from camshaft.trainer.session import log_to_console

_SCORED = 10
_SHOWN = 2000
"""Characters of the printed prompt."""
_BAR = 40

Say = Callable[[str], None]


def check_data(config: PPOConfig) -> int:
    """Check one config and print the report; returns the exit status."""
    console = Console(highlight=False)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    problems: list[str] = []
    with log_to_console(console, config.trainer.seed):
        try:
            for problem in _problems(config, say):
                say(f"! {problem}")
                problems.append(problem)
        except CamshaftError as error:
            say(f"! {error}")
            problems.append(str(error))
    if not problems:
        say("\nOK: a run would start with these data")
        return 0
    more = f" (and {len(problems) - 1} more, above)" if len(problems) > 1 else ""
    say(f"\nFAILED: {problems[0].splitlines()[0]}{more}")
    return 1


def _problems(config: PPOConfig, say: Say) -> Iterator[str]:
    """Print the report and yield problems; a fatal problem raises."""
    tokenizer: Any = load_tokenizer(config.tokenizer_path(), config.data.trust_remote_code)
    options = prompt_options(config)
    read: dict[str, TokenizedPrompts] = {}
    batches: dict[str, DataProto] = {}
    for name, train in (("training", True), ("validation", False)):
        paths, max_rows = prompt_files(config, train)
        if not paths:
            continue
        say(f"\n{name} prompts")
        files = data_files(paths)
        _print_schema(files, options, say)
        prompts = read[name] = read_prompts(files, tokenizer, options, max_rows)
        if train:
            text = render_prompt(prompts.prompts[0], tokenizer, prompts.table.location(0))
            say(f"  the first prompt as the model reads it:\n{_shorten(text, _SHOWN)}\n  ({_summary(prompts)})")
        _print_lengths(prompts, options, say)
        try:
            batches[name] = build_prompt_set(prompts, tokenizer, options).batch
            if train:
                StatefulLoader(batches[name], config.data.train_batch_size)
            if config.needs_function():
                check_scorable(batches[name], config.custom_reward_function, beside_model=config.reward_model.enable)
        except CamshaftError as error:
            yield str(error)
    _print_duplicates(read, say)
    if not config.needs_function():
        say("\nno reward function: only the reward model scores")
    elif "training" in batches:
        yield from _score(batches["training"], config.custom_reward_function, say)


# -- files and prompts ----------------------------------------------------------------------------


def _print_schema(files: Sequence[Path], options: PromptOptions, say: Say) -> None:
    for facts in summarize_files(files, [*options.columns(), *OPTIONAL]):
        say(f"  {facts.path}: {facts.num_rows} rows")
        for column in facts.columns:
            missing = "not read" if column.missing is None else f"{column.missing} missing"
            say(f"    {column.name:<20} {missing:<12} {_shorten(column.type, 80)}")


def _summary(read: TokenizedPrompts) -> str:
    kinds = sorted({"text" if isinstance(prompt, str) else "messages" for prompt in read.prompts})
    return f"{int(read.ids.lengths[0])} tokens; the prompts of this set are {' and '.join(kinds)}"


def _print_lengths(read: TokenizedPrompts, options: PromptOptions, say: Say) -> None:
    facts, count = summarize_lengths(read.ids.lengths), len(read.ids)
    shown = ", ".join(f"p{percent} {length}" for percent, length in facts.percentiles.items())
    say(f"  tokens of a prompt: {shown}, max {facts.max_length}")
    most, width = max(number for _, _, number in facts.bars), len(str(facts.max_length))
    for first, last, number in facts.bars:
        say(f"    {first:>{width}}-{last:<{width}} {'#' * -(-_BAR * number // most):<{_BAR}} {number}")
    long, limit = (
        len(read.overlong_rows(options.max_prompt_length)),
        f"{options.length_key}={options.max_prompt_length}",
    )
    if options.filter_overlong:
        effect = "dropped by data.filter_overlong_prompts=true"
    else:
        verb = "rejected" if options.truncation == "error" else "truncated"
        effect = f"{verb} by data.truncation={options.truncation}"
    say(f"  longer than {limit}: {long} of {count} ({long / count:.1%})" + (f"; {effect}" if long else ""))


def _print_duplicates(read: dict[str, TokenizedPrompts], say: Say) -> None:
    say("")
    for name, prompts in read.items():
        say(f"duplicate {name} prompts: {count_repeated(prompts.ids)} of {len(prompts.ids)}")
    if len(read) == 2:
        shared = count_shared(read["validation"].ids, read["training"].ids)
        say(f"validation prompts that are also training prompts: {shared} of {len(read['validation'].ids)}")


# -- the reward function --------------------------------------------------------------------------


def _score(prompts: DataProto, custom: CustomRewardConfig, say: Say) -> Iterator[str]:
    """Score the ground truth and an empty response of the first rows."""
    rows = prompts.reorder(slice(0, _SCORED))
    truths = [
        truth if isinstance(truth, str) else "" if truth is None else repr(truth) for truth in rows["ground_truth"]
    ]
    say(f"\nscores of the first {len(rows)} training prompts ({custom.path or 'built in'}: {custom.function_name()})")
    with build_rewards(custom) as rewards:
        responses = {"ground truth": truths, "empty": [""] * len(rows)}
        results = {
            name: rewards.score(_with_responses(rows), lambda _, texts=texts: texts)
            for name, texts in responses.items()
        }
    say(f"  {'ground truth':>12} {'empty':>12}   data_source, ground truth")
    columns = zip(*(_scores(result) for result in results.values()), rows["data_source"], truths, strict=True)
    for truth_score, empty, source, truth in columns:
        say(f"  {truth_score:>12} {empty:>12}   {source}, {_shorten(truth, 40)!r}")
    failures = [failure for result in results.values() for failure in result.failures]
    if failures:
        count = sum(result.num_failed for result in results.values())
        yield f"the reward function failed in {count} of {2 * len(rows)} calls, first at {failures[0]}"
    elif all(results["ground truth"].scores <= results["empty"].scores):
        say("  note: no ground truth scores above an empty response; the function may expect another format")


def _with_responses(rows: DataProto) -> DataProto:
    """Add a response of one token per row; the text is supplied by the decoder."""
    return rows.with_columns(responses=Ragged.from_rows([[0]] * len(rows)))


def _scores(result: RewardResult) -> list[str]:
    kinds = {failure.row: failure.kind for failure in result.failures}
    return [kinds.get(row, f"{score:g}") for row, score in enumerate(result.scores.tolist())]


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."
