"""Check the data and the reward function of a PPO run, for `camshaft check-data`.

    status = check_data(config)        # a PPOConfig

The tokenizer, the files and the reward function are loaded by the same functions as in a PPO run, so the errors are the
same. No model is loaded. The exit status is 0 if a run can start. It is 1 if a run cannot start or if the reward
function fails. The last line of the output states the result.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from camshaft.config import PPOConfig
from camshaft.config.auto.fitting import fit_to_rows
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
from camshaft.data.chat import special_token_ids
from camshaft.data.prompts import find_prompt_key
from camshaft.dataproto import DataProto
from camshaft.errors import CamshaftError, RewardError
from camshaft.masking import printable
from camshaft.models.loader import load_tokenizer
from camshaft.rewards.manager import RewardManager, Scores
from camshaft.tracking.terminal import log_to_console
from camshaft.trainer.build import prompt_files, prompt_options
from camshaft.trainer.scoring import build_rewards, check_scorable
from camshaft.trainer.session import fit_prompts

_NUM_SCORED = 10
_MAX_CHARACTERS = 2000
"""Maximum number of characters of the printed prompt."""
_BAR_WIDTH = 40

Print = Callable[[str], None]


def check_data(config: PPOConfig) -> int:
    """Check the data of a config, print a report and return the exit status."""
    console = Console(highlight=False, markup=False, soft_wrap=True)

    def say(text: str) -> None:
        console.print(printable(text))

    problems: list[str] = []
    with log_to_console(console, config.trainer.seed):
        try:
            for problem in _find_problems(config, say):
                say(f"! {problem}")
                problems.append(problem)
        except CamshaftError as error:
            say(f"! {error}")
            problems.append(str(error))
    if not problems:
        say("\nOK: a run would start with this data")
        return 0
    suffix = f" (and {len(problems) - 1} more above)" if len(problems) > 1 else ""
    say(f"\nFAILED: {problems[0].splitlines()[0]}{suffix}")
    return 1


def _find_problems(config: PPOConfig, say: Print) -> Iterator[str]:
    """Print the report and yield problems. Raise CamshaftError for a problem that prevents further checks."""
    with ExitStack() as stack:
        rewards: RewardManager | None = None
        if config.needs_function():
            try:
                rewards = stack.enter_context(build_rewards(config.custom_reward_function))
            except CamshaftError as error:
                yield str(error)
        batches = yield from _check_prompts(config, rewards, say)
        if rewards is not None and "training" in batches:
            yield from _check_reward_function(batches["training"], rewards, say)


def _check_prompts(
    config: PPOConfig, rewards: RewardManager | None, say: Print
) -> Generator[str, None, dict[str, DataProto]]:
    """Print the report on the data files, yield problems, and return the prompts."""
    tokenizer: Any = load_tokenizer(config.tokenizer_path(), config.data.trust_remote_code, config.data.chat_template)
    options = prompt_options(config, reward_columns=None)
    tokenized_prompts: dict[str, TokenizedPrompts] = {}
    batches: dict[str, DataProto] = {}
    fitted = config
    for name, train in (("training", True), ("validation", False)):
        paths, max_rows = prompt_files(config, train)
        if not paths:
            continue
        say(f"\n{name} prompts")
        files = data_files(paths)
        options = replace(options, prompt_key=find_prompt_key(files, config.data.prompt_key))
        columns = [*options.required_columns(), *OPTIONAL, *options.chat.tools_columns(required=False)]
        _print_schema(files, columns, rewards, say)
        prompts = tokenized_prompts[name] = read_prompts(files, tokenizer, options, max_rows)
        if train:
            _print_first_prompt(prompts, tokenizer, say)
        _print_lengths(prompts, options, say)
        try:
            batches[name] = build_prompt_set(prompts, tokenizer, options).batch
            if train:
                fitted = fit_to_rows(config, len(batches[name]))
                StatefulLoader(batches[name], fitted.prompts_per_generation_batch())
            if rewards is not None:
                check_scorable(batches[name], config.custom_reward_function, config.reward_model.enable)
                rewards.check_rows(batches[name])
        except RewardError as error:
            del batches[name]  # which the function cannot score
            yield str(error)
        except CamshaftError as error:
            yield str(error)
    for choice in fit_prompts(fitted, list(batches.values())).choices():
        if choice.reason and choice not in config.choices():
            say(f"{choice.key}={choice.value}, {choice.reason}")
    _print_duplicates(tokenized_prompts, say)
    if not config.needs_function():
        say("\nthe run uses no reward function")
    return batches


def _print_schema(paths: Sequence[Path], columns: Sequence[str], rewards: RewardManager | None, say: Print) -> None:
    """Print the columns of the data files. `columns` are those that the run reads, besides those for the reward."""
    for_reward = () if rewards is None else rewards.columns
    for file in summarize_files(paths, None if for_reward is None else [*columns, *for_reward]):
        say(f"  {file.path}: {file.num_rows} rows")
        for column in file.columns:
            missing = "not read" if column.missing is None else f"{column.missing} missing"
            say(f"    {column.name:<20} {missing:<12} {_shorten(column.type, 80)}")


def _print_first_prompt(prompts: TokenizedPrompts, tokenizer: Any, say: Print) -> None:
    """Print the first prompt as the model receives it, with its special tokens."""
    ids, special_ids = prompts.ids.rows()[0].tolist(), special_token_ids(tokenizer)
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if len(text) > _MAX_CHARACTERS:  # the end shows where the response begins
        text = f"{text[: _MAX_CHARACTERS // 2]} ... {text[-_MAX_CHARACTERS // 2 :]}"
    template = "" if isinstance(prompts.prompts[0], str) else " with the chat template applied"
    say(f"  first prompt{template}:\n{text}")
    tokens = Counter(tokenizer.convert_ids_to_tokens([number for number in ids if number in special_ids]))
    special = ", ".join(f"{token} ({count})" for token, count in tokens.items()) or "none"
    kinds = sorted({"text" if isinstance(prompt, str) else "messages" for prompt in prompts.prompts})
    say(f"  ({len(ids)} tokens; special tokens: {special}; the prompts in these files are {' and '.join(kinds)})")


def _print_lengths(prompts: TokenizedPrompts, options: PromptOptions, say: Print) -> None:
    summary, count = summarize_lengths(prompts.ids.lengths), len(prompts.ids)
    percentiles = ", ".join(f"p{percent} {length}" for percent, length in summary.percentiles.items())
    say(f"  tokens of a prompt: {percentiles}, max {summary.max_length}")
    max_count, width = max(num_rows for _, _, num_rows in summary.bars), len(str(summary.max_length))
    for low, high, num_rows in summary.bars:
        say(
            f"    {low:>{width}}-{high:<{width}} {'#' * -(-_BAR_WIDTH * num_rows // max_count):<{_BAR_WIDTH}} "
            f"{num_rows}"
        )
    num_overlong = len(prompts.overlong_rows(options.max_prompt_length))
    limit = f"{options.length_key}={options.max_prompt_length}"
    if options.filter_overlong:
        effect = "dropped by data.filter_overlong_prompts=true"
    else:
        verb = "rejected" if options.truncation == "error" else "truncated"
        effect = f"{verb} by data.truncation={options.truncation}"
    suffix = f"; {effect}" if num_overlong else ""
    say(f"  longer than {limit}: {num_overlong} of {count} ({num_overlong / count:.1%}){suffix}")


def _print_duplicates(tokenized_prompts: dict[str, TokenizedPrompts], say: Print) -> None:
    say("")
    for name, prompts in tokenized_prompts.items():
        say(f"duplicate {name} prompts: {count_repeated(prompts.ids)} of {len(prompts.ids)}")
    if len(tokenized_prompts) == 2:
        validation_ids = tokenized_prompts["validation"].ids
        num_shared = count_shared(validation_ids, tokenized_prompts["training"].ids)
        say(f"validation prompts that are also training prompts: {num_shared} of {len(validation_ids)}")


def _check_reward_function(prompts: DataProto, rewards: RewardManager, say: Print) -> Iterator[str]:
    """Score an empty response and, if the data has ground truths, the ground truth for each of the first rows."""
    rows = prompts.reorder(slice(0, _NUM_SCORED))
    values = ["" if truth is None else truth for truth in rows["ground_truth"]]
    truths = [value if isinstance(value, str) else repr(value) for value in values]
    say(f"\nscores of the first {len(rows)} training prompts (reward: {', '.join(rewards.names)})")
    responses = {"ground truth": truths} if any(truths) else {}
    responses["empty"] = [""] * len(rows)
    results = {name: rewards.score_texts(rows, texts) for name, texts in responses.items()}
    columns = [name for name in rewards.columns or () if name != "prompt" and name in rows["data_row"][0]]
    titles = ["data_source", *["ground truth"] * any(truths), *columns]
    say(f"  {' '.join(f'{name:>12}' for name in results)}   {', '.join(titles)}")
    for row, scores in enumerate(zip(*(_format_scores(result) for result in results.values()), strict=True)):
        values = [truths[row]] * any(truths) + [rows["data_row"][row].get(name) for name in columns]
        texts = [str(rows["data_source"][row]), *(_shorten(repr(value), 40) for value in values)]
        say(f"  {' '.join(f'{score:>12}' for score in scores)}   {', '.join(texts)}")
    num_failed = sum(result.num_failed for result in results.values())
    if num_failed:
        failure = next(result.failures[0] for result in results.values() if result.failed)
        num_calls = len(results) * len(rows)
        yield f"the reward function failed in {num_failed} of {num_calls} calls; the first failure is {failure}"
    elif any(truths) and all(results["ground truth"].scores <= results["empty"].scores):
        say(
            "  note: no ground truth scores higher than an empty response; the function may expect a different answer "
            "format"
        )


def _format_scores(result: Scores) -> list[str]:
    return [result.failed.get(row, f"{score:g}") for row, score in enumerate(result.scores.tolist())]


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."
