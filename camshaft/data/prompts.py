"""Prompts for reinforcement learning: parquet rows to the columns that a step begins with.

    rows = load_prompts("train.parquet", tokenizer, PromptOptions(max_prompt_length=512))
    rows.batch            # prompts, uid, data_source, ground_truth, extra_info, and raw_... where asked for
    rows.num_dropped      # how many were too long, with filter_overlong

`StatefulLoader` deals the batch out. Everything is tokenised once, before training starts, so that a bad
row is an error in the first seconds and not in the third hour. `read_prompts` is the first half, before anything is
cut or left out; `check.py` looks at that.
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
from camshaft.data.tokens import tokenise
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import BatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptOptions:
    """What to read from a row and how long a prompt may be; the keys of `data` in the config."""

    max_prompt_length: int = 512
    truncation: Truncation = "error"
    filter_overlong: bool = False
    """Leave out rows whose prompt is too long, and count them."""
    workers: int | None = None
    """Processes that tokenise; None: by the number of CPUs."""
    prompt_key: str = "prompt"
    prompt_id_key: str | None = None
    """A column with an id of the prompt: its token ids become a column `prompt_id`, and `extra_info` tells it."""
    max_prompt_id_length: int | None = None
    reward_fn_key: str | None = "data_source"
    """The column that says which data set a row is from; None: nothing asks for it, and it is empty."""
    return_raw_chat: bool = False
    """Keep the prompt as the file has it, whatever is cut from its ids: a column `raw_prompt`."""
    return_raw_input_ids: bool = False
    """Keep the ids of its text without chat template: a column `raw_input_ids`; prompts of one message."""
    length_key: str = "data.max_prompt_length"
    """What the config calls `max_prompt_length`."""

    def columns(self) -> list[str]:
        """Those that every file must have."""
        named = (self.prompt_key, self.reward_fn_key, self.prompt_id_key)
        return list(dict.fromkeys(name for name in named if name))


OPTIONAL = ("reward_model", "ground_truth", "extra_info")
"""Columns that are read where every file has them."""


@dataclass(frozen=True)
class ReadPrompts:
    """All rows of some files, checked and tokenised, whatever their length."""

    table: Table
    prompts: list[Prompt]
    ids: Ragged

    def too_long(self, limit: int) -> Tensor:
        """The rows with more than `limit` tokens."""
        return (self.ids.lengths > limit).nonzero().flatten()


@dataclass(frozen=True)
class PromptSet:
    """All prompts of some files."""

    batch: DataProto
    num_read: int
    num_dropped: int
    """Too long, left out by `filter_overlong`."""
    num_truncated: int

    def __str__(self) -> str:
        text = f"{len(self.batch)} prompts"
        if self.num_dropped:
            text += f", {self.num_dropped} of {self.num_read} rows left out as too long"
        return text + (f", {self.num_truncated} cut" if self.num_truncated else "")


def load_prompts(
    paths: Paths, tokenizer: PreTrainedTokenizerBase, options: PromptOptions, max_samples: int | None = None
) -> PromptSet:
    """Read, check, tokenise and cut or filter. `uid` is the row's number; the loader makes it unique per epoch."""
    read = read_prompts(paths, tokenizer, options, max_samples)
    found = arrange(read, tokenizer, options)
    logger.info("%s from %s", found, ", ".join(map(str, read.table.files)))
    return found


def read_prompts(
    paths: Paths, tokenizer: PreTrainedTokenizerBase, options: PromptOptions, max_samples: int | None = None
) -> ReadPrompts:
    """Rows and the ids of their prompts; an error names the file and the row that is wrong."""
    table = read_parquet(paths, options.columns(), OPTIONAL, max_samples)
    places = [table.place(i) for i in range(len(table))]
    prompts = [
        check_prompt(row[options.prompt_key], place, options.prompt_key)
        for row, place in zip(table.rows, places, strict=True)
    ]
    return ReadPrompts(table, prompts, tokenise(prompts, tokenizer, places, options.workers))


def arrange(read: ReadPrompts, tokenizer: PreTrainedTokenizerBase, options: PromptOptions) -> PromptSet:
    """The columns of the rows that stay."""
    table, limit, source = read.table, options.max_prompt_length, options.reward_fn_key
    kept = _fitting(read, options)
    rows = [table.rows[i] for i in kept]
    ids = read.ids.select(kept)
    columns: dict[str, Any] = {
        "prompts": _cut(ids, limit, options.truncation).map(Tensor.long),
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


def _cut(ids: Ragged, limit: int, side: Truncation) -> Ragged:
    """At most `limit` tokens of a row: `left` drops the first ones, `right` the last ones, `middle` those between."""
    lengths = ids.lengths.clamp(max=limit)
    if side == "right":
        return ids.prefix(lengths)
    if side == "middle":
        head = torch.where(ids.lengths > limit, limit // 2, lengths)
        return Ragged.join(ids.prefix(head), ids.suffix(lengths - head))
    return ids.suffix(lengths)


def _fitting(read: ReadPrompts, options: PromptOptions) -> list[int]:
    """The rows to keep; an error if one is too long and nothing says what to do with it, or if none is left."""
    limit, lengths = options.max_prompt_length, read.ids.lengths
    long = read.too_long(limit).tolist()
    if options.filter_overlong:
        kept = (lengths <= limit).nonzero().flatten().tolist()
        if not kept:
            raise BatchError(
                f"data.filter_overlong_prompts leaves nothing: all {len(lengths)} prompts are longer than "
                f"{options.length_key}={limit}; the shortest has {int(lengths.min())} tokens"
            )
        return kept
    if long and options.truncation == "error":
        first = long[0]
        raise BatchError(
            f"{read.table.place(first)}: the prompt has {int(lengths[first])} tokens, {options.length_key}={limit} "
            f"({len(long)} of {len(lengths)} prompts are too long, the longest has {int(lengths.max())} tokens). "
            f"Raise {options.length_key}, leave such rows out with data.filter_overlong_prompts=true, "
            "or cut them with data.truncation=left, right or middle"
        )
    return list(range(len(lengths)))


def _prompt_ids(
    extras: list[Any], table: Table, kept: list[int], tokenizer: PreTrainedTokenizerBase, options: PromptOptions
) -> dict[str, Any]:
    """The tokens of each prompt's id, and `extra_info` with the id as the file has it, for scoring functions."""
    key, limit = options.prompt_id_key, options.max_prompt_id_length
    assert key is not None
    found = [table.rows[i][key] for i in kept]
    for i, value, extra in zip(kept, found, extras, strict=True):
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise BatchError(f"{table.place(i)}: '{key}' is {value!r}; an id is text or a whole number")
        if not isinstance(extra, Mapping) or extra.get("prompt_id", value) != value:
            raise BatchError(
                f"{table.place(i)}: the id {value!r} of '{key}' goes into extra_info as prompt_id, which is {extra!r}"
            )
    ids = Ragged.from_rows(encode([str(value) for value in found], tokenizer, special_tokens=False), torch.int64)
    longest = int(ids.lengths.argmax())
    if limit is not None and ids.lengths[longest] > limit:
        raise BatchError(
            f"{table.place(kept[longest])}: the id {found[longest]!r} of '{key}' has {int(ids.lengths[longest])} tokens"
            f", data.max_prompt_id_length={limit}. Raise it, nothing is cut from an id"
        )
    told = [{**extra, "prompt_id": value} for extra, value in zip(extras, found, strict=True)]
    return {"prompt_id": ids, "extra_info": told}


def _one_text(prompt: Prompt, place: str) -> str:
    """The text of a prompt that is one text; of several messages, ids would not say who says what."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) != 1:
        raise BatchError(
            f"{place}: data.return_raw_input_ids keeps the text of one message, and the prompt has {len(prompt)}. "
            "Type data.return_raw_input_ids=false data.return_raw_chat=true, which keeps messages"
        )
    return prompt[0]["content"]


def ground_truth(row: Mapping[str, Any], key: str = "reward_model") -> Any:
    """What a response to this row is compared with: in the struct `key`, or in a column of its own."""
    nested = row.get(key)
    if isinstance(nested, Mapping) and "ground_truth" in nested:
        return nested["ground_truth"]
    return row.get("ground_truth")
