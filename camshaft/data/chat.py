"""Convert messages and plain text to token ids: validate, apply chat templates, tokenize and truncate.

    prompt = check_prompt(row["prompt"], location)                       # list of messages, or a string
    text = render(prompt, tokenizer, location, add_generation_prompt=True)
    ids = encode([text], tokenizer, special_tokens=False)[0]

`prompts.py`, `sft.py`, `preferences.py` and the reward model role use these functions. Error messages report
`location`, the file and row number of the text.
"""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

import jinja2
import rich.progress
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from camshaft.config.foreign.topics import topic_of_key
from camshaft.config.schema.data import ChatTemplateConfig
from camshaft.config.tree import shorten
from camshaft.errors import BatchError
from camshaft.progress import track

Message = dict[str, Any]
Prompt = str | list[Message]
Truncation = Literal["error", "left", "right", "middle"]
T = TypeVar("T")

Arguments = Mapping[str, Any]
"""Arguments of a chat template for one row, besides the messages, such as `tools`."""
NO_ARGUMENTS: Arguments = {}

_CHUNK = 1000
_MIN_PROGRESS_ROWS = 20_000
"""Minimum number of rows for which a progress bar is shown."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

logger = logging.getLogger(__name__)


def track_progress(items: Sequence[T], label: str, num_rows: int) -> Iterable[T]:
    """Iterate over `items`, with a progress bar if the data set is large and stderr is a terminal."""
    shown: Iterable[T] = items
    # A console, or the thread of a disabled progress bar, takes longer than tokenizing one text.
    if num_rows >= _MIN_PROGRESS_ROWS and (console := Console(stderr=True)).is_terminal:
        shown = rich.progress.track(items, label, console=console, transient=True)
    return track(shown, num_rows, f"rows ({label})", size=-(-num_rows // max(1, len(items))))


def check_prompt(value: Any, location: str, column: str = "prompt") -> Prompt:
    """Validate and return a prompt: a non-blank string or a list of messages with role and content."""
    if isinstance(value, str) and value.strip():
        return value
    if value is None or (isinstance(value, (str, Sequence)) and not value) or isinstance(value, str):
        raise BatchError(f"{location}: '{column}' is empty ({value!r}); fill it in or remove the row")
    if not isinstance(value, list):
        raise BatchError(
            f"{location}: '{column}' has type {type(value).__name__}; it must be a string or a list of messages"
        )
    return [_check_message(message, number, location, column) for number, message in enumerate(value)]


def _check_message(message: Any, number: int, location: str, column: str) -> Message:
    subject = f"{location}: message {number} of '{column}'"
    if not isinstance(message, Mapping):
        raise BatchError(f"{subject} has type {type(message).__name__}; it must be a mapping with role and content")
    values = {**message, "content": join_parts(message["content"])} if "content" in message else message
    for key in ("role", "content"):
        if key == "content" and values.get(key) is None and values.get("tool_calls"):
            continue
        if key not in values:
            raise BatchError(f"{subject} has no '{key}', only {sorted(message)}; add it")
        if not isinstance(values[key], str):
            raise BatchError(f"{subject} has {key}={message[key]!r}; it must be a string{_parts_note(message[key])}")
    # In OpenAI's format, the content of a message with tool calls is null.
    return {key: _without_nulls(item) for key, item in values.items() if item is not None or key == "content"}


def join_parts(content: Any) -> Any:
    """Return a content of text parts in OpenAI's format as a text with one line per part, and others unchanged."""
    if not isinstance(content, list) or not content:
        return content
    parts: list[Any] = content
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    return "\n".join(cast(list[str], texts)) if all(isinstance(text, str) for text in texts) else content


def _parts_note(content: Any) -> str:
    """Return a note about the images, videos or sounds in the content of a message."""
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    topics = [topic for part in parts if (topic := topic_of_key(str(part.get("type")))) is not None]
    return f". {topics[0].message()}" if topics else ""


def _without_nulls(value: Any) -> Any:
    """Drop null fields. Parquet stores missing fields as null, but templates test whether a field exists."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def as_chat(prompt: Prompt, chat: ChatTemplateConfig) -> Prompt:
    """Return a plain-text prompt as the user message of `prompt_template`, if it is set."""
    if not isinstance(prompt, str) or chat.prompt_template is None:
        return prompt
    return [{"role": "user", "content": chat.prompt_template.replace("{prompt}", prompt)}]


def template_arguments(row: Mapping[str, Any], location: str, chat: ChatTemplateConfig) -> Arguments:
    """Return the arguments of the chat template for a row: those of all rows, and the tools of the row."""
    tools = row.get(chat.tools_key) if chat.tools_key else None
    if not tools:
        return chat.chat_template_kwargs
    return {**chat.chat_template_kwargs, "tools": _check_tools(tools, f"{location}: '{chat.tools_key}'")}


def _check_tools(value: Any, subject: str) -> list[Any]:
    """Validate and return the tools of a row: a list of JSON schemas, which may be JSON texts, or a JSON text."""
    try:
        items = json.loads(value) if isinstance(value, str) else value
        tools = [json.loads(item) if isinstance(item, str) else _without_nulls(item) for item in items]
        if all(isinstance(tool, Mapping) for tool in tools):
            return tools
    except (TypeError, ValueError):
        pass
    raise BatchError(f"{subject} is {shorten(repr(value))}; it must be a list of JSON schemas, or its JSON text")


def log_unread_arguments(
    arguments: Iterable[Arguments], has_messages: bool, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Log a warning for each argument that the chat template ignores, because it does not contain the name."""
    template = str(tokenizer.chat_template or "")
    for name in sorted({name for values in arguments for name in values}):
        subject = "the tools of the rows are" if name == "tools" else f"'{name}' of data.chat_template_kwargs is"
        if not has_messages:
            logger.warning("%s not read, because no chat template formats plain text; use a list of messages", subject)
        elif not re.search(rf"\b{re.escape(name)}\b", template):
            logger.warning(
                "%s not read by the chat template; correct the name, use the tokenizer of another model, or set "
                "data.chat_template",
                subject,
            )


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of all special tokens, including those that a chat template uses."""
    added = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset([*tokenizer.all_special_ids, *added])


def render(
    messages: list[Message],
    tokenizer: PreTrainedTokenizerBase,
    location: str,
    add_generation_prompt: bool,
    arguments: Arguments = NO_ARGUMENTS,
) -> str:
    """Format messages as text with the tokenizer's chat template."""
    text = _apply_template(
        messages, tokenizer, location, arguments, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    return cast(str, text)


def encode_turns(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, location: str, arguments: Arguments
) -> tuple[list[int], list[bool]] | None:
    """Tokenize a conversation, and mark the tokens in the `{% generation %}` blocks of the chat template.

    Return None if the template has no such blocks.
    """
    template = tokenizer.get_chat_template(None, arguments.get("tools")) if tokenizer.chat_template else ""
    if not _GENERATION.search(template):
        return None
    encoded = _apply_template(
        messages, tokenizer, location, arguments, return_dict=True, return_assistant_tokens_mask=True
    )
    return encoded["input_ids"], [bool(value) for value in encoded["assistant_masks"]]


def _apply_template(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, location: str, arguments: Arguments, **options: Any
) -> Any:
    if not tokenizer.chat_template:
        raise BatchError(
            f"{location}: the row contains chat messages, but the tokenizer "
            f"({tokenizer.name_or_path or 'unnamed'}) has no chat template; use the tokenizer of a chat model, or "
            "store plain text in this column"
        )
    try:
        return tokenizer.apply_chat_template(messages, **options, **arguments)
    except Exception as error:  # a template is a program in the model folder, which can raise anything
        roles = [message["role"] for message in messages]
        reason = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
        raise BatchError(
            f"{location}: the chat template rejects messages with the roles {roles}: {reason}; change the messages or "
            "chat_template.jinja of the model folder"
        ) from error


def encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, special_tokens: bool) -> list[list[int]]:
    """Tokenize texts. `special_tokens` adds the special tokens that the tokenizer adds to plain text, such as BOS."""
    ids: list[list[int]] = []
    for start in track_progress(range(0, len(texts), _CHUNK), "tokenizing", len(texts)):
        part = list(texts[start : start + _CHUNK])
        encoded = tokenizer(part, add_special_tokens=special_tokens, return_attention_mask=False, verbose=False)
        ids.extend(cast(list[list[int]], encoded["input_ids"]))
    return ids


def encode_each(
    texts: Sequence[str], special_tokens: Sequence[bool], tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """Tokenize texts with one `special_tokens` flag per text."""
    ids: list[list[int]] = [[] for _ in texts]
    for special in (True, False):
        rows = [row for row, flag in enumerate(special_tokens) if flag == special]
        for row, tokens in zip(rows, encode([texts[row] for row in rows], tokenizer, special), strict=True):
            ids[row] = tokens
    return ids


def get_eos_token_id(tokenizer: PreTrainedTokenizerBase, location: str) -> int:
    """Return the id of the end-of-sequence token, which ends plain-text responses."""
    if not isinstance(tokenizer.eos_token_id, int):
        raise BatchError(
            f"{location}: the tokenizer has no end-of-sequence token, which ends plain-text responses; set eos_token"
        )
    return tokenizer.eos_token_id


def render_prompt(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, location: str, arguments: Arguments = NO_ARGUMENTS
) -> str:
    """Return the text of a prompt for generation; messages are formatted with the chat template."""
    return prompt if isinstance(prompt, str) else render(prompt, tokenizer, location, True, arguments)


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    locations: Sequence[str] | None = None,
    arguments: Sequence[Arguments] | None = None,
) -> list[list[int]]:
    """Tokenize prompts for generation; messages are formatted with the chat template.

    Errors name the entry of `locations`, or by default the number of the prompt. `arguments` contains the arguments of
    the chat template for each prompt, for example `{"enable_thinking": False}`.
    """
    locations = [f"prompt {number}" for number in range(len(prompts))] if locations is None else locations
    arguments = [NO_ARGUMENTS] * len(prompts) if arguments is None else arguments
    rows = zip(prompts, locations, arguments, strict=True)
    rendered = [render_prompt(prompt, tokenizer, location, values) for prompt, location, values in rows]
    # Templates include special tokens. For plain text, the tokenizer adds them.
    ids = encode_each(rendered, [isinstance(prompt, str) for prompt in prompts], tokenizer)
    for row, tokens in enumerate(ids):
        if not tokens:
            raise BatchError(
                f"{locations[row]}: the prompt {rendered[row]!r} has no tokens; remove the row or change the prompt"
            )
    return ids


def truncate(ids: list[Any], limit: int, side: Truncation) -> list[Any]:
    """Truncate to `limit` items by removing items at the `left`, at the `right` or in the `middle`."""
    if len(ids) <= limit:
        return ids
    if side == "left":
        return ids[-limit:]
    if side == "right":
        return ids[:limit]
    assert side == "middle", f"truncation={side} does not truncate"
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]


def strip_padding(ids: list[int], pad: int | None) -> list[int]:
    """Remove trailing pad tokens; if all tokens are padding, keep the first.

    `AutoModelForSequenceClassification` reads the score at the last token that is not padding.
    """
    last = next((index for index in range(len(ids) - 1, -1, -1) if ids[index] != pad), 0)
    return ids[: last + 1]


def truncate_left(ids: list[int], limit: int, bos: int | None) -> list[int]:
    """Truncate to the last `limit` ids, but keep a beginning-of-sequence token at the start."""
    if len(ids) <= limit:
        return ids
    suffix = ids[-limit:]
    if bos is not None and ids[0] == bos and len(suffix) > 1:
        suffix[0] = bos
    return suffix
