"""Rows for supervised fine-tuning: whole sequences, and which of their tokens are trained.

    rows = load_sft("train.parquet", tokenizer, SFTOptions(max_length=1024))
    rows.batch            # input_ids, loss_mask

A row is a prompt (messages or text) with a `response`, or a whole conversation in `messages`. Trained are
the tokens that a model would have to generate: the text of the response or of each assistant turn, and
the token that ends it. Each such stretch is tokenised on its own, as generation would produce it after
its prompt; nothing after the last trained token is kept, since no loss could reach it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from camshaft.data.chat import Message, Truncation, check_prompt, cut, encode_each, end_of_sequence, render, watched
from camshaft.data.parquet import Paths, read_columns, read_parquet
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import BatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SFTOptions:
    """What to read from a row and how long a sequence may be."""

    max_length: int = 1024
    truncation: Truncation = "error"
    prompt_key: str = "prompt"
    response_key: str = "response"
    messages_key: str = "messages"
    """The column with whole conversations; read where there is no column `response_key`."""


@dataclass(frozen=True)
class SFTSet:
    """All sequences of some files."""

    batch: DataProto
    num_read: int
    num_truncated: int
    num_untrained: int
    """Left out because cutting took all trained tokens away."""

    def __str__(self) -> str:
        mask = self.batch.ragged("loss_mask").values
        text = f"{len(self.batch)} sequences, {len(mask)} tokens, {int(mask.sum())} of them trained"
        text += f", {self.num_truncated} cut" if self.num_truncated else ""
        return text + (f", {self.num_untrained} left out with nothing to train" if self.num_untrained else "")


@dataclass(frozen=True)
class _Piece:
    """A stretch of text that is tokenised on its own."""

    text: str
    trained: bool
    special_tokens: bool = False


@dataclass(frozen=True)
class _Sequence:
    pieces: list[_Piece]
    place: str
    templated: bool
    """The chat template has ended each turn; plain text gets the end-of-sequence token from us."""


def load_sft(
    paths: Paths, tokenizer: PreTrainedTokenizerBase, options: SFTOptions, max_samples: int | None = None
) -> SFTSet:
    """Read, check, tokenise and cut. `loss_mask` is never true on the first token of a row."""
    there = read_columns(paths)
    whole = options.messages_key in there and options.response_key not in there
    required = [options.messages_key] if whole else [options.prompt_key, options.response_key]
    table = read_parquet(paths, required, max_samples=max_samples)
    sequences: list[_Sequence] = []
    for index in watched(range(len(table)), "chat template", len(table)):
        sequences += _sequences(table.rows[index], table.place(index), tokenizer, options)
    tokenised = _tokenise(sequences, tokenizer)
    _check_lengths(sequences, tokenised, options)
    ids: list[list[int]] = []
    masks: list[list[bool]] = []
    for tokens, mask in tokenised:
        if len(tokens) > options.max_length:
            tokens, mask = (cut(part, options.max_length, options.truncation) for part in (tokens, mask))
        mask = [False, *mask[1:]]  # nothing comes before a first token that could predict it
        if any(mask):
            ids.append(tokens)
            masks.append(mask)
    if not ids:
        raise BatchError(f"max_length={options.max_length} leaves no row with a token to train; raise it")
    truncated = sum(len(tokens) > options.max_length for tokens, _ in tokenised)
    columns = {
        "input_ids": Ragged.from_rows(ids),
        "loss_mask": Ragged.from_rows(masks),
    }
    found = SFTSet(DataProto.from_dict(columns), len(table), truncated, len(tokenised) - len(ids))
    logger.info("%s from %s", found, ", ".join(map(str, table.files)))
    return found


def _sequences(
    row: Mapping[str, Any], place: str, tokenizer: PreTrainedTokenizerBase, options: SFTOptions
) -> list[_Sequence]:
    """What one row trains: one sequence, or one for each assistant turn where the template asks for that."""
    if options.messages_key in row:
        turns = check_prompt(row[options.messages_key], place, options.messages_key)
        if isinstance(turns, str):
            raise BatchError(f"{place}: '{options.messages_key}' is text; it must be a list of messages")
        # An assistant's greeting before anybody spoke answers nothing; it is context.
        trained = [i for i, message in enumerate(turns) if i and message["role"] == "assistant"]
        if not trained:
            roles = [message["role"] for message in turns]
            raise BatchError(
                f"{place}: '{options.messages_key}' has no assistant turn that answers something, only {roles}"
            )
    else:
        prompt = check_prompt(row[options.prompt_key], place, options.prompt_key)
        response = row[options.response_key]
        if not isinstance(response, str) or not response:
            raise BatchError(f"{place}: '{options.response_key}' is {response!r}; every row needs a text")
        if isinstance(prompt, str):
            return [_Sequence([_Piece(prompt, False, special_tokens=True), _Piece(response, True)], place, False)]
        turns = [*prompt, {"role": "assistant", "content": response}]
        trained = [len(prompt)]
    pieces = _pieces(turns, trained, tokenizer, place, options)
    if pieces is not None:
        return [_Sequence(pieces, place, True)]
    # The template shows earlier turns differently once others follow (it may drop their reasoning). What the
    # model saw when it wrote turn i is the conversation up to i, so each turn becomes a sequence of its own.
    alone = [_pieces(turns[: i + 1], [i], tokenizer, place, options) for i in trained]
    if any(pieces is None for pieces in alone):
        raise BatchError(
            f"{place}: the chat template does not show a conversation as its prompt followed by the answer, so it "
            "cannot be told which tokens to train"
        )
    return [_Sequence(pieces, place, True) for pieces in alone if pieces is not None]


def _pieces(
    turns: list[Message],
    trained: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    place: str,
    options: SFTOptions,
) -> list[_Piece] | None:
    """Prompt, turn, what lies between, turn, ...; None if the later text does not begin with the earlier one."""
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


def _tokenise(sequences: Sequence[_Sequence], tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], list[bool]]]:
    """(ids, mask) of each sequence, ending with its last trained token."""
    flat = [piece for sequence in sequences for piece in sequence.pieces]
    ids = encode_each([piece.text for piece in flat], [piece.special_tokens for piece in flat], tokenizer)
    enders = _special_ids(tokenizer)
    out, at = [], 0
    for sequence in sequences:
        tokens: list[int] = []
        mask: list[bool] = []
        for piece in sequence.pieces:
            found, at = ids[at], at + 1
            if piece.trained and not sequence.templated:
                found = [*found, end_of_sequence(tokenizer, sequence.place)]
            trained = _generated(found, enders) if piece.trained else 0
            tokens += found
            mask += [True] * trained + [False] * (len(found) - trained)
        end = len(mask) - mask[::-1].index(True) if any(mask) else len(mask)
        out.append((tokens[:end], mask[:end]))
    return out


def _generated(ids: list[int], enders: frozenset[int]) -> int:
    """How many tokens of an assistant turn a model generates: up to the last special token, which ends the turn.

    What a template writes after it (a line break, as a rule) comes from the template. Without any special
    token the whole turn counts.
    """
    places = [i for i, token in enumerate(ids) if token in enders]
    return places[-1] + 1 if places else len(ids)


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    added = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset([*tokenizer.all_special_ids, *added])


def _check_lengths(
    sequences: Sequence[_Sequence], tokenised: Sequence[tuple[list[int], list[bool]]], options: SFTOptions
) -> None:
    lengths = [len(tokens) for tokens, _ in tokenised]
    long = [i for i, length in enumerate(lengths) if length > options.max_length]
    if long and options.truncation == "error":
        raise BatchError(
            f"{sequences[long[0]].place}: the sequence has {lengths[long[0]]} tokens, max_length={options.max_length} "
            f"({len(long)} of {len(lengths)} sequences are too long, the longest has {max(lengths)} tokens). "
            "Raise max_length, or cut them with truncation=left or right"
        )
