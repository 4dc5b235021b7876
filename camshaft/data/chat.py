"""Messages and plain text to token ids: checks, the chat template, tokenising, cutting to length.

    prompt = check_prompt(row["prompt"], place)                       # messages, or a string
    text = render(prompt, tokenizer, place, add_generation_prompt=True)
    ids = encode([text], tokenizer, special_tokens=False)[0]

Shared by `prompts.py`, `sft.py`, `preferences.py`, and the role that scores. `place` is the file and row that an
error names.
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
_BIG = 20_000
"""Sets of at least this many rows show a progress bar."""


def watched(items: Sequence[T], label: str, num_rows: int) -> Iterable[T]:
    """`items`, with a progress bar if they stand for many rows and somebody is looking."""
    console = Console(stderr=True)
    return track(items, label, console=console, transient=True, disable=num_rows < _BIG or not console.is_terminal)


def check_prompt(value: Any, place: str, column: str = "prompt") -> Prompt:
    """A string that is not blank, or a list of messages with role and content; else an error with `place`."""
    if isinstance(value, str) and value.strip():
        return value
    if value is None or (isinstance(value, (str, Sequence)) and not value) or isinstance(value, str):
        raise BatchError(f"{place}: '{column}' is empty ({value!r}); every row needs one")
    if not isinstance(value, list):
        raise BatchError(f"{place}: '{column}' is {type(value).__name__}; give text or a list of messages")
    return [_check_message(message, number, place, column) for number, message in enumerate(value)]


def _check_message(message: Any, number: int, place: str, column: str) -> Message:
    where = f"{place}: message {number} of '{column}'"
    if not isinstance(message, Mapping):
        raise BatchError(f"{where} is {type(message).__name__}; a message is {{role, content}}")
    for key in ("role", "content"):
        if key not in message:
            raise BatchError(f"{where} has no '{key}', only {sorted(message)}")
        if not isinstance(message[key], str):
            raise BatchError(f"{where} has {key}={message[key]!r}; it must be text")
    # Parquet fills a field that only other rows have with None; a template must not see it.
    return {key: item for key, item in message.items() if item is not None}


def render(messages: list[Message], tokenizer: PreTrainedTokenizerBase, place: str, add_generation_prompt: bool) -> str:
    """The text of a conversation, by the tokenizer's chat template."""
    if not tokenizer.chat_template:
        raise BatchError(
            f"{place}: the row holds chat messages, but the tokenizer ({tokenizer.name_or_path or 'unnamed'}) has "
            "no chat template; use a chat model's tokenizer, or plain text in this column"
        )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except jinja2.TemplateError as error:
        roles = [message["role"] for message in messages]
        raise BatchError(f"{place}: the chat template refuses the roles {roles}: {error}") from error
    return cast(str, text)


def encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, special_tokens: bool) -> list[list[int]]:
    """Token ids of each text. `special_tokens` adds what the tokenizer puts around plain text (BOS)."""
    ids: list[list[int]] = []
    for start in watched(range(0, len(texts), _CHUNK), "tokenising", len(texts)):
        part = list(texts[start : start + _CHUNK])
        encoded = tokenizer(part, add_special_tokens=special_tokens, return_attention_mask=False, verbose=False)
        ids.extend(cast(list[list[int]], encoded["input_ids"]))
    return ids


def encode_each(
    texts: Sequence[str], special_tokens: Sequence[bool], tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """The same, where some texts get those tokens and others do not."""
    ids: list[list[int]] = [[] for _ in texts]
    for special in (True, False):
        rows = [row for row, wanted in enumerate(special_tokens) if wanted == special]
        for row, found in zip(rows, encode([texts[row] for row in rows], tokenizer, special), strict=True):
            ids[row] = found
    return ids


def end_of_sequence(tokenizer: PreTrainedTokenizerBase, place: str) -> int:
    """The token that ends an answer in plain text, after which no template writes one."""
    if not isinstance(tokenizer.eos_token_id, int):
        raise BatchError(f"{place}: the tokenizer has no end-of-sequence token to close a response with; set eos_token")
    return tokenizer.eos_token_id


def as_text(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, place: str) -> str:
    """What a model is to go on from: templated messages, or text as it is."""
    return prompt if isinstance(prompt, str) else render(prompt, tokenizer, place, add_generation_prompt=True)


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, places: Sequence[str]
) -> list[list[int]]:
    """Ids of each prompt as a model sees it at generation: templated messages, or text as it is."""
    rendered = [as_text(prompt, tokenizer, place) for prompt, place in zip(prompts, places, strict=True)]
    # A template writes its own special tokens; plain text gets the tokenizer's.
    ids = encode_each(rendered, [isinstance(prompt, str) for prompt in prompts], tokenizer)
    for row, found in enumerate(ids):
        if not found:
            raise BatchError(f"{places[row]}: the prompt becomes no tokens at all: {rendered[row]!r}")
    return ids


def cut(ids: list[Any], limit: int, side: Truncation) -> list[Any]:
    """At most `limit` items: `left` drops the first ones, `right` the last ones, `middle` those between."""
    if len(ids) <= limit:
        return ids
    if side == "left":
        return ids[-limit:]
    if side == "right":
        return ids[:limit]
    assert side == "middle", f"nothing is cut with truncation={side}"
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]


def without_padding(ids: list[int], pad: int | None) -> list[int]:
    """`ids` up to the token that `AutoModelForSequenceClassification` scores: the last that is not `pad`.

    Of a row that is nothing else the first one stays.
    """
    last = next((place for place in range(len(ids) - 1, -1, -1) if ids[place] != pad), 0)
    return ids[: last + 1]


def keep_end(ids: list[int], longest: int, bos: int | None) -> list[int]:
    """At most `longest` ids: the end, where a score is read, and a beginning-of-sequence token."""
    if len(ids) <= longest:
        return ids
    kept = ids[-longest:]
    if bos is not None and ids[0] == bos and len(kept) > 1:
        kept[0] = bos
    return kept
