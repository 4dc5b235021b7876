"""Load preference pairs for reward model training: one chosen and one rejected sequence per row.

    rows = load_preferences("pairs.parquet", tokenizer, PreferenceOptions(max_length=1024))
    rows.batch            # columns chosen, rejected, margin

A row contains a prompt with two responses, or two whole conversations (`prompt_key=None`). Conversations are formatted
with the chat template. Plain text is not; an end-of-sequence token is appended instead.

A reward model reads the score at the last token of a sequence, so truncation should keep the end. `truncation="left"`
keeps the end and a beginning-of-sequence token. Trailing pad tokens are removed. The reward model role formats,
truncates and strips sequences in the same way when it scores responses.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from camshaft.data.chat import (
    Message,
    Prompt,
    Truncation,
    check_prompt,
    encode_each,
    get_eos_token_id,
    render,
    strip_padding,
    track_progress,
    truncate,
    truncate_left,
)
from camshaft.data.tables import Paths, Table, read_columns, read_rows
from camshaft.data.templates import try_template
from camshaft.data.unread import log_unread_columns
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import BatchError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreferenceOptions:
    """Columns, length limit and truncation of preference pairs, from the config section `data`."""

    max_length: int = 1024
    truncation: Truncation = "error"
    prompt_key: str | None = "prompt"
    """Column with the prompt; None if the chosen and rejected columns contain whole conversations."""
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    margin_key: str | None = None
    pad: int | None = None
    """`pad_token_id` of the model, which never reads the score at a pad token."""


@dataclass(frozen=True)
class PreferenceSet:
    """Preference pairs of the files after truncation."""

    batch: DataProto
    num_read: int
    num_truncated: int
    """Number of pairs with at least one truncated sequence."""
    num_equal: int
    """Number of pairs dropped because both sequences have the same tokens."""

    def __str__(self) -> str:
        tokens = sum(len(self.batch.ragged(name).values) for name in ("chosen", "rejected"))
        text = f"{len(self.batch)} pairs, {tokens} tokens"
        text += f", {self.num_truncated} truncated" if self.num_truncated else ""
        return text + (f", {self.num_equal} pairs of identical sequences dropped" if self.num_equal else "")


@dataclass(frozen=True)
class _Sequence:
    texts: tuple[str, ...]
    """Parts of the sequence, each of which is tokenized separately."""
    templated: bool
    """True if the chat template was applied; otherwise an end-of-sequence token is appended."""


def load_preferences(
    paths: Paths,
    tokenizer: PreTrainedTokenizerBase,
    options: PreferenceOptions,
    max_samples: int | None = None,
    label: str = "data",
) -> PreferenceSet:
    """Read, validate, tokenize and truncate preference pairs. `label` names the data in the log."""
    table = _read_table(paths, options, max_samples)
    if any(isinstance(value, list) for value in table.rows[0].values()):
        try_template(
            tokenizer, lambda: _sequence(table.rows[0], options.chosen_key, table.location(0), tokenizer, options)
        )
    sequences: list[_Sequence] = []
    for index in track_progress(range(len(table)), "chat template", len(table)):
        for key in (options.chosen_key, options.rejected_key):
            sequences.append(_sequence(table.rows[index], key, table.location(index), tokenizer, options))
    ids = _tokenize(sequences, table, tokenizer, options.pad)
    _check_lengths(ids, table, options)
    sequence_ids = [_truncate(row, options, tokenizer.bos_token_id) for row in ids]
    chosen, rejected = sequence_ids[::2], sequence_ids[1::2]
    unequal_rows = [row for row in range(len(table)) if chosen[row] != rejected[row]]
    if not unequal_rows:
        raise BatchError(
            f"'{options.chosen_key}' and '{options.rejected_key}' contain identical tokens in all {len(table)} rows "
            f"after truncation (max_length={options.max_length}, truncation={options.truncation}), for example "
            f"{table.location(0)}; increase max_length or use other data"
        )
    columns = {
        "chosen": Ragged.from_rows([chosen[row] for row in unequal_rows], torch.int64),
        "rejected": Ragged.from_rows([rejected[row] for row in unequal_rows], torch.int64),
        "margin": torch.tensor([_margin(table, row, options.margin_key) for row in unequal_rows], dtype=torch.float32),
    }
    is_overlong = [len(row) > options.max_length for row in ids]
    num_truncated = sum(map(any, zip(is_overlong[::2], is_overlong[1::2], strict=True)))
    pairs = PreferenceSet(DataProto.from_dict(columns), len(table), num_truncated, len(table) - len(unequal_rows))
    logger.info("%s: %s from %s", label, pairs, ", ".join(map(str, table.files)))
    return pairs


def _read_table(paths: Paths, options: PreferenceOptions, max_samples: int | None) -> Table:
    prompt = options.prompt_key
    keys = (prompt, options.chosen_key, options.rejected_key, options.margin_key)
    responses = {options.chosen_key, options.rejected_key}
    if prompt is not None and prompt not in (columns := read_columns(paths)) and responses <= columns:
        files = ", ".join(map(str, [paths] if isinstance(paths, str | Path) else paths))
        raise BatchError(
            f"{files}: column '{prompt}' does not exist; the columns are {', '.join(sorted(columns))}. "
            f"If '{options.chosen_key}' and '{options.rejected_key}' contain whole conversations, use "
            "data.prompt_key=null"
        )
    table = read_rows(paths, [key for key in keys if key is not None], max_samples=max_samples)
    log_unread_columns(table, keys, "Tools of preference pairs are not implemented.")
    return table


def _sequence(
    row: Mapping[str, Any], key: str, location: str, tokenizer: PreTrainedTokenizerBase, options: PreferenceOptions
) -> _Sequence:
    """Build the sequence whose response is in column `key`."""
    answer = check_prompt(row[key], location, key)
    prompt = None if options.prompt_key is None else check_prompt(row[options.prompt_key], location, options.prompt_key)
    if isinstance(answer, str) and not isinstance(prompt, list):
        return _Sequence((answer,) if prompt is None else (prompt, answer), templated=False)
    turns = _conversation(prompt, answer, f"{location}: '{key}'")
    return _Sequence((render(turns, tokenizer, location, False),), templated=True)


def _conversation(prompt: Prompt | None, answer: Prompt, location: str) -> list[Message]:
    """Join the messages of prompt and response, unless the response already starts with those of the prompt."""
    prompt_messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    response_messages: list[Message] = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if response_messages[-1]["role"] != "assistant":
        raise BatchError(
            f"{location} ends with a message of role '{response_messages[-1]['role']}'; it must be assistant"
        )
    if not prompt_messages or response_messages[: len(prompt_messages)] == prompt_messages:
        return response_messages
    if response_messages[0]["role"] != "assistant":
        raise BatchError(
            f"{location} starts with a message of role '{response_messages[0]['role']}' but not with the prompt. "
            "Store only the assistant messages, or use data.prompt_key=null if the column contains whole conversations"
        )
    return prompt_messages + response_messages


def _tokenize(
    sequences: list[_Sequence], table: Table, tokenizer: PreTrainedTokenizerBase, pad_id: int | None
) -> list[list[int]]:
    """Tokenize sequences up to the token at which the model reads the score."""
    # The tokenizer adds special tokens to the first part of plain text. Templates include special tokens.
    special = [not sequence.templated and i == 0 for sequence in sequences for i, _ in enumerate(sequence.texts)]
    pieces = iter(encode_each([text for sequence in sequences for text in sequence.texts], special, tokenizer))
    rows = []
    for index, sequence in enumerate(sequences):
        ids = [token for _ in sequence.texts for token in next(pieces)]
        if not sequence.templated:
            end = get_eos_token_id(tokenizer, table.location(index // 2))
            ids += [] if ids[-1:] == [end] else [end]
        if not ids:
            raise BatchError(
                f"{table.location(index // 2)}: the chat template formats the sequence as {sequence.texts[0]!r}, "
                "which has no tokens; remove the row or change the template"
            )
        rows.append(strip_padding(ids, pad_id))
    return rows


def _check_lengths(ids: list[list[int]], table: Table, options: PreferenceOptions) -> None:
    overlong = [row for row, tokens in enumerate(ids) if len(tokens) > options.max_length]
    if overlong and options.truncation == "error":
        row, side = divmod(overlong[0], 2)
        key, num_pairs = (options.chosen_key, options.rejected_key)[side], len({row // 2 for row in overlong})
        raise BatchError(
            f"{table.location(row)}: the sequence with '{key}' has {len(ids[overlong[0]])} tokens, but "
            f"data.max_length={options.max_length} ({num_pairs} of {len(table)} pairs are too long; the longest "
            f"sequence has {max(map(len, ids))} tokens). Increase data.max_length, or use data.truncation=left, which "
            "keeps the end, where the model reads the score"
        )


def _truncate(ids: list[int], options: PreferenceOptions, bos: Any) -> list[int]:
    if options.truncation == "left":
        return truncate_left(ids, options.max_length, bos)
    return strip_padding(truncate(ids, options.max_length, options.truncation), options.pad)


def _margin(table: Table, row: int, key: str | None) -> float:
    value = 0.0 if key is None else table.rows[row][key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BatchError(
            f"{table.location(row)}: '{key}' is {value!r}, not a finite number; correct it, or set data.margin_key=null"
        )
    return float(value)
