"""Load prompts for RL: parquet rows to the initial columns of a training step.

    rows = load_prompts("train.parquet", tokenizer, PromptOptions(max_prompt_length=512))
    rows.batch            # prompts, uid, data_source, ground_truth, extra_info, optionally raw_prompt, raw_input_ids
    rows.num_dropped      # overlong prompts that were dropped, with filter_overlong

`StatefulLoader` splits the result into batches. All prompts are tokenized before training starts, so that invalid rows
are reported immediately. `load_prompts` is `read_prompts` (read and tokenize) followed by `arrange` (filter, truncate
and build columns); `camshaft check-data` uses the two separately.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from camshaft.data.chat import Prompt, Truncation, check_prompt, encode
from camshaft.data.parquet import Paths, Table, read_parquet
from camshaft.data.tokens import tokenize
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import BatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptOptions:
    """Columns, length limit and truncation of prompts, from the config section `data`."""

    max_prompt_length: int = 512
    truncation: Truncation = "error"
    filter_overlong: bool = False
    """Drop and count rows whose prompt exceeds `max_prompt_length`."""
    workers: int | None = None
    """Number of tokenizer processes; None: one per CPU, at most 16."""
    prompt_key: str = "prompt"
    prompt_id_key: str | None = None
    """Column with a prompt id; adds its token ids as column `prompt_id` and its value to `extra_info`."""
    max_prompt_id_length: int | None = None
    reward_fn_key: str | None = "data_source"
    """Column with the data source of a row; None leaves `data_source` empty."""
    return_raw_chat: bool = False
    """Keep the original, untruncated prompt in column `raw_prompt`."""
    return_raw_input_ids: bool = False
    """Keep the token ids of the text without chat template in column `raw_input_ids`; single-message prompts only."""
    length_key: str = "data.max_prompt_length"
    """Config key of `max_prompt_length`, for error messages."""

    def columns(self) -> list[str]:
        """Return the columns that every file must have."""
        named = (self.prompt_key, self.reward_fn_key, self.prompt_id_key)
        return list(dict.fromkeys(name for name in named if name))


OPTIONAL = ("reward_model", "ground_truth", "extra_info")
"""Columns that are read if every file has them."""


@dataclass(frozen=True)
class ReadPrompts:
    """All rows of the files, validated and tokenized, before length limits apply."""

    table: Table
    prompts: list[Prompt]
    ids: Ragged

    def too_long(self, limit: int) -> Tensor:
        """Return the indices of rows with more than `limit` tokens."""
        return (self.ids.lengths > limit).nonzero().flatten()


@dataclass(frozen=True)
class PromptSet:
    """Prompts of the files after filtering and truncation."""

    batch: DataProto
    num_read: int
    num_dropped: int
    """Overlong rows dropped by `filter_overlong`."""
    num_truncated: int

    def __str__(self) -> str:
        text = f"{len(self.batch)} prompts"
        if self.num_dropped:
            text += f", {self.num_dropped} of {self.num_read} rows dropped as too long"
        return text + (f", {self.num_truncated} truncated" if self.num_truncated else "")


def load_prompts(
    paths: Paths, tokenizer: PreTrainedTokenizerBase, options: PromptOptions, max_samples: int | None = None
) -> PromptSet:
    """Read, validate, tokenize, and truncate or filter prompts. `uid` is the row number."""
    read = read_prompts(paths, tokenizer, options, max_samples)
    prompts = arrange(read, tokenizer, options)
    logger.info("%s from %s", prompts, ", ".join(map(str, read.table.files)))
    return prompts


def read_prompts(
    paths: Paths, tokenizer: PreTrainedTokenizerBase, options: PromptOptions, max_samples: int | None = None
) -> ReadPrompts:
    """Read and tokenize prompts; errors report the file and the row."""
    table = read_parquet(paths, options.columns(), OPTIONAL, max_samples)
    places = [table.place(i) for i in range(len(table))]
    prompts = [
        check_prompt(row[options.prompt_key], place, options.prompt_key)
        for row, place in zip(table.rows, places, strict=True)
    ]
    return ReadPrompts(table, prompts, tokenize(prompts, tokenizer, places, options.workers))


def arrange(read: ReadPrompts, tokenizer: PreTrainedTokenizerBase, options: PromptOptions) -> PromptSet:
    """Filter or truncate prompts and build the columns."""
    table, limit, source = read.table, options.max_prompt_length, options.reward_fn_key
    kept = _fitting(read, options)
    rows = [table.rows[i] for i in kept]
    ids = read.ids.select(kept)
    columns: dict[str, Any] = {
        "prompts": _truncate(ids, limit, options.truncation).map(Tensor.long),
        "uid": [str(i) for i in kept],
        "data_source": [row[source] if source else "" for row in rows],
        "ground_truth": [ground_truth(row) for row in rows],
        "extra_info": [row.get("extra_info") or {} for row in rows],
    }
    if options.prompt_id_key is not None:
        columns |= _prompt_ids(columns["extra_info"], table, kept, tokenizer, options)
    if options.return_raw_chat:
        columns["raw_prompt"] = [read.prompts[i] for i in kept]
    if options.return_raw_input_ids:
        texts = [_one_text(read.prompts[i], table.place(i)) for i in kept]
        columns["raw_input_ids"] = Ragged.from_rows(encode(texts, tokenizer, special_tokens=False), torch.int64)
    truncated = int((ids.lengths > limit).sum())
    return PromptSet(DataProto.from_dict(columns), len(table), len(table) - len(kept), truncated)


def _truncate(ids: Ragged, limit: int, side: Truncation) -> Ragged:
    """Truncate rows to `limit` tokens at the `left`, the `right` or the `middle`."""
    lengths = ids.lengths.clamp(max=limit)
    if side == "right":
        return ids.prefix(lengths)
    if side == "middle":
        head = torch.where(ids.lengths > limit, limit // 2, lengths)
        return Ragged.join(ids.prefix(head), ids.suffix(lengths - head))
    return ids.suffix(lengths)


def _fitting(read: ReadPrompts, options: PromptOptions) -> list[int]:
    """Return the rows to keep; raise BatchError if none remain, or for an overlong row with truncation "error"."""
    limit, lengths = options.max_prompt_length, read.ids.lengths
    long = read.too_long(limit).tolist()
    if options.filter_overlong:
        kept = (lengths <= limit).nonzero().flatten().tolist()
        if not kept:
            raise BatchError(
                f"data.filter_overlong_prompts drops every row: all {len(lengths)} prompts are longer than "
                f"{options.length_key}={limit}; the shortest has {int(lengths.min())} tokens"
            )
        return kept
    if long and options.truncation == "error":
        first = long[0]
        raise BatchError(
            f"{read.table.place(first)}: the prompt has {int(lengths[first])} tokens, {options.length_key}={limit} "
            f"({len(long)} of {len(lengths)} prompts are too long, the longest has {int(lengths.max())} tokens). "
            f"Raise {options.length_key}, drop such rows with data.filter_overlong_prompts=true, "
            "or truncate them with data.truncation=left, right or middle"
        )
    return list(range(len(lengths)))


def _prompt_ids(
    extras: list[Any], table: Table, kept: list[int], tokenizer: PreTrainedTokenizerBase, options: PromptOptions
) -> dict[str, Any]:
    """Return the column `prompt_id` with the token ids of each id, and `extra_info` with the original id."""
    key, limit = options.prompt_id_key, options.max_prompt_id_length
    assert key is not None
    values = [table.rows[i][key] for i in kept]
    for i, value, extra in zip(kept, values, extras, strict=True):
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise BatchError(f"{table.place(i)}: '{key}' is {value!r}; an id must be a string or an integer")
        if not isinstance(extra, Mapping) or extra.get("prompt_id", value) != value:
            raise BatchError(
                f"{table.place(i)}: the id {value!r} of '{key}' conflicts with extra_info={extra!r}, which must be a "
                "struct without another prompt_id"
            )
    ids = Ragged.from_rows(encode([str(value) for value in values], tokenizer, special_tokens=False), torch.int64)
    longest = int(ids.lengths.argmax())
    if limit is not None and ids.lengths[longest] > limit:
        raise BatchError(
            f"{table.place(kept[longest])}: the id {values[longest]!r} of '{key}' has {int(ids.lengths[longest])} "
            f"tokens"
            f", data.max_prompt_id_length={limit}. Raise the limit; ids are never truncated"
        )
    with_ids = [{**extra, "prompt_id": value} for extra, value in zip(extras, values, strict=True)]
    return {"prompt_id": ids, "extra_info": with_ids}


def _one_text(prompt: Prompt, place: str) -> str:
    """Return the text of a single-message prompt; several messages have no role information without a template."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) != 1:
        raise BatchError(
            f"{place}: data.return_raw_input_ids requires prompts of one message, and this prompt has {len(prompt)}. "
            "Use data.return_raw_input_ids=false data.return_raw_chat=true, which keeps all messages"
        )
    return prompt[0]["content"]


def ground_truth(row: Mapping[str, Any], key: str = "reward_model") -> Any:
    """Return the reference answer of a row, from the struct `key` or the column `ground_truth`."""
    nested = row.get(key)
    if isinstance(nested, Mapping) and "ground_truth" in nested:
        return nested["ground_truth"]
    return row.get("ground_truth")
