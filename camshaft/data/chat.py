"""Convert messages and plain text to token ids: validation, chat templates, tokenization, truncation.

    prompt = check_prompt(row["prompt"], place)                       # messages, or a string
    text = render(prompt, tokenizer, place, add_generation_prompt=True)
    ids = encode([text], tokenizer, special_tokens=False)[0]

Used by `prompts.py`, `sft.py`, `preferences.py` and the reward model role. `place` is the file and row for error
messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import jinja2
from rich.console import Console
from rich.progress import track

from camshaft.errors import BatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Prompt = str | list[Message]
Truncation = Literal["error", "left", "right", "middle"]
T = TypeVar("T")

_CHUNK = 1000
_MIN_PROGRESS_ROWS = 20_000
"""Minimum number of rows for a progress bar."""


def with_progress(items: Sequence[T], label: str, num_rows: int) -> Iterable[T]:
    """Iterate over `items` with a progress bar for large data sets if stderr is a terminal."""
    console = Console(stderr=True)
    disable = num_rows < _MIN_PROGRESS_ROWS or not console.is_terminal
    return track(items, label, console=console, transient=True, disable=disable)


def check_prompt(value: Any, place: str, column: str = "prompt") -> Prompt:
    """Validate a prompt: a non-blank string or a list of messages with role and content."""
    if isinstance(value, str) and value.strip():
        return value
    if value is None or (isinstance(value, (str, Sequence)) and not value) or isinstance(value, str):
        raise BatchError(f"{place}: '{column}' is empty ({value!r}); every row needs a value")
    if not isinstance(value, list):
        raise BatchError(f"{place}: '{column}' must be a string or a list of messages, got {type(value).__name__}")
    return [_check_message(message, number, place, column) for number, message in enumerate(value)]


def _check_message(message: Any, number: int, place: str, column: str) -> Message:
    where = f"{place}: message {number} of '{column}'"
    if not isinstance(message, Mapping):
        raise BatchError(f"{where} must be a mapping with role and content, got {type(message).__name__}")
    for key in ("role", "content"):
        if key not in message:
            raise BatchError(f"{where} has no '{key}', only {sorted(message)}")
        if not isinstance(message[key], str):
            raise BatchError(f"{where} has {key}={message[key]!r}; it must be a string")
    # Parquet fills fields that are missing in this row with None; templates must not see them.
    return {key: item for key, item in message.items() if item is not None}


def render(messages: list[Message], tokenizer: PreTrainedTokenizerBase, place: str, add_generation_prompt: bool) -> str:
    """Format messages with the tokenizer's chat template."""
    if not tokenizer.chat_template:
        raise BatchError(
            f"{place}: the row contains chat messages, but the tokenizer ({tokenizer.name_or_path or 'unnamed'}) has "
            "no chat template; use a chat model's tokenizer, or plain text in this column"
        )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except jinja2.TemplateError as error:
        roles = [message["role"] for message in messages]
        raise BatchError(f"{place}: the chat template rejects the roles {roles}: {error}") from error
    return cast(str, text)


def encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, special_tokens: bool) -> list[list[int]]:
    """Tokenize texts. `special_tokens` adds the tokenizer's special tokens of plain text (BOS)."""
    ids: list[list[int]] = []
    for start in with_progress(range(0, len(texts), _CHUNK), "tokenizing", len(texts)):
        part = list(texts[start : start + _CHUNK])
        encoded = tokenizer(part, add_special_tokens=special_tokens, return_attention_mask=False, verbose=False)
        ids.extend(cast(list[list[int]], encoded["input_ids"]))
    return ids


def encode_each(
    texts: Sequence[str], special_tokens: Sequence[bool], tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """Tokenize texts, with a `special_tokens` flag per text."""
    ids: list[list[int]] = [[] for _ in texts]
    for special in (True, False):
        rows = [row for row, flag in enumerate(special_tokens) if flag == special]
        for row, tokens in zip(rows, encode([texts[row] for row in rows], tokenizer, special), strict=True):
            ids[row] = tokens
    return ids


def end_of_sequence(tokenizer: PreTrainedTokenizerBase, place: str) -> int:
    """Return the end-of-sequence token, which ends plain-text responses."""
    if not isinstance(tokenizer.eos_token_id, int):
        raise BatchError(f"{place}: the tokenizer has no end-of-sequence token to end a response with; set eos_token")
    return tokenizer.eos_token_id


def as_text(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, place: str) -> str:
    """Return the text that the model continues: messages with the chat template applied, or plain text."""
    return prompt if isinstance(prompt, str) else render(prompt, tokenizer, place, add_generation_prompt=True)


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, places: Sequence[str]
) -> list[list[int]]:
    """Tokenize prompts for generation: messages with the chat template applied, or plain text."""
    rendered = [as_text(prompt, tokenizer, place) for prompt, place in zip(prompts, places, strict=True)]
    # Templates contain special tokens; plain text gets those of the tokenizer.
    ids = encode_each(rendered, [isinstance(prompt, str) for prompt in prompts], tokenizer)
    for row, tokens in enumerate(ids):
        if not tokens:
            raise BatchError(f"{places[row]}: the prompt has no tokens: {rendered[row]!r}")
    return ids


def truncate(ids: list[Any], limit: int, side: Truncation) -> list[Any]:
    """Truncate to `limit` items at the `left`, the `right` or the `middle`."""
    if len(ids) <= limit:
        return ids
    if side == "left":
        return ids[-limit:]
    if side == "right":
        return ids[:limit]
    assert side == "middle", f"truncation={side} does not truncate"
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]


def without_padding(ids: list[int], pad: int | None) -> list[int]:
    """Drop trailing pad tokens: `AutoModelForSequenceClassification` reads the score at the last other token.

    Keep one token of a row that contains only padding.
    """
    last = next((index for index in range(len(ids) - 1, -1, -1) if ids[index] != pad), 0)
    return ids[: last + 1]


def keep_end(ids: list[int], longest: int, bos: int | None) -> list[int]:
    """Truncate to `longest` ids on the left, but keep a beginning-of-sequence token."""
    if len(ids) <= longest:
        return ids
    kept = ids[-longest:]
    if bos is not None and ids[0] == bos and len(kept) > 1:
        kept[0] = bos
    return kept
