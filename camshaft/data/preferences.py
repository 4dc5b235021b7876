"""Pairs of answers for a reward model: of each row the sequence with the preferred answer, and that with the other.

    rows = load_preferences("pairs.parquet", tokenizer, PreferenceOptions(max_length=1024))
    rows.batch            # chosen, rejected, margin

A row is a prompt with two answers, or two whole conversations (`prompt_key=None`). Messages go through the chat
template as a whole, as in scoring; plain text stays plain and gets the end-of-sequence token behind it.

A score is read off the last token, so of a sequence that is too long the end should stay: `truncation="left"`, which
is what scoring does, keeps a beginning-of-sequence token too. Pad tokens at the end are left out, as there.
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
    cut,
    encode_each,
    end_of_sequence,
    keep_end,
    render,
    watched,
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
    """What to read from a row and how long a sequence may be; the keys of `data` in the config."""

    max_length: int = 1024
    truncation: Truncation = "error"
    prompt_key: str | None = "prompt"
    """None: both answers are whole conversations."""
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    margin_key: str | None = None
    pad: int | None = None
    """The model's `pad_token_id`, which it never reads a score off."""


@dataclass(frozen=True)
class PreferenceSet:
    """All pairs of some files."""

    batch: DataProto
    num_read: int
    num_truncated: int
    """Pairs of which at least one sequence was cut."""
    num_equal: int
    """Left out because both sequences are the same."""

    def __str__(self) -> str:
        tokens = sum(len(self.batch.ragged(name).values) for name in ("chosen", "rejected"))
        text = f"{len(self.batch)} pairs, {tokens} tokens"
        text += f", {self.num_truncated} cut" if self.num_truncated else ""
        return text + (f", {self.num_equal} of two equal sequences left out" if self.num_equal else "")


@dataclass(frozen=True)
class _Sequence:
    texts: tuple[str, ...]
    """One after the other; each is tokenised on its own."""
    templated: bool
    """The chat template has ended it; plain text gets the end-of-sequence token from us."""


def load_preferences(
    paths: Paths, tokenizer: PreTrainedTokenizerBase, options: PreferenceOptions, max_samples: int | None = None
) -> PreferenceSet:
    """Read, check, tokenise and cut."""
    table = _read(paths, options, max_samples)
    sequences: list[_Sequence] = []
    for index in watched(range(len(table)), "chat template", len(table)):
        for key in (options.chosen_key, options.rejected_key):
            sequences.append(_sequence(table.rows[index], key, table.place(index), tokenizer, options))
    ids = _tokenise(sequences, table, tokenizer, options.pad)
    _check_lengths(ids, table, options)
    kept = [_fitting(row, options, tokenizer.bos_token_id) for row in ids]
    chosen, rejected = kept[::2], kept[1::2]
    differing = [row for row in range(len(table)) if chosen[row] != rejected[row]]
    if not differing:
        raise BatchError(
            f"{table.place(0)}: '{options.chosen_key}' and '{options.rejected_key}' are the same tokens, and so in all "
            f"{len(table)} rows (max_length={options.max_length}, truncation={options.truncation}): nothing to learn"
        )
    columns = {
        "chosen": Ragged.from_rows([chosen[row] for row in differing], torch.int64),
        "rejected": Ragged.from_rows([rejected[row] for row in differing], torch.int64),
        "margin": torch.tensor([_margin(table, row, options.margin_key) for row in differing], dtype=torch.float32),
    }
    long = [len(row) > options.max_length for row in ids]
    truncated = sum(map(any, zip(long[::2], long[1::2], strict=True)))
    found = PreferenceSet(DataProto.from_dict(columns), len(table), truncated, len(table) - len(differing))
    logger.info("%s from %s", found, ", ".join(map(str, table.files)))
    return found


def _read(paths: Paths, options: PreferenceOptions, max_samples: int | None) -> Table:
    prompt = options.prompt_key
    keys = (prompt, options.chosen_key, options.rejected_key, options.margin_key)
    answers = {options.chosen_key, options.rejected_key}
    if prompt is not None and prompt not in (there := read_columns(paths)) and answers <= there:
        files = ", ".join(map(str, [paths] if isinstance(paths, str | Path) else paths))
        raise BatchError(
            f"{files}: there is no column '{prompt}', only {', '.join(sorted(there))}. If both answers are whole "
            "conversations, type data.prompt_key=null"
        )
    return read_parquet(paths, [key for key in keys if key is not None], max_samples=max_samples)


def _sequence(
    row: Mapping[str, Any], key: str, place: str, tokenizer: PreTrainedTokenizerBase, options: PreferenceOptions
) -> _Sequence:
    """What the model reads of one answer."""
    answer = check_prompt(row[key], place, key)
    prompt = None if options.prompt_key is None else check_prompt(row[options.prompt_key], place, options.prompt_key)
    if isinstance(answer, str) and not isinstance(prompt, list):
        return _Sequence((answer,) if prompt is None else (prompt, answer), templated=False)
    turns = _conversation(prompt, answer, f"{place}: '{key}'")
    return _Sequence((render(turns, tokenizer, place, False),), templated=True)


def _conversation(prompt: Prompt | None, answer: Prompt, what: str) -> list[Message]:
    """The messages of prompt and answer; an answer in messages may begin with those of the prompt."""
    before: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    after: list[Message] = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if after[-1]["role"] != "assistant":
        raise BatchError(f"{what} ends with a turn of '{after[-1]['role']}'; the last message is the assistant's")
    if not before or after[: len(before)] == before:
        return after
    if after[0]["role"] != "assistant":
        raise BatchError(
            f"{what} is a conversation that does not begin with the prompt: it begins with a turn of "
            f"'{after[0]['role']}'. Give the assistant's turns alone, or type data.prompt_key=null"
        )
    return before + after


def _tokenise(
    sequences: list[_Sequence], table: Table, tokenizer: PreTrainedTokenizerBase, pad: int | None
) -> list[list[int]]:
    """Ids of each sequence, up to the token that its score is read off."""
    # The first piece of plain text gets what the tokenizer puts before a text; a template writes its own.
    special = [
        not sequence.templated and not number for sequence in sequences for number, _ in enumerate(sequence.texts)
    ]
    pieces = iter(encode_each([text for sequence in sequences for text in sequence.texts], special, tokenizer))
    found = []
    for index, sequence in enumerate(sequences):
        ids = [token for _ in sequence.texts for token in next(pieces)]
        if not sequence.templated:
            end = end_of_sequence(tokenizer, table.place(index // 2))
            ids += [] if ids[-1:] == [end] else [end]
        if not ids:
            raise BatchError(
                f"{table.place(index // 2)}: the chat template makes no tokens of it: {sequence.texts[0]!r}"
            )
        found.append(without_padding(ids, pad))
    return found


def _check_lengths(ids: list[list[int]], table: Table, options: PreferenceOptions) -> None:
    long = [row for row, tokens in enumerate(ids) if len(tokens) > options.max_length]
    if long and options.truncation == "error":
        row, side = divmod(long[0], 2)
        key, pairs = (options.chosen_key, options.rejected_key)[side], len({row // 2 for row in long})
        raise BatchError(
            f"{table.place(row)}: with '{key}' the sequence has {len(ids[long[0]])} tokens, "
            f"data.max_length={options.max_length} ({pairs} of {len(table)} pairs are too long, the longest sequence "
            f"has {max(map(len, ids))} tokens). Raise data.max_length, or type data.truncation=left, which keeps the "
            "end, where the score is read"
        )


def _fitting(ids: list[int], options: PreferenceOptions, bos: Any) -> list[int]:
    if options.truncation == "left":
        return keep_end(ids, options.max_length, bos)
    return without_padding(cut(ids, options.max_length, options.truncation), options.pad)


def _margin(table: Table, row: int, key: str | None) -> float:
    value = 0.0 if key is None else table.rows[row][key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        place = table.place(row)
        raise BatchError(f"{place}: '{key}' is {value!r}; every row needs a number. Type data.margin_key=null for none")
    return float(value)
