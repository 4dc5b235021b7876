"""The forms in which a program sends a conversation: messages, a text, or token ids.

    form = ChatForm(bridge, tools)
    form.start(messages)                                # the tokens of a prompt
    form.after(messages, number, stopped=True)          # those behind an answer, which is message number - 1

A history is a list of messages, a text, or a list of token ids, so that a part of it is a slice.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from camshaft.agents.bridge import Bridge
from camshaft.agents.environment import Message
from camshaft.agents.parsers import ToolParser
from camshaft.data.chat import encode


class Sampled(NamedTuple):
    """An answer, and what is needed to read it."""

    ids: list[int]
    prefix: list[int]
    """Tokens before the answer."""
    stop: tuple[str, ...]
    """Strings of which one may have ended the answer."""
    number: int
    """Number of answers before this one."""


class Form(Protocol):
    """A form of histories."""

    def start(self, history: Any) -> list[int]:
        """Return the tokens of a prompt."""
        ...

    def after(self, history: Any, known: int, stopped: bool) -> list[int]:
        """Return the tokens of `history[known:]`, which follow an answer that `stopped` with a token that ends one."""
        ...

    def answered(self, history: Any, message: Message, ids: list[int]) -> Any:
        """Return a history with an answer."""
        ...

    def messages(self, history: Any) -> list[Message]:
        """Return a history, or a part of one, as messages."""
        ...

    def read(self, answer: Sampled) -> Message:
        """Return the message of an answer."""
        ...


@dataclass(frozen=True)
class ChatForm:
    """Messages, which the chat template formats, and the tools that the model may call."""

    bridge: Bridge
    tools: list[dict[str, Any]] = field(default_factory=list)
    parser: ToolParser | None = field(default=None, compare=False)
    """Finds the calls of tools in answers. Without one, they remain texts."""

    def start(self, history: list[Message]) -> list[int]:
        return self.bridge.start(history, self.tools)

    def after(self, history: list[Message], known: int, stopped: bool) -> list[int]:
        return self.bridge.after(history[known:], stopped, self.tools, history[known - 1].get("tool_calls", ()))

    def answered(self, history: list[Message], message: Message, ids: list[int]) -> list[Message]:
        return [*history, message]

    def messages(self, history: list[Message]) -> list[Message]:
        return history

    def read(self, answer: Sampled) -> Message:
        """Return the message of an answer. An answer with a call that cannot be read is a text."""
        message = _text_message(self.bridge, answer)
        if self.parser is None:
            return message
        parsed = self.parser.parse(answer.ids, answer.prefix, self.tools)
        if parsed.errors or not parsed.calls:
            return message
        calls = [call.message(answer.number, index) for index, call in enumerate(parsed.calls)]
        return {"role": "assistant", "content": parsed.content, "tool_calls": calls}


@dataclass(frozen=True)
class TextForm:
    """A text, which the model continues."""

    bridge: Bridge

    def start(self, history: str) -> list[int]:
        return encode([history], self.bridge.tokenizer, special_tokens=True)[0]

    def after(self, history: str, known: int, stopped: bool) -> list[int]:
        return encode([history[known:]], self.bridge.tokenizer, special_tokens=False)[0] if history[known:] else []

    def answered(self, history: str, message: Message, ids: list[int]) -> str:
        return history + message["content"]

    def messages(self, history: str) -> list[Message]:
        return [{"role": "user", "content": history}]

    def read(self, answer: Sampled) -> Message:
        return _text_message(self.bridge, answer)


@dataclass(frozen=True)
class IdsForm:
    """Token ids, which the model continues."""

    bridge: Bridge

    def start(self, history: list[int]) -> list[int]:
        return history

    def after(self, history: list[int], known: int, stopped: bool) -> list[int]:
        return history[known:]

    def answered(self, history: list[int], message: Message, ids: list[int]) -> list[int]:
        return [*history, *ids]

    def messages(self, history: list[int]) -> list[Message]:
        return [{"role": "user", "content": self.bridge.decode(history)}]

    def read(self, answer: Sampled) -> Message:
        return _text_message(self.bridge, answer)


def _text_message(bridge: Bridge, answer: Sampled) -> Message:
    """Return an answer without the string that has ended it, which remains in the row."""
    text = bridge.decode(answer.ids)
    ends = [index for string in answer.stop if (index := text.find(string)) >= 0]
    return {"role": "assistant", "content": text[: min(ends)] if ends else text}
