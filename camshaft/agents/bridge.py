"""The tokens that a chat template writes between two answers, found without a list of models.

    bridge = Bridge(tokenizer)
    prompt = bridge.start(messages)                                  # ends where the first answer begins
    told = bridge.after([{"role": "user", "content": "lower"}], stopped=True)
    # prompt + answer + told is the context of the second answer
    bridge.rewrites()                                                # what the template changes in a history, or None

A conversation is never rendered again, because the tokens of a rendered answer need not be those that were sampled.
Instead, a fixed pair of messages is rendered in front of the new ones. The answer of the pair is a random marker, and
the text behind it is the bridge: the token that ends an answer, the new messages, and the start of the next answer.
"""

import contextlib
import functools
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from camshaft.agents.parsers import AUTO, ToolParser
from camshaft.data.chat import NO_ARGUMENTS, Message, encode, join_parts, render, special_token_ids
from camshaft.errors import BatchError, RolloutError

_LOCATION = "the messages of an environment"
_MAX_HEADS = 64
"""Maximum number of lists of tools for which the text of the fixed pair is kept."""
_QUOTED = 60
"""Maximum number of characters of a quoted text."""


Tools = Sequence[Mapping[str, Any]]


class TemplateRewrites(RolloutError):
    """The chat template does not write an answer, or a message behind it, so that nothing can be appended."""


class Bridge:
    """The chat template of a tokenizer, as tokens that are appended to a conversation."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] = NO_ARGUMENTS, call_format: str = AUTO
    ):
        """Create a bridge.

        Args:
            tokenizer: Tokenizer with a chat template.
            arguments: Further arguments of the chat template, such as `enable_thinking`.
            call_format: Format of tool calls in answers.
        """
        self.tokenizer, self.arguments, self._call_format = tokenizer, arguments, call_format
        self.special_ids = special_token_ids(tokenizer)
        self._marker = f"marker{secrets.token_hex(8)}"
        self._pair: list[Message] = [_user("x"), _assistant(self._marker)]
        _, _, tail = self._render(self._pair, (), add_generation_prompt=False).partition(self._marker)
        ends: list[Any] = [*self._encode(tail)[:1], tokenizer.eos_token_id]
        self._heads: dict[str, tuple[str, str]] = {}
        """Texts before the answer of the fixed pair, by the JSON of the tools."""
        self._end_ids = self.special_ids.intersection(ends)
        """Tokens with which the template ends an answer."""

    @functools.cached_property
    def parser(self) -> ToolParser:
        """Finds the tool calls in answers."""
        return ToolParser(self.tokenizer, self._call_format)

    def start(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Return the tokens of a prompt, which the first answer follows. `tools` are JSON schemas of functions."""
        return self._encode(self._render(_for_template(messages), tools))

    def after(
        self, messages: Sequence[Message], stopped: bool, tools: Tools = (), calls: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the tokens between an answer and the next one, for the messages between them.

        They begin with the token that ends an answer, unless the answer has `stopped` with such a token. Raise
        TemplateRewrites if the template does not write the answer or a message.

        Args:
            messages: Messages of any role, such as the results of tools.
            stopped: True if the last sampled token of the answer is one that ends an answer.
            tools: JSON schemas of the functions that the prompt describes.
            calls: `tool_calls` of the answer, which some templates read to format results.
        """
        ids = self._find(_for_template(messages), tools, calls)
        return ids[1:] if stopped and ids and ids[0] in self.special_ids else ids

    def _find(self, messages: list[Message], tools: Tools, calls: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the bridge behind a fixed pair, with calls in its answer and with tools if the template takes them.

        A template may reject results without calls, or calls. It may also move the tools, which the prompt contains
        already. The first pair that messages do not change is used, else the first that the template formats.
        """
        errors: list[Exception] = []
        changed: list[list[int]] = []
        for given in (tools, ()) if tools else ((),):
            for pair in [self._calling_pair(calls), self._pair] if calls else [self._pair]:
                try:
                    is_same, ids = self._behind(pair, messages, given)
                except (BatchError, TemplateRewrites) as error:
                    errors.append(error)
                    continue
                if is_same:
                    return ids
                changed.append(ids)
        if not changed:
            raise errors[0]
        return changed[0]

    def _calling_pair(self, calls: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Return the fixed pair with calls in the answer. The marker is the argument of the last one."""
        *others, last = calls
        marked = {**last, "function": {**last["function"], "arguments": {"a": self._marker}}}
        return _for_template([_user("x"), {"role": "assistant", "content": "", "tool_calls": [*others, marked]}])

    def _behind(self, pair: list[Message], messages: list[Message], tools: Tools) -> tuple[bool, list[int]]:
        """Return the tokens behind the answer of a fixed pair, and whether the text before it is that of a last answer.

        Behind the marker, the rest of the answer follows, which was sampled, and then the end of the answer.
        """
        text = self._render([*pair, *messages], tools)
        head, marker, tail = text.partition(self._marker)
        is_same, rest = self._is_head(head, tools), ""
        if pair is not self._pair:
            before, _, rest = self._render(pair, tools, add_generation_prompt=False).partition(self._marker)
            is_same, rest = is_same or head == before, self._rest_of_call(rest)
        if not marker or self._marker in tail or not tail.startswith(rest):
            raise TemplateRewrites(
                f"the chat template formats an answer that messages follow as {_quote(text)}; set data.chat_template "
                "to one that writes answers as they are"
            )
        self._check_written(pair, messages, tools, tail)
        return is_same, self._encode(tail[len(rest) :])

    def _is_head(self, head: str, tools: Tools) -> bool:
        """Return True if a text is that before the answer of the fixed pair, as a prompt or as the last message."""
        key = json.dumps(tools)
        if head in self._heads.get(key, ()):
            return True
        before, _, _ = self._render(self._pair, tools, add_generation_prompt=False).partition(self._marker)
        heads = self._render(self._pair[:1], tools), before  # again, because a template may write the date
        if len(self._heads) >= _MAX_HEADS:
            self._heads.clear()
        self._heads[key] = heads
        return head in heads

    def _rest_of_call(self, rest: str) -> str:
        """Return the text of a call behind its last argument, without the end of the answer."""
        ids = self._encode(rest)
        ends = [number for number, token in enumerate(ids) if token in self._end_ids]
        ends += [number for number, token in enumerate(ids) if token in self.special_ids][-1:]
        if not ends:
            raise TemplateRewrites("the chat template writes no token that ends an answer behind a tool call")
        return rest.removesuffix(str(self.tokenizer.decode(ids[ends[0] :], clean_up_tokenization_spaces=False)))

    def _check_written(self, pair: list[Message], messages: list[Message], tools: Tools, tail: str) -> None:
        """Raise TemplateRewrites if the template leaves a message out."""
        for number, message in enumerate(messages):
            content = message["content"]
            if not isinstance(content, str) or not content.strip() or content.strip() in tail:
                continue
            probe = [*messages[:number], {**message, "content": self._marker}, *messages[number + 1 :]]
            if self._render([*pair, *probe], tools).count(self._marker) < 2:  # it may also escape the text
                raise TemplateRewrites(
                    f"the chat template does not write messages with the role '{message['role']}' behind an answer; "
                    "set data.chat_template to one that does"
                )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of an answer, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def ends_answer(self, token: int) -> bool:
        """Return True if a token is one that ends an answer, such as the end-of-sequence token."""
        return token in self.special_ids

    def rewrites(self) -> str | None:
        """Return what the template changes in a history of answers as they are sampled; None if it changes nothing.

        Answers with thinking and with tool calls are tried too. Those that the template rejects are left out.
        """
        for probe in _probes(self._marker):
            try:
                expected = self._expected(probe)
                arguments = {**self.arguments, **probe.arguments}
                actual = render(probe.conversation, self.tokenizer, _LOCATION, True, arguments)
            except BatchError:
                continue
            if self._marker not in expected:  # the template leaves tool calls out
                continue
            if not actual.startswith(expected):
                start = next((i for i, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), len(actual))
                return (
                    f"{_quote(expected[start:].replace(self._marker, 'y'))} becomes "
                    f"{_quote(actual[start:].replace(self._marker, 'y'))} in the history of {probe.subject}"
                )
        return None

    def _expected(self, probe: "_Probe") -> str:
        """Return the text of the conversation up to the end of the answer, as it is sampled."""
        arguments = {**self.arguments, **probe.arguments}
        answer = probe.answer
        if "tool_calls" not in answer:
            return render(probe.history, self.tokenizer, _LOCATION, True, arguments) + answer["content"]
        text = render([*probe.history, answer], self.tokenizer, _LOCATION, False, arguments)
        return "".join(text.rpartition(self._marker)[:2])

    def _render(self, messages: list[Message], tools: Tools, add_generation_prompt: bool = True) -> str:
        arguments = {**self.arguments, "tools": list(tools)} if tools else self.arguments
        return render(messages, self.tokenizer, _LOCATION, add_generation_prompt, arguments)

    def _encode(self, text: str) -> list[int]:
        return encode([text], self.tokenizer, special_tokens=False)[0] if text else []


class _Probe(NamedTuple):
    """A conversation of which a template may rewrite the answer once messages follow."""

    subject: str
    history: list[Message]
    answer: Message
    told: tuple[Message, ...]
    arguments: Mapping[str, Any] = NO_ARGUMENTS

    @property
    def conversation(self) -> list[Message]:
        return [*self.history, self.answer, *self.told]


def _probes(marker: str) -> Iterator[_Probe]:
    question, system = [_user("x")], [{"role": "system", "content": "s"}, _user("x")]
    tool: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}},
        },
    }
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": marker}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": "f", "tool_call_id": "abcdefghi", "content": "z"}
    thinking, asked = "<think>\nz\n</think>\n\n", (_user("w"),)
    thought = _assistant(f"{thinking}{marker}")
    yield _Probe("answers", question, _assistant(marker), asked)
    yield _Probe("answers after a system message", system, _assistant(marker), asked)
    yield _Probe("answers with thinking", question, thought, asked)
    if_opened = _assistant(f"z\n</think>\n\n{marker}")  # of templates that open the thinking in the prompt
    yield _Probe("answers with thinking", question, if_opened, asked)
    yield _Probe("answers with tools", question, _assistant(marker), asked, {"tools": [tool]})
    yield _Probe("tool calls", question, called, (result,), {"tools": [tool]})
    for told in ((result,), (result, *asked)):
        yield _Probe("tool calls with thinking", question, {**called, "content": thinking}, told, {"tools": [tool]})


def _for_template(messages: Sequence[Message]) -> list[Message]:
    """Return messages in OpenAI's format as templates read them: with texts, and with arguments that are mappings."""
    return [
        {**message, "content": join_parts(message.get("content"))}
        | ({"tool_calls": [_parsed(call) for call in message["tool_calls"]]} if message.get("tool_calls") else {})
        for message in messages
    ]


def _parsed(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # it remains a text
            arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _quote(text: str) -> str:
    return repr(text if len(text) <= _QUOTED else text[:_QUOTED] + "...")
