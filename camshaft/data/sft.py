"""Load sequences for supervised fine-tuning: token ids with a loss mask.

    rows = load_sft("train.parquet", tokenizer, SFTOptions(max_length=1024))
    rows.batch            # columns input_ids, loss_mask

A row contains a prompt (messages or text) with a `response`, or a whole conversation in `messages`. The loss mask
selects the trained tokens. If the chat template has `{% generation %}` blocks, they are the tokens of these blocks, as
in transformers. Otherwise they are those of the response or of each assistant turn, including the token that ends it.
Prompt and response are then tokenized separately, because in generation the response follows the tokens of the prompt.
Tokens after the last trained token are removed.
"""

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from camshaft.config.schema.data import ChatTemplateConfig
from camshaft.data.chat import (
    Arguments,
    Message,
    Truncation,
    as_chat,
    check_prompt,
    encode_each,
    encode_turns,
    get_eos_token_id,
    log_unread_arguments,
    render,
    special_token_ids,
    template_arguments,
    track_progress,
    truncate,
)
from camshaft.data.tables import Paths, read_columns, read_rows
from camshaft.data.templates import try_template
from camshaft.data.unread import READ_TOOLS, log_unread_columns
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import BatchError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SFTOptions:
    """Columns, length limit and truncation of sequences, from the config section `data`."""

    max_length: int = 1024
    truncation: Truncation = "error"
    prompt_key: str = "prompt"
    response_key: str = "response"
    messages_key: str = "messages"
    """Column with whole conversations, which is used if the files have no column `response_key`."""
    chat: ChatTemplateConfig = field(default_factory=ChatTemplateConfig)
    """Arguments of the chat template, and the column with tools."""


@dataclass(frozen=True)
class SFTSet:
    """Sequences of the files after truncation."""

    batch: DataProto
    num_read: int
    num_truncated: int
    num_untrained: int
    """Number of sequences dropped because they contain no trained tokens after truncation."""

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
    location: str
    templated: bool
    """True if the chat template was applied; otherwise an end-of-sequence token is appended to the response."""
    marked: tuple[list[int], list[bool]] | None = None
    """Tokens and loss mask of a template with generation blocks, instead of `pieces`."""


def load_sft(
    paths: Paths,
    tokenizer: PreTrainedTokenizerBase,
    options: SFTOptions,
    max_samples: int | None = None,
    label: str = "data",
) -> SFTSet:
    """Read, validate, tokenize and truncate sequences. `loss_mask` is False at the first token of a sequence.

    `label` names the data in the log.
    """
    available = read_columns(paths)
    conversations = options.messages_key in available and options.response_key not in available
    columns_to_read = [options.messages_key] if conversations else [options.prompt_key, options.response_key]
    table = read_rows(
        paths,
        [*columns_to_read, *options.chat.tools_columns(required=True)],
        options.chat.tools_columns(required=False),
        max_samples,
    )
    log_unread_columns(table, [*columns_to_read, options.chat.tools_key], READ_TOOLS)
    has_messages = options.chat.prompt_template is not None or any(
        isinstance(table.rows[0][name], list) for name in columns_to_read
    )
    arguments = (template_arguments(row, table.location(i), options.chat) for i, row in enumerate(table.rows))
    log_unread_arguments(arguments, has_messages, tokenizer)
    if has_messages:
        try_template(tokenizer, lambda: _sequences(table.rows[0], table.location(0), tokenizer, options))
    sequences: list[_Sequence] = []
    for index in track_progress(range(len(table)), "chat template", len(table)):
        sequences += _sequences(table.rows[index], table.location(index), tokenizer, options)
    tokenized = _tokenize(sequences, tokenizer)
    lengths = [len(tokens) for tokens, _ in tokenized]
    _check_lengths(sequences, lengths, options)
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
        raise BatchError(f"max_length={options.max_length} truncates all trained tokens of all sequences; increase it")
    num_truncated = sum(length > options.max_length for length in lengths)
    columns = {"input_ids": Ragged.from_rows(ids), "loss_mask": Ragged.from_rows(masks)}
    rows = SFTSet(DataProto.from_dict(columns), len(table), num_truncated, len(tokenized) - len(ids))
    logger.info("%s: %s from %s", label, rows, ", ".join(map(str, table.files)))
    return rows


def _sequences(
    row: Mapping[str, Any], location: str, tokenizer: PreTrainedTokenizerBase, options: SFTOptions
) -> list[_Sequence]:
    """Build one sequence for a row, or one per assistant turn if the template formats earlier turns differently."""
    if options.messages_key in row:
        turns = check_prompt(row[options.messages_key], location, options.messages_key)
        if isinstance(turns, str):
            raise BatchError(f"{location}: '{options.messages_key}' is a string; it must be a list of messages")
        # An assistant turn that starts a conversation is not trained, because it does not answer a message.
        trained_turns = [i for i, message in enumerate(turns) if i and message["role"] == "assistant"]
        if not trained_turns:
            roles = [message["role"] for message in turns]
            raise BatchError(
                f"{location}: '{options.messages_key}' has the roles {roles}; it must contain an assistant message "
                "after another message"
            )
    else:
        prompt = as_chat(check_prompt(row[options.prompt_key], location, options.prompt_key), options.chat)
        response = row[options.response_key]
        if not isinstance(response, str) or not response:
            response = check_prompt(response, location, options.response_key)
        if isinstance(prompt, str) and isinstance(response, str):
            return [_Sequence([_Piece(prompt, False, special_tokens=True), _Piece(response, True)], location, False)]
        before: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        after: list[Message] = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
        turns = [*before, *after]
        trained_turns = [i for i, message in enumerate(turns) if i >= len(before) and message["role"] == "assistant"]
        if not trained_turns:
            raise BatchError(f"{location}: '{options.response_key}' has no assistant message")
    arguments = template_arguments(row, location, options.chat)
    marked = _marked_tokens(turns, trained_turns, tokenizer, location, arguments)
    if marked is not None:
        return [_Sequence([], location, True, marked)]
    pieces = _pieces(turns, trained_turns, tokenizer, location, arguments)
    if pieces is not None:
        return [_Sequence(pieces, location, True)]
    # The template formats a turn differently if other turns follow it; some templates drop its reasoning. The model
    # generates each turn at the end of a conversation, so each turn becomes a separate sequence.
    per_turn = [_pieces(turns[: i + 1], [i], tokenizer, location, arguments) for i in trained_turns]
    if any(pieces is None for pieces in per_turn):
        raise BatchError(
            f"{location}: with this chat template, a formatted conversation does not start with its formatted prompt, "
            "so the tokens of the answer cannot be determined; use another template"
        )
    return [_Sequence(pieces, location, True) for pieces in per_turn if pieces is not None]


def _marked_tokens(
    turns: list[Message],
    trained_turns: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    location: str,
    arguments: Arguments,
) -> tuple[list[int], list[bool]] | None:
    """Return the tokens of a conversation, with a mask of the generation blocks of the trained turns.

    Return None if the template has no such blocks, or if it is unknown which ones belong to the trained turns.
    """
    encoded = encode_turns(turns, tokenizer, location, arguments)
    if encoded is None:
        return None
    tokens, mask = encoded
    starts = [i for i, marked in enumerate(mask) if marked and not (i and mask[i - 1])]
    assistant_turns = [i for i, message in enumerate(turns) if message["role"] == "assistant"]
    if assistant_turns == list(trained_turns):
        return tokens, mask
    if len(starts) != len(assistant_turns):
        return None
    blocks = itertools.accumulate(int(i in starts) for i in range(len(mask)))  # 1 in the first block and after it, ...
    trained = {number for number, turn in enumerate(assistant_turns, start=1) if turn in trained_turns}
    return tokens, [marked and block in trained for marked, block in zip(mask, blocks, strict=True)]


def _pieces(
    turns: list[Message],
    trained_turns: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    location: str,
    arguments: Arguments,
) -> list[_Piece] | None:
    """Split a conversation into trained turns and the text before each of them.

    Return None if the formatted conversation does not start with the formatted turns up to a trained turn.
    """
    pieces: list[_Piece] = []
    prefix = ""
    for i in trained_turns:
        prompt_text = render(turns[:i], tokenizer, location, True, arguments)
        turn_text = render(turns[: i + 1], tokenizer, location, False, arguments)
        if not (prompt_text.startswith(prefix) and turn_text.startswith(prompt_text)):
            return None
        pieces += [_Piece(prompt_text[len(prefix) :], False), _Piece(turn_text[len(prompt_text) :], True)]
        prefix = turn_text
    return [piece for piece in pieces if piece.text]


def _tokenize(sequences: Sequence[_Sequence], tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], list[bool]]]:
    """Return the ids and the loss mask of each sequence up to its last trained token."""
    flat = [piece for sequence in sequences for piece in sequence.pieces]
    ids = encode_each([piece.text for piece in flat], [piece.special_tokens for piece in flat], tokenizer)
    end_ids = special_token_ids(tokenizer)
    rows, index = [], 0
    for sequence in sequences:
        tokens, mask = sequence.marked or ([], [])
        for piece in sequence.pieces:
            span, index = ids[index], index + 1
            if piece.trained and not sequence.templated:
                span = [*span, get_eos_token_id(tokenizer, sequence.location)]
            num_trained = _num_generated_tokens(span, end_ids) if piece.trained else 0
            tokens += span
            mask += [True] * num_trained + [False] * (len(span) - num_trained)
        end = len(mask) - mask[::-1].index(True) if any(mask) else len(mask)
        rows.append((tokens[:end], mask[:end]))
    return rows


def _num_generated_tokens(ids: list[int], end_ids: frozenset[int]) -> int:
    """Return the number of tokens of an assistant turn that the model generates.

    The last special token ends the turn. Text after it, usually a line break, belongs to the template. In a turn
    without special tokens, all tokens count.
    """
    positions = [i for i, token in enumerate(ids) if token in end_ids]
    return positions[-1] + 1 if positions else len(ids)


def _check_lengths(sequences: Sequence[_Sequence], lengths: Sequence[int], options: SFTOptions) -> None:
    overlong = [i for i, length in enumerate(lengths) if length > options.max_length]
    if overlong and options.truncation == "error":
        raise BatchError(
            f"{sequences[overlong[0]].location}: the sequence has {lengths[overlong[0]]} tokens, but "
            f"max_length={options.max_length} ({len(overlong)} of {len(lengths)} sequences are too long; the longest "
            f"has {max(lengths)} tokens). Increase max_length, or truncate these sequences with truncation=left or "
            "right"
        )
