"""What a run would find in its data, told before anything expensive starts: `camshaft check-data`.

    status = check_data(config)        # a PPOConfig

Tokenizer, files and scoring function are loaded as a run loads them, by the same functions and with the same errors; no
model is. Exit status 0 where a run would start, 1 where it would not or the scoring function fails, and the last line
says which.
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
    ReadPrompts,
    StatefulLoader,
    arrange,
    data_files,
    file_facts,
    length_facts,
    num_repeated,
    num_shared,
    read_prompts,
)
from camshaft.data.chat import as_text
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import CamshaftError
from camshaft.models.loader import load_tokenizer
from camshaft.rewards.manager import RewardResult
from camshaft.trainer.build import prompt_files, prompt_options
from camshaft.trainer.scoring import build_rewards, check_scorable
from camshaft.trainer.session import logged

_SCORED = 10
_SHOWN = 2000
"""Characters of the prompt that is shown."""
_BAR = 40

Say = Callable[[str], None]


def check_data(config: PPOConfig) -> int:
    """All of it; returns the exit status."""
    console = Console(highlight=False)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    problems: list[str] = []
    with logged(console, config.trainer.seed):
        try:
            for problem in _look(config, say):
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


def _look(config: PPOConfig, say: Say) -> Iterator[str]:
    """Say what there is; yield what is wrong. What cannot be gone on from is raised."""
    tokenizer: Any = load_tokenizer(config.tokenizer_path(), config.data.trust_remote_code)
    options = prompt_options(config)
    read: dict[str, ReadPrompts] = {}
    batches: dict[str, DataProto] = {}
    for name, train in (("training", True), ("validation", False)):
        paths, most = prompt_files(config, train)
        if not paths:
            continue
        say(f"\n{name} prompts")
        files = data_files(paths)
        _tell_schema(files, options, say)
        found = read[name] = read_prompts(files, tokenizer, options, most)
        if train:
            text = as_text(found.prompts[0], tokenizer, found.table.place(0))
            say(f"  the first prompt as the model gets it:\n{_shortened(text, _SHOWN)}\n  ({_told(found)})")
        _tell_lengths(found, options, say)
        try:
            batches[name] = arrange(found, tokenizer, options).batch
            if train:
                StatefulLoader(batches[name], config.data.train_batch_size)
            if config.needs_function():
                check_scorable(batches[name], config.custom_reward_function, beside_model=config.reward_model.enable)
        except CamshaftError as error:
            yield str(error)
    _tell_repeated(read, say)
    if not config.needs_function():
        say("\nno scoring function is called: a reward model alone scores")
    elif "training" in batches:
        yield from _score(batches["training"], config.custom_reward_function, say)


# -- files and prompts ----------------------------------------------------------------------------


def _tell_schema(files: Sequence[Path], options: PromptOptions, say: Say) -> None:
    for facts in file_facts(files, [*options.columns(), *OPTIONAL]):
        say(f"  {facts.path}: {facts.num_rows} rows")
        for column in facts.columns:
            missing = "not read" if column.missing is None else f"{column.missing} missing"
            say(f"    {column.name:<20} {missing:<12} {_shortened(column.type, 80)}")


def _told(read: ReadPrompts) -> str:
    kinds = sorted({"text" if isinstance(prompt, str) else "messages" for prompt in read.prompts})
    return f"{int(read.ids.lengths[0])} tokens; the prompts of this set are {' and '.join(kinds)}"


def _tell_lengths(read: ReadPrompts, options: PromptOptions, say: Say) -> None:
    facts, count = length_facts(read.ids.lengths), len(read.ids)
    shown = ", ".join(f"p{percent} {length}" for percent, length in facts.percentiles.items())
    say(f"  tokens of a prompt: {shown}, max {facts.longest}")
    most, width = max(number for _, _, number in facts.bars), len(str(facts.longest))
    for first, last, number in facts.bars:
        say(f"    {first:>{width}}-{last:<{width}} {'#' * -(-_BAR * number // most):<{_BAR}} {number}")
    long, limit = len(read.too_long(options.max_prompt_length)), f"{options.length_key}={options.max_prompt_length}"
    if options.filter_overlong:
        does = "data.filter_overlong_prompts=true leaves them out"
    else:
        does = f"data.truncation={options.truncation} " + (
            "makes them an error" if options.truncation == "error" else "cuts them"
        )
    say(f"  longer than {limit}: {long} of {count} ({long / count:.1%})" + (f"; {does}" if long else ""))


def _tell_repeated(read: dict[str, ReadPrompts], say: Say) -> None:
    say("")
    for name, found in read.items():
        say(f"{name} prompts that are there more than once: {num_repeated(found.ids)} of {len(found.ids)}")
    if len(read) == 2:
        shared = num_shared(read["validation"].ids, read["training"].ids)
        say(f"validation prompts that are training prompts too: {shared} of {len(read['validation'].ids)}")


# -- the scoring function -------------------------------------------------------------------------


def _score(prompts: DataProto, custom: CustomRewardConfig, say: Say) -> Iterator[str]:
    """A dry call: the ground truth as the response, and an empty one."""
    rows = prompts.reorder(slice(0, _SCORED))
    truths = [
        truth if isinstance(truth, str) else "" if truth is None else repr(truth) for truth in rows["ground_truth"]
    ]
    say(f"\nscores of the first {len(rows)} training prompts ({custom.path or 'built in'}: {custom.function_name()})")
    with build_rewards(custom) as rewards:
        given = {"ground truth": truths, "empty": [""] * len(rows)}
        results = {what: rewards.score(_answered(rows), lambda _, texts=texts: texts) for what, texts in given.items()}
    say(f"  {'ground truth':>12} {'empty':>12}   data_source, the ground truth")
    columns = zip(*(_scores(result) for result in results.values()), rows["data_source"], truths, strict=True)
    for with_truth, empty, source, truth in columns:
        say(f"  {with_truth:>12} {empty:>12}   {source}, {_shortened(truth, 40)!r}")
    failed = [failure for result in results.values() for failure in result.failures]
    if failed:
        count = sum(result.num_failed for result in results.values())
        yield f"the scoring function failed in {count} of {2 * len(rows)} calls, first at {failed[0]}"
    elif all(results["ground truth"].scores <= results["empty"].scores):
        say("  note: no ground truth scores above an empty response; the function may want another form of answer")


def _answered(rows: DataProto) -> DataProto:
    """The rows with a response of one token each, whose text is given by hand."""
    return rows.with_columns(responses=Ragged.from_rows([[0]] * len(rows)))


def _scores(result: RewardResult) -> list[str]:
    failed = {failure.row: failure.kind for failure in result.failures}
    return [failed.get(row, f"{score:g}") for row, score in enumerate(result.scores.tolist())]


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
