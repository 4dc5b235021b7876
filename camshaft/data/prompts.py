"""Prompts for reinforcement learning: parquet rows to the columns that a step begins with.

    rows = load_prompts("train.parquet", tokenizer, PromptOptions(max_prompt_length=512))
    rows.batch            # prompts, uid, data_source, ground_truth, extra_info, and raw_... where asked for
    rows.num_dropped      # how many were too long, with filter_overlong

`StatefulLoader` deals the batch out. Everything is tokenised once, before training starts, so that a bad
row is an error in the first seconds and not in the third hour.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from camshaft.data.chat import Prompt, Truncation, check_prompt, cut, encode, encode_prompts
from camshaft.data.parquet import Paths, Table, read_parquet
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
    prompt_key: str = "prompt"
    reward_fn_key: str | None = "data_source"
    """The column that says which data set a row is from; None: nothing asks for it, and it is empty."""
    return_raw_chat: bool = False
    """Keep the prompt as the file has it, whatever is cut from its ids: a column `raw_prompt`."""
    return_raw_input_ids: bool = False
    """Keep the ids of its text without chat template: a column `raw_input_ids`; prompts of one message."""
    length_key: str = "data.max_prompt_length"
    """What the config calls `max_prompt_length`."""


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
    optional = ["reward_model", "ground_truth", "extra_info"]
    source = options.reward_fn_key
    table = read_parquet(paths, [options.prompt_key, *([source] if source else [])], optional, max_samples)
    places = [table.place(i) for i in range(len(table))]
    prompts = [
        check_prompt(row[options.prompt_key], place, options.prompt_key)
        for row, place in zip(table.rows, places, strict=True)
    ]
    ids = encode_prompts(prompts, tokenizer, places)
    kept = _fitting(ids, table, options)
    limit = options.max_prompt_length
    columns: dict[str, Any] = {
        "prompts": Ragged.from_rows([cut(ids[i], limit, options.truncation) for i in kept]),
        "uid": [str(i) for i in kept],
        "data_source": [table.rows[i][source] if source else "" for i in kept],
        "ground_truth": [ground_truth(table.rows[i]) for i in kept],
        "extra_info": [table.rows[i].get("extra_info") or {} for i in kept],
    }
    if options.return_raw_chat:
        columns["raw_prompt"] = [prompts[i] for i in kept]
    if options.return_raw_input_ids:
        texts = [_one_text(prompts[i], places[i]) for i in kept]
        columns["raw_input_ids"] = Ragged.from_rows(encode(texts, tokenizer, special_tokens=False), torch.int64)
    truncated = sum(len(ids[i]) > limit for i in kept)
    found = PromptSet(DataProto.from_dict(columns), len(table), len(table) - len(kept), truncated)
    logger.info("%s from %s", found, ", ".join(map(str, table.files)))
    return found


def _fitting(ids: list[list[int]], table: Table, options: PromptOptions) -> list[int]:
    """The rows to keep; an error if one is too long and nothing says what to do with it, or if none is left."""
    limit = options.max_prompt_length
    long = [i for i, row in enumerate(ids) if len(row) > limit]
    if options.filter_overlong:
        dropped = set(long)
        kept = [i for i in range(len(ids)) if i not in dropped]
        if not kept:
            raise BatchError(
                f"data.filter_overlong_prompts leaves nothing: all {len(ids)} prompts are longer than "
                f"{options.length_key}={limit}; the shortest has {min(map(len, ids))} tokens"
            )
        return kept
    if long and options.truncation == "error":
        first = long[0]
        raise BatchError(
            f"{table.place(first)}: the prompt has {len(ids[first])} tokens, {options.length_key}={limit} "
            f"({len(long)} of {len(ids)} prompts are too long, the longest has {max(map(len, ids))} tokens). "
            f"Raise {options.length_key}, leave such rows out with data.filter_overlong_prompts=true, "
            "or cut them with data.truncation=left, right or middle"
        )
    return list(range(len(ids)))


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
