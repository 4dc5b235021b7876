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

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from camshaft.data.chat import NO_ARGUMENTS, Message, encode, render, special_token_ids
from camshaft.errors import BatchError, RolloutError

_LOCATION = "the messages of an environment"
_QUOTED = 60
"""Maximum number of characters of a quoted text."""


class TemplateRewrites(RolloutError):
    """The chat template changes what it has written before an answer when messages follow."""


class Bridge:
    """The chat template of a tokenizer, as tokens that are appended to a conversation."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] = NO_ARGUMENTS):
        """`arguments` are further arguments of the chat template, such as `enable_thinking`."""
        self.tokenizer, self.arguments = tokenizer, arguments
        self.special_ids = special_token_ids(tokenizer)
        self._marker = f"marker{secrets.token_hex(8)}"
        self._pair: list[Message] = [_user("x"), _assistant(self._marker)]
        self._head, _, _ = self._render(self._pair, add_generation_prompt=False).partition(self._marker)

    def start(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a prompt, which the first answer follows."""
        return self._encode(self._render(list(messages)))

    def after(self, messages: Sequence[Message], stopped: bool) -> list[int]:
        """Return the tokens between an answer and the next one, for the messages between them.

        They begin with the token that ends an answer, unless the answer has `stopped` with such a token. Raise
        TemplateRewrites if the template writes something else before the answer because messages follow.
        """
        head, marker, tail = self._render([*self._pair, *messages]).partition(self._marker)
        if not marker or head != self._head or self._marker in tail:
            raise TemplateRewrites(
                f"the chat template writes {_quote(head)} before an answer that messages follow, but "
                f"{_quote(self._head)} before a last one; set data.chat_template to one that only appends"
            )
        ids = self._encode(tail)
        return ids[1:] if stopped and ids and ids[0] in self.special_ids else ids

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

    def _render(self, messages: list[Message], add_generation_prompt: bool = True) -> str:
        return render(messages, self.tokenizer, _LOCATION, add_generation_prompt, self.arguments)

    def _encode(self, text: str) -> list[int]:
        return encode([text], self.tokenizer, special_tokens=False)[0] if text else []


class _Probe(NamedTuple):
    """A conversation of which a template may rewrite the answer once messages follow."""

    subject: str
    history: list[Message]
    answer: Message
    told: Message
    arguments: Mapping[str, Any] = NO_ARGUMENTS

    @property
    def conversation(self) -> list[Message]:
        return [*self.history, self.answer, self.told]


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
    thought = _assistant(f"<think>\nz\n</think>\n\n{marker}")
    yield _Probe("answers", question, _assistant(marker), _user("w"))
    yield _Probe("answers after a system message", system, _assistant(marker), _user("w"))
    yield _Probe("answers with thinking", question, thought, _user("w"))
    if_opened = _assistant(f"z\n</think>\n\n{marker}")  # of templates that open the thinking in the prompt
    yield _Probe("answers with thinking", question, if_opened, _user("w"))
    yield _Probe("answers with tools", question, _assistant(marker), _user("w"), {"tools": [tool]})
    yield _Probe("tool calls", question, called, result, {"tools": [tool]})


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _quote(text: str) -> str:
    return repr(text if len(text) <= _QUOTED else text[:_QUOTED] + "...")
