"""Load prompts for RL from data files.

    rows = load_prompts("train.parquet", tokenizer, PromptOptions(max_prompt_length=512))
    rows.batch            # columns prompts, uid, data_source, ground_truth, extra_info; raw_prompt etc. on request
    rows.num_dropped      # number of overlong prompts that `filter_overlong` dropped

`StatefulLoader` splits the result into batches, whose columns are the initial columns of a training step. All prompts
are tokenized before training starts, so invalid rows are reported immediately. `load_prompts` calls `read_prompts`
(read and tokenize) and then `build_prompt_set` (filter, truncate and build columns). `camshaft check-data` calls both.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from camshaft.config.schema.data import ChatTemplateConfig
from camshaft.data.chat import Prompt, Truncation, as_chat, check_prompt, encode, template_arguments
from camshaft.data.tables import Paths, Table, read_columns, read_rows
from camshaft.data.tokens import tokenize
from camshaft.data.unread import READ_TOOLS, log_unread_columns
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import BatchError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptOptions:
    """Columns, length limit and truncation of prompts, from the config section `data`."""

    max_prompt_length: int = 512
    truncation: Truncation = "error"
    filter_overlong: bool = False
    """Drop rows whose prompt exceeds `max_prompt_length`."""
    workers: int | None = None
    """Number of tokenizer processes; None means one per CPU, up to 16."""
    prompt_key: str = "prompt"
    chat: ChatTemplateConfig = field(default_factory=ChatTemplateConfig)
    """Arguments of the chat template, and the column with tools."""
    prompt_id_key: str | None = None
    """Column with prompt ids. Their token ids become column `prompt_id`; `extra_info` receives the original id."""
    max_prompt_id_length: int | None = None
    reward_fn_key: str | None = "data_source"
    """Column with the data source of a row; None sets `data_source` to "unknown", as does a file without it."""
    reward_columns: tuple[str, ...] | None = ()
    """Further columns, which become column `data_row` for the reward function; None selects all columns."""
    return_raw_chat: bool = False
    """Add the original prompt, untruncated, as column `raw_prompt`."""
    return_raw_input_ids: bool = False
    """Add the token ids of single-message prompts without chat template as column `raw_input_ids`."""
    length_key: str = "data.max_prompt_length"
    """Config key of `max_prompt_length` in error messages."""

    def required_columns(self) -> list[str]:
        """Return the columns that every file must contain."""
        source_key = None if self.reward_fn_key == DATA_SOURCE else self.reward_fn_key
        names = (self.prompt_key, source_key, self.prompt_id_key, *self.chat.tools_columns(required=True))
        return list(dict.fromkeys(name for name in names if name))

    def known_columns(self) -> list[str]:
        """Return the columns that have a meaning for the run, if a file contains them."""
        return [*self.required_columns(), *OPTIONAL, *self.chat.tools_columns(False), *(self.reward_columns or ())]

    def optional_columns(self) -> list[str] | None:
        """Return the columns that are read if a file contains them; None for all columns."""
        if self.reward_columns is None:
            return None
        return list(dict.fromkeys([*OPTIONAL, *self.chat.tools_columns(required=False), *self.reward_columns]))


DATA_SOURCE = "data_source"
PROMPTS = ("messages", "question", "problem", "instruction", "query")
"""Other usual names of the column `prompt`."""
TRUTHS = ("ground_truth", "answer", "solution", "target", "label")
"""Usual names of the column with the reference answer."""
OPTIONAL = ("reward_model", *TRUTHS, "extra_info", DATA_SOURCE)
"""Columns that are read if a file contains them."""


@dataclass(frozen=True)
class TokenizedPrompts:
    """All rows of the files, validated and tokenized, without a length limit."""

    table: Table
    prompts: list[Prompt]
    ids: Ragged

    def overlong_rows(self, limit: int) -> Tensor:
        """Return the indices of rows with more than `limit` tokens."""
        return (self.ids.lengths > limit).nonzero().flatten()


@dataclass(frozen=True)
class PromptSet:
    """Prompts of the files after filtering and truncation."""

    batch: DataProto
    num_read: int
    num_dropped: int
    """Number of overlong rows dropped by `filter_overlong`."""
    num_truncated: int

    def __str__(self) -> str:
        text = f"{len(self.batch)} prompts"
        if self.num_dropped:
            text += f", {self.num_dropped} of {self.num_read} rows dropped as too long"
        return text + (f", {self.num_truncated} truncated" if self.num_truncated else "")


def load_prompts(
    paths: Paths,
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions,
    max_samples: int | None = None,
    label: str = "data",
) -> PromptSet:
    """Read, validate and tokenize prompts, and truncate or filter overlong ones. Column `uid` is the row number.

    `label` names the data in the log.
    """
    tokenized = read_prompts(paths, tokenizer, options, max_samples)
    prompts = build_prompt_set(tokenized, tokenizer, options)
    logger.info("%s: %s from %s", label, prompts, ", ".join(map(str, tokenized.table.files)))
    return prompts


def read_prompts(
    paths: Paths, tokenizer: PreTrainedTokenizerBase, options: PromptOptions, max_samples: int | None = None
) -> TokenizedPrompts:
    """Read, validate and tokenize prompts. Errors report the file and the row."""
    if (key := find_prompt_key(paths, options.prompt_key)) != options.prompt_key:
        logger.info("prompts are in the column '%s'; set data.prompt_key to use another one", key)
        options = replace(options, prompt_key=key)
    table = read_rows(paths, options.required_columns(), options.optional_columns(), max_samples)
    log_unread_columns(table, options.known_columns(), READ_TOOLS)
    locations = [table.location(i) for i in range(len(table))]
    prompts = [
        as_chat(check_prompt(row[key], location, key), options.chat)
        for row, location in zip(table.rows, locations, strict=True)
    ]
    num_answered = sum(not isinstance(prompt, str) and prompt[-1]["role"] == "assistant" for prompt in prompts)
    if num_answered:
        logger.warning(
            "the last message of '%s' has the role assistant in %d of %d rows (%s), so it is part of the prompt, and "
            "the responses continue after it; unless this is intended, remove that message, or set data.prompt_key to "
            "a column without the answer",
            *(key, num_answered, len(prompts), ", ".join(map(str, table.files))),
        )
    arguments = [template_arguments(*row, options.chat) for row in zip(table.rows, locations, strict=True)]
    ids = tokenize(prompts, tokenizer, locations, options.workers, arguments)
    return TokenizedPrompts(table, prompts, ids)


def build_prompt_set(
    tokenized: TokenizedPrompts, tokenizer: PreTrainedTokenizerBase, options: PromptOptions
) -> PromptSet:
    """Filter or truncate overlong prompts and build the columns of the batch."""
    table, limit, source = tokenized.table, options.max_prompt_length, options.reward_fn_key
    indices = _select_rows(tokenized, options)
    rows = [table.rows[i] for i in indices]
    ids = tokenized.ids if len(indices) == len(table) else tokenized.ids.select(indices)
    columns: dict[str, Any] = {
        "prompts": _truncate(ids, limit, options.truncation).map(Tensor.long),
        "uid": [str(i) for i in indices],
        "data_source": [(row.get(source) if source else None) or "unknown" for row in rows],
        "ground_truth": [ground_truth(row) for row in rows],
        "extra_info": [row.get("extra_info") or {} for row in rows],
    }
    if options.reward_columns != ():
        columns["data_row"] = [rows[i] | {"prompt": tokenized.prompts[index]} for i, index in enumerate(indices)]
    if options.prompt_id_key is not None:
        columns |= _prompt_ids(columns["extra_info"], table, indices, tokenizer, options)
    if options.return_raw_chat:
        columns["raw_prompt"] = [tokenized.prompts[i] for i in indices]
    if options.return_raw_input_ids:
        texts = [_single_message_text(tokenized.prompts[i], table.location(i)) for i in indices]
        columns["raw_input_ids"] = Ragged.from_rows(encode(texts, tokenizer, special_tokens=False), torch.int64)
    num_truncated = int((ids.lengths > limit).sum())
    return PromptSet(DataProto.from_dict(columns), len(table), len(table) - len(indices), num_truncated)


def find_prompt_key(paths: Paths, prompt_key: str) -> str:
    """Return the column with the prompts: `prompt_key`, or another usual name if the files have no column `prompt`."""
    if prompt_key != "prompt":
        return prompt_key
    columns = read_columns(paths)
    return next((name for name in (prompt_key, *PROMPTS) if name in columns), prompt_key)


def _truncate(ids: Ragged, limit: int, side: Truncation) -> Ragged:
    """Truncate rows to `limit` tokens by removing tokens at the `left`, at the `right` or in the `middle`."""
    lengths = ids.lengths.clamp(max=limit)
    if torch.equal(lengths, ids.lengths):
        return ids  # without a copy, which takes several times the memory of the tokens
    if side == "right":
        return ids.prefix(lengths)
    if side == "middle":
        head = torch.where(ids.lengths > limit, limit // 2, lengths)
        return Ragged.join(ids.prefix(head), ids.suffix(lengths - head))
    return ids.suffix(lengths)


def _select_rows(tokenized: TokenizedPrompts, options: PromptOptions) -> list[int]:
    """Return the indices of the rows to keep.

    Raise BatchError if no rows remain, or if a row is overlong and `truncation` is "error".
    """
    limit, lengths = options.max_prompt_length, tokenized.ids.lengths
    overlong = tokenized.overlong_rows(limit).tolist()
    if options.filter_overlong:
        indices = (lengths <= limit).nonzero().flatten().tolist()
        if not indices:
            raise BatchError(
                f"data.filter_overlong_prompts drops all rows: all {len(lengths)} prompts are longer than "
                f"{options.length_key}={limit}. Increase it; the shortest prompt has {int(lengths.min())} tokens"
            )
        return indices
    if overlong and options.truncation == "error":
        index = overlong[0]
        raise BatchError(
            f"{tokenized.table.location(index)}: the prompt has {int(lengths[index])} tokens, but "
            f"{options.length_key}={limit} ({len(overlong)} of {len(lengths)} prompts are too long; the longest has "
            f"{int(lengths.max())} tokens). Increase {options.length_key}, drop these rows with "
            "data.filter_overlong_prompts=true, or truncate them with data.truncation=left, right or middle"
        )
    return list(range(len(lengths)))


def _prompt_ids(
    extras: list[Any], table: Table, indices: list[int], tokenizer: PreTrainedTokenizerBase, options: PromptOptions
) -> dict[str, Any]:
    """Return the columns `prompt_id`, with tokenized ids, and `extra_info`, extended with the original ids."""
    key, limit = options.prompt_id_key, options.max_prompt_id_length
    assert key is not None
    values = [table.rows[i][key] for i in indices]
    for i, value, extra in zip(indices, values, extras, strict=True):
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise BatchError(f"{table.location(i)}: '{key}' is {value!r}; an id must be a string or an integer")
        if not isinstance(extra, Mapping) or extra.get("prompt_id", value) != value:
            raise BatchError(
                f"{table.location(i)}: the id {value!r} of '{key}' conflicts with extra_info={extra!r}; "
                "extra_info must be a struct without a different prompt_id"
            )
    ids = Ragged.from_rows(encode([str(value) for value in values], tokenizer, special_tokens=False), torch.int64)
    longest_row = int(ids.lengths.argmax())
    if limit is not None and ids.lengths[longest_row] > limit:
        raise BatchError(
            f"{table.location(indices[longest_row])}: the id {values[longest_row]!r} of '{key}' has "
            f"{int(ids.lengths[longest_row])} tokens, but data.max_prompt_id_length={limit}; increase the limit, "
            "because ids are never truncated"
        )
    with_ids = [{**extra, "prompt_id": value} for extra, value in zip(extras, values, strict=True)]
    return {"prompt_id": ids, "extra_info": with_ids}


def _single_message_text(prompt: Prompt, location: str) -> str:
    """Return the text of a single-message prompt. Raise BatchError for several messages, whose roles would be lost."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) != 1:
        raise BatchError(
            f"{location}: data.return_raw_input_ids requires single-message prompts, but this prompt has "
            f"{len(prompt)}. Use data.return_raw_input_ids=false data.return_raw_chat=true to keep all messages"
        )
    return prompt[0]["content"]


def ground_truth(row: Mapping[str, Any], key: str = "reward_model") -> Any:
    """Return the reference answer of a row from the struct in column `key`, or from the first column of `TRUTHS`."""
    nested = row.get(key)
    if isinstance(nested, Mapping) and "ground_truth" in nested:
        return nested["ground_truth"]
    return next((row[name] for name in TRUTHS if name in row), None)
