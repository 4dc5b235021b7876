"""Load preference pairs for a reward model: one chosen and one rejected sequence per row.

    rows = load_preferences("pairs.parquet", tokenizer, PreferenceOptions(max_length=1024))
    rows.batch            # chosen, rejected, margin

A row contains a prompt with two responses, or two whole conversations (`prompt_key=None`). Conversations are formatted
with the chat template, as in scoring. Plain text gets no template and ends with the end-of-sequence token.

The score is read at the last token, so overlong sequences should keep their end. `truncation="left"` matches scoring:
it keeps the end and a beginning-of-sequence token. Trailing pad tokens are dropped, as in scoring.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from camshaft.data.chat import (
    Message,
    Prompt,
    Truncation,
    check_prompt,
    encode_each,
    end_of_sequence,
    keep_end,
    render,
    truncate,
    with_progress,
    without_padding,
)
from camshaft.data.parquet import Paths, Table, read_columns, read_parquet
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import BatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreferenceOptions:
    """Columns, length limit and truncation of pairs, from the config section `data`."""

    max_length: int = 1024
    truncation: Truncation = "error"
    prompt_key: str | None = "prompt"
    """None: chosen and rejected are whole conversations."""
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    margin_key: str | None = None
    pad: int | None = None
    """The model's `pad_token_id`; the score is never read at a pad token."""


@dataclass(frozen=True)
class PreferenceSet:
    """Preference pairs of the files."""

    batch: DataProto
    num_read: int
    num_truncated: int
    """Pairs with at least one truncated sequence."""
    num_equal: int
    """Pairs dropped because both sequences have the same tokens."""

    def __str__(self) -> str:
        tokens = sum(len(self.batch.ragged(name).values) for name in ("chosen", "rejected"))
        text = f"{len(self.batch)} pairs, {tokens} tokens"
        text += f", {self.num_truncated} truncated" if self.num_truncated else ""
        return text + (f", {self.num_equal} with equal sequences dropped" if self.num_equal else "")


@dataclass(frozen=True)
class _Sequence:
    texts: tuple[str, ...]
    """Parts of the sequence; each is tokenized separately."""
    templated: bool
    """True if the chat template was applied; plain text gets an end-of-sequence token."""


def load_preferences(
    paths: Paths, tokenizer: PreTrainedTokenizerBase, options: PreferenceOptions, max_samples: int | None = None
) -> PreferenceSet:
    """Read, validate, tokenize and truncate preference pairs."""
    table = _read(paths, options, max_samples)
    sequences: list[_Sequence] = []
    for index in with_progress(range(len(table)), "chat template", len(table)):
        for key in (options.chosen_key, options.rejected_key):
            sequences.append(_sequence(table.rows[index], key, table.place(index), tokenizer, options))
    ids = _tokenize(sequences, table, tokenizer, options.pad)
    _check_lengths(ids, table, options)
    kept = [_fitting(row, options, tokenizer.bos_token_id) for row in ids]
    chosen, rejected = kept[::2], kept[1::2]
    differing = [row for row in range(len(table)) if chosen[row] != rejected[row]]
    if not differing:
        raise BatchError(
            f"'{options.chosen_key}' and '{options.rejected_key}' have identical tokens in all {len(table)} rows after "
            f"truncation (max_length={options.max_length}, truncation={options.truncation}), for example "
            f"{table.place(0)}; increase max_length or use other data"
        )
    columns = {
        "chosen": Ragged.from_rows([chosen[row] for row in differing], torch.int64),
        "rejected": Ragged.from_rows([rejected[row] for row in differing], torch.int64),
        "margin": torch.tensor([_margin(table, row, options.margin_key) for row in differing], dtype=torch.float32),
    }
    long = [len(row) > options.max_length for row in ids]
    truncated = sum(map(any, zip(long[::2], long[1::2], strict=True)))
    pairs = PreferenceSet(DataProto.from_dict(columns), len(table), truncated, len(table) - len(differing))
    logger.info("%s from %s", pairs, ", ".join(map(str, table.files)))
    return pairs


def _read(paths: Paths, options: PreferenceOptions, max_samples: int | None) -> Table:
    prompt = options.prompt_key
    keys = (prompt, options.chosen_key, options.rejected_key, options.margin_key)
    responses = {options.chosen_key, options.rejected_key}
    if prompt is not None and prompt not in (columns := read_columns(paths)) and responses <= columns:
        files = ", ".join(map(str, [paths] if isinstance(paths, str | Path) else paths))
        raise BatchError(
            f"{files}: no column '{prompt}', only {', '.join(sorted(columns))}. If chosen and rejected are whole "
            "conversations, use data.prompt_key=null"
        )
    return read_parquet(paths, [key for key in keys if key is not None], max_samples=max_samples)


def _sequence(
    row: Mapping[str, Any], key: str, place: str, tokenizer: PreTrainedTokenizerBase, options: PreferenceOptions
) -> _Sequence:
    """Build the sequence with the response in column `key`."""
    answer = check_prompt(row[key], place, key)
    prompt = None if options.prompt_key is None else check_prompt(row[options.prompt_key], place, options.prompt_key)
    if isinstance(answer, str) and not isinstance(prompt, list):
        return _Sequence((answer,) if prompt is None else (prompt, answer), templated=False)
    turns = _conversation(prompt, answer, f"{place}: '{key}'")
    return _Sequence((render(turns, tokenizer, place, False),), templated=True)


def _conversation(prompt: Prompt | None, answer: Prompt, location: str) -> list[Message]:
    """Join the messages of prompt and response; response messages may include those of the prompt."""
    before: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    after: list[Message] = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if after[-1]["role"] != "assistant":
        raise BatchError(f"{location} ends with a turn of '{after[-1]['role']}'; the last turn must be the assistant's")
    if not before or after[: len(before)] == before:
        return after
    if after[0]["role"] != "assistant":
        raise BatchError(
            f"{location} is a conversation that does not begin with the prompt: it begins with a turn of "
            f"'{after[0]['role']}'. Store only the assistant's turns, or use data.prompt_key=null"
        )
    return before + after


def _tokenize(
    sequences: list[_Sequence], table: Table, tokenizer: PreTrainedTokenizerBase, pad: int | None
) -> list[list[int]]:
    """Tokenize sequences, up to the token at which the score is read."""
    # The first part of plain text gets the tokenizer's special tokens; templates contain theirs.
    special = [
        not sequence.templated and not number for sequence in sequences for number, _ in enumerate(sequence.texts)
    ]
    pieces = iter(encode_each([text for sequence in sequences for text in sequence.texts], special, tokenizer))
    rows = []
    for index, sequence in enumerate(sequences):
        ids = [token for _ in sequence.texts for token in next(pieces)]
        if not sequence.templated:
            end = end_of_sequence(tokenizer, table.place(index // 2))
            ids += [] if ids[-1:] == [end] else [end]
        if not ids:
            raise BatchError(
                f"{table.place(index // 2)}: the sequence has no tokens after the chat template: {sequence.texts[0]!r}"
            )
        rows.append(without_padding(ids, pad))
    return rows


def _check_lengths(ids: list[list[int]], table: Table, options: PreferenceOptions) -> None:
    long = [row for row, tokens in enumerate(ids) if len(tokens) > options.max_length]
    if long and options.truncation == "error":
        row, side = divmod(long[0], 2)
        key, pairs = (options.chosen_key, options.rejected_key)[side], len({row // 2 for row in long})
        raise BatchError(
            f"{table.place(row)}: with '{key}' the sequence has {len(ids[long[0]])} tokens, "
            f"data.max_length={options.max_length} ({pairs} of {len(table)} pairs are too long, the longest sequence "
            f"has {max(map(len, ids))} tokens). Raise data.max_length, or use data.truncation=left, which keeps the "
            "end, where the score is read"
        )


def _fitting(ids: list[int], options: PreferenceOptions, bos: Any) -> list[int]:
    if options.truncation == "left":
        return keep_end(ids, options.max_length, bos)
    return without_padding(truncate(ids, options.max_length, options.truncation), options.pad)


def _margin(table: Table, row: int, key: str | None) -> float:
    value = 0.0 if key is None else table.rows[row][key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        place = table.place(row)
        raise BatchError(f"{place}: '{key}' is {value!r}; every row needs a number; use data.margin_key=null for none")
    return float(value)
