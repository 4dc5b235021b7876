"""Tool calls in the answers of a policy.

    parser = ToolParser(tokenizer, "auto")
    content, calls, _ = parser.parse(ids, prompt_ids, tools)
    calls[0].name, calls[0].arguments                     # "add", {"a": 3, "b": 4}

A tokenizer with a `response_template` parses its answers itself. Otherwise, the format is one of `FORMATS`, or a
function of yours, as `file.py:function` or in the entry point group `camshaft.tool_parsers`, which maps the text of an
answer to `Parsed`. A call that cannot be read is a call with an `error`, which the policy is told.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from camshaft.agents.calls import MAX_NESTING, Call, Parsed, exceeds_nesting
from camshaft.config.schema.agents import FORMAT_KEY
from camshaft.data.chat import render, special_token_ids
from camshaft.errors import BatchError, ConfigError
from camshaft.plugins import find_in_file, function_file, load_function

GROUP = "camshaft.tool_parsers"
"""Group of the entry points of formats."""

AUTO = "auto"
"""Name of the format that the chat template writes."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_SEPARATORS = re.compile(r"[\s;,]*")
_NAME, _ARGUMENT = "probe_name", "probe_argument"
_QUOTED = 100

Format = Callable[[str], Parsed]
Tools = Sequence[Mapping[str, Any]]


class ToolParser:
    """Finds the calls in answers of a tokenizer's model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str = AUTO):
        """`name` is a format. `auto` uses the tokenizer's `response_template`, or what its chat template writes."""
        self.tokenizer: Any = tokenizer
        self.has_template = name == AUTO and getattr(tokenizer, "response_template", None) is not None
        self.name = detect_format(tokenizer) if name == AUTO else name
        self._format = _load_format(self.name)
        self._special = [str(tokenizer.decode([token])) for token in special_token_ids(tokenizer)]

    def parse(self, answer: Sequence[int] | str, prefix: Sequence[int] = (), tools: Tools = ()) -> Parsed:
        """Return the parts of an answer.

        Args:
            answer: Sampled tokens, or a text.
            prefix: Tokens before the answer, which may contain the beginning of a message, such as `<think>`.
            tools: JSON schemas of the functions.
        """
        text = answer if isinstance(answer, str) else str(self.tokenizer.decode(list(answer)))
        if self.has_template:
            return self._parse_with_template(text, prefix, tools)
        for token in self._special:  # tokens of the format may be special too
            text = text.removesuffix(token)
        parsed = self._format(text)
        calls = tuple(map(_within_limit, parsed.calls))  # a function of the user may not know the limit
        return parsed._replace(content=self._without_special(parsed.content), calls=calls)

    def _parse_with_template(self, text: str, prefix: Sequence[int], tools: Tools) -> Parsed:
        try:
            message = self.tokenizer.parse_response(text, prefix=self.tokenizer.decode(list(prefix)), tools=list(tools))
        except Exception as error:  # a template is data of the model folder, and parsers raise several types
            return Parsed(self._without_special(text), (_unreadable(str(error)),))
        content = self._without_special(str(message.get("content") or ""))
        calls = tuple(_read_call(call.get("function", call)) for call in message.get("tool_calls") or ())
        return Parsed(content, calls, str(message.get("reasoning_content") or message.get("thinking") or ""))

    def _without_special(self, text: str) -> str:
        for token in self._special:
            text = text.replace(token, "")
        return text


def parse_hermes(text: str) -> Parsed:
    """Read calls in the format of Hermes and Qwen: a JSON object between `<tool_call>` and `</tool_call>`."""
    content, *parts = text.split(_OPEN)
    calls: list[Call] = []
    for part in parts:
        body, closed, behind = part.partition(_CLOSE)
        calls.append(_read_json(body) if closed else _unreadable(f"{_CLOSE} is missing"))
        content += behind if closed else ""
    return Parsed(content.strip() if parts else content, tuple(calls))


def parse_json(text: str) -> Parsed:
    """Read calls in the format of Llama: JSON objects with `name` and `parameters` or `arguments`, and nothing else.

    Other texts are content, JSON objects without `name` among them.
    """
    stripped = text.strip()
    if not re.match(r"\[?\s*\{", stripped):
        return Parsed(text)
    try:
        values = list(_json_values(stripped))
    except (ValueError, RecursionError) as error:
        return Parsed("", (_unreadable(str(error)),)) if re.search(r'"name"\s*:', stripped) else Parsed(text)
    calls = [item for value in values for item in (value if isinstance(value, list) else [value])]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        return Parsed(text)
    return Parsed("", tuple(map(_read_call, calls)))


FORMATS: dict[str, Format] = {"hermes": parse_hermes, "json": parse_json}


def detect_format(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the format in which a chat template writes calls; hermes if it writes none or another one."""
    function = {"name": _NAME, "arguments": {"a": _ARGUMENT}}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        text = render(messages, tokenizer, "a tool call", False)
    except BatchError:
        return "hermes"
    start = text.find("{", max(0, text.find(_NAME) - 2 * len(_NAME)))
    if _OPEN in text or start < 0:
        return "hermes"
    try:
        value, _ = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return "hermes"
    return "json" if value.get("name") == _NAME else "hermes"


def _load_format(name: str) -> Format:
    """Return a format: a built-in one, an entry point, package.module:function, or file.py:function."""
    path = function_file(name)
    if path is None:
        return load_function(name, FORMATS, GROUP)
    found: Format = find_in_file(path, name[len(path) + 1 :], "tool parser", FORMAT_KEY)
    if not callable(found):
        raise ConfigError(f"{FORMAT_KEY}={name} has type {type(found).__name__}; a tool parser is a function")
    return found


def _json_values(text: str) -> Iterator[Any]:
    """Yield the JSON values of a text, which spaces, commas or semicolons separate."""
    position, decoder = 0, json.JSONDecoder()
    while position < len(text):
        value, position = decoder.raw_decode(text, position)
        yield value
        separators = _SEPARATORS.match(text, position)
        position = position if separators is None else separators.end()


def _read_json(text: str) -> Call:
    try:
        return _read_call(json.loads(text))
    except (ValueError, RecursionError) as error:
        return _unreadable(f"{error}: {_quote(text.strip())}")


def _read_call(value: Any) -> Call:
    """Return the call that a JSON value describes."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        shown = "a deeply nested value" if exceeds_nesting(value) else _quote(json.dumps(value))
        return _unreadable(f"{shown} is not an object with name and arguments")
    name, arguments = value["name"], value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return Call(name, {}, f"the arguments of {name} are not JSON: {error}")
    call = _within_limit(Call(name, arguments))
    if call.error is None and not isinstance(arguments, Mapping):
        return Call(name, {}, f"the arguments of {name} are not an object: {_quote(json.dumps(arguments))}")
    return call


def _within_limit(call: Call) -> Call:
    """Return a call that cannot be made if its arguments are nested too deeply."""
    if not exceeds_nesting(call.arguments):
        return call
    return Call(call.name, {}, f"the arguments of {call.name} are nested more than {MAX_NESTING} levels deep")


def _unreadable(reason: str) -> Call:
    return Call("", {}, f"the tool call cannot be read: {reason}")


def _quote(text: str) -> str:
    return text if len(text) <= _QUOTED else text[:_QUOTED] + "..."
