"""Calls of tools, as values that processes exchange. Only the standard library is used."""

from collections.abc import Mapping
from typing import Any, NamedTuple

Message = dict[str, Any]

MAX_NESTING = 100
"""Maximum number of levels of lists and objects in the arguments of a call. JSON can be read at depths at which it
cannot be pickled."""


class Call(NamedTuple):
    """A call of a tool in an answer."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None
    """Reason why the call cannot be read, which the policy is told; None for a call that can be made."""

    def message(self, turn: int, number: int) -> Message:
        """Return the call as in `tool_calls` of a message. Its id is that of call `number` of an answer."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": call_id(turn, number), "type": "function", "function": function}


class Parsed(NamedTuple):
    """The parts of an answer."""

    content: str
    """Text outside of the calls."""
    calls: tuple[Call, ...] = ()
    """Calls in the order of the text, with those that cannot be read."""
    reasoning: str = ""
    """Thinking, if the format separates it from the content."""

    @property
    def errors(self) -> tuple[str, ...]:
        return tuple(call.error for call in self.calls if call.error is not None)


class PolicyAnswer(NamedTuple):
    """An answer of a policy that has tools."""

    text: str
    """Text outside of the calls."""
    calls: tuple[Call, ...] = ()
    turn: int = 0
    """Number of answers before it."""


def exceeds_nesting(value: Any, limit: int = MAX_NESTING) -> bool:
    """Return True if the lists and objects of a JSON value are nested more than `limit` levels deep."""
    level: list[Any] = [value]
    for _ in range(limit + 1):
        level = [part for part in level if isinstance(part, Mapping | list)]
        if not level:
            return False
        level = [item for part in level for item in (part.values() if isinstance(part, Mapping) else part)]
    return True


def call_id(turn: int, number: int) -> str:
    """Return the id of a call: nine characters, as Mistral's templates require."""
    return f"call{turn % 1000:03d}{number % 100:02d}"
