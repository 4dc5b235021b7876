"""Load rows for supervised fine-tuning: token ids with a loss mask.

    rows = load_sft("train.parquet", tokenizer, SFTOptions(max_length=1024))
    rows.batch            # input_ids, loss_mask

A row contains a prompt (messages or text) with a `response`, or a whole conversation in `messages`. The loss mask
selects the tokens that the model generates: the response or each assistant turn, with its end token. Each such span is
tokenized separately, as generation produces it after its prompt. Tokens after the last trained token are dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from camshaft.data.chat import (
    Message,
    Truncation,
    check_prompt,
    encode_each,
    end_of_sequence,
    render,
    truncate,
    with_progress,
)
from camshaft.data.parquet import Paths, read_columns, read_parquet
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import BatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SFTOptions:
    """Columns, length limit and truncation of sequences."""

    max_length: int = 1024
    truncation: Truncation = "error"
    prompt_key: str = "prompt"
    response_key: str = "response"
    messages_key: str = "messages"
    """Column with whole conversations; read if the files have no column `response_key`."""


@dataclass(frozen=True)
class SFTSet:
    """Sequences of the files."""

    batch: DataProto
    num_read: int
    num_truncated: int
    num_untrained: int
    """Sequences dropped because truncation removed all trained tokens."""

    def __str__(self) -> str:
        mask = self.batch.ragged("loss_mask").values
        text = f"{len(self.batch)} sequences, {len(mask)} tokens, {int(mask.sum())} of them trained"
        text += f", {self.num_truncated} truncated" if self.num_truncated else ""
        return text + (f", {self.num_untrained} dropped without trained tokens" if self.num_untrained else "")


@dataclass(frozen=True)
class _Piece:
    """A span of text that is tokenized separately."""

    text: str
    trained: bool
    special_tokens: bool = False


@dataclass(frozen=True)
class _Sequence:
    pieces: list[_Piece]
    place: str
    templated: bool
    """True if the chat template was applied; plain text gets an end-of-sequence token."""


def load_sft(
    paths: Paths, tokenizer: PreTrainedTokenizerBase, options: SFTOptions, max_samples: int | None = None
) -> SFTSet:
    """Read, validate, tokenize and truncate sequences. `loss_mask` is False on the first token of a row."""
    available = read_columns(paths)
    conversations = options.messages_key in available and options.response_key not in available
    required = [options.messages_key] if conversations else [options.prompt_key, options.response_key]
    table = read_parquet(paths, required, max_samples=max_samples)
    sequences: list[_Sequence] = []
    for index in with_progress(range(len(table)), "chat template", len(table)):
        sequences += _sequences(table.rows[index], table.place(index), tokenizer, options)
    tokenized = _tokenize(sequences, tokenizer)
    _check_lengths(sequences, tokenized, options)
    ids: list[list[int]] = []
    masks: list[list[bool]] = []
    for tokens, mask in tokenized:
        if len(tokens) > options.max_length:
            tokens, mask = (truncate(part, options.max_length, options.truncation) for part in (tokens, mask))
        mask = [False, *mask[1:]]  # no position predicts the first token
        if any(mask):
            ids.append(tokens)
            masks.append(mask)
    if not ids:
        raise BatchError(f"max_length={options.max_length} leaves no row with a trained token; raise it")
    truncated = sum(len(tokens) > options.max_length for tokens, _ in tokenized)
    columns = {
        "input_ids": Ragged.from_rows(ids),
        "loss_mask": Ragged.from_rows(masks),
    }
    rows = SFTSet(DataProto.from_dict(columns), len(table), truncated, len(tokenized) - len(ids))
    logger.info("%s from %s", rows, ", ".join(map(str, table.files)))
    return rows


def _sequences(
    row: Mapping[str, Any], place: str, tokenizer: PreTrainedTokenizerBase, options: SFTOptions
) -> list[_Sequence]:
    """Build the sequences of a row: one, or one per assistant turn if the template rewrites earlier turns."""
    if options.messages_key in row:
        turns = check_prompt(row[options.messages_key], place, options.messages_key)
        if isinstance(turns, str):
            raise BatchError(f"{place}: '{options.messages_key}' is a string; it must be a list of messages")
        # An assistant turn at the start of a conversation answers no message; it is context.
        trained = [i for i, message in enumerate(turns) if i and message["role"] == "assistant"]
        if not trained:
            roles = [message["role"] for message in turns]
            raise BatchError(
                f"{place}: '{options.messages_key}' has no assistant turn after another turn, only {roles}"
            )
    else:
        prompt = check_prompt(row[options.prompt_key], place, options.prompt_key)
        response = row[options.response_key]
        if not isinstance(response, str) or not response:
            raise BatchError(f"{place}: '{options.response_key}' is {response!r}; every row needs a non-empty string")
        if isinstance(prompt, str):
            return [_Sequence([_Piece(prompt, False, special_tokens=True), _Piece(response, True)], place, False)]
        turns = [*prompt, {"role": "assistant", "content": response}]
        trained = [len(prompt)]
    pieces = _pieces(turns, trained, tokenizer, place, options)
    if pieces is not None:
        return [_Sequence(pieces, place, True)]
    # The template formats earlier turns differently once others follow (it may drop their reasoning). The model
    # generates turn i after the conversation up to i, so each turn becomes a separate sequence.
    per_turn = [_pieces(turns[: i + 1], [i], tokenizer, place, options) for i in trained]
    if any(pieces is None for pieces in per_turn):
        raise BatchError(
            f"{place}: the chat template does not format a conversation as its prompt followed by the answer, so the "
            "trained tokens cannot be determined; use another template"
        )
    return [_Sequence(pieces, place, True) for pieces in per_turn if pieces is not None]


def _pieces(
    turns: list[Message],
    trained: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    place: str,
    options: SFTOptions,
) -> list[_Piece] | None:
    """Split a conversation into prompt, turn, text between turns, turn, ...

    Return None if the formatted conversation does not begin with its formatted prefix.
    """
    pieces: list[_Piece] = []
    done = ""
    for i in trained:
        before = render(turns[:i], tokenizer, place, True)
        after = render(turns[: i + 1], tokenizer, place, False)
        if not (before.startswith(done) and after.startswith(before)):
            return None
        pieces += [_Piece(before[len(done) :], False), _Piece(after[len(before) :], True)]
        done = after
    return [piece for piece in pieces if piece.text]


def _tokenize(sequences: Sequence[_Sequence], tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], list[bool]]]:
    """Return (ids, mask) of each sequence, up to its last trained token."""
    flat = [piece for sequence in sequences for piece in sequence.pieces]
    ids = encode_each([piece.text for piece in flat], [piece.special_tokens for piece in flat], tokenizer)
    end_ids = _special_ids(tokenizer)
    rows, index = [], 0
    for sequence in sequences:
        tokens: list[int] = []
        mask: list[bool] = []
        for piece in sequence.pieces:
            span, index = ids[index], index + 1
            if piece.trained and not sequence.templated:
                span = [*span, end_of_sequence(tokenizer, sequence.place)]
            trained = _num_generated_tokens(span, end_ids) if piece.trained else 0
            tokens += span
            mask += [True] * trained + [False] * (len(span) - trained)
        end = len(mask) - mask[::-1].index(True) if any(mask) else len(mask)
        rows.append((tokens[:end], mask[:end]))
    return rows


def _num_generated_tokens(ids: list[int], end_ids: frozenset[int]) -> int:
    """Return the number of generated tokens of an assistant turn: up to its last special token, which ends the turn.

    Text after that token (usually a line break) is part of the template. Without a special token the whole turn counts.
    """
    positions = [i for i, token in enumerate(ids) if token in end_ids]
    return positions[-1] + 1 if positions else len(ids)


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    added = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset([*tokenizer.all_special_ids, *added])


def _check_lengths(
    sequences: Sequence[_Sequence], tokenized: Sequence[tuple[list[int], list[bool]]], options: SFTOptions
) -> None:
    lengths = [len(tokens) for tokens, _ in tokenized]
    long = [i for i, length in enumerate(lengths) if length > options.max_length]
    if long and options.truncation == "error":
        raise BatchError(
            f"{sequences[long[0]].place}: the sequence has {lengths[long[0]]} tokens, max_length={options.max_length} "
            f"({len(long)} of {len(lengths)} sequences are too long, the longest has {max(lengths)} tokens). "
            "Raise max_length, or truncate them with truncation=left or right"
        )
