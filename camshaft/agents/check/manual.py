"""Episodes that a person plays in the terminal: `camshaft check-environment --play`."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from camshaft.agents.calls import Call, PolicyAnswer
from camshaft.agents.check.findings import describe_fault
from camshaft.agents.environment import Fault, Start, Turn
from camshaft.agents.pool import EnvironmentPool

_CALL = re.compile(r"(\w+)\s*(\{.*)?")


def play_by_hand(pool: EnvironmentPool, start: Start, ask: Callable[[str], str], say: Callable[[str], None]) -> bool:
    """Play an episode with answers of a person. Return False if the environment fails.

    `ask` returns the next answer. Its EOFError or KeyboardInterrupt ends the episode.
    """
    tools = pool.spec.schemas.get(start.name, ())
    for tool in tools:
        names = ", ".join(tool["function"].get("parameters", {}).get("properties", {}))
        say(f"tool {tool['function']['name']}({names}): {tool['function'].get('description', '')}")
    if tools:
        say('To call a tool, write its name and its arguments as JSON: name {"argument": 1}')
    turn, number, total = pool.reset({0: start})[0], 0, 0.0
    _show(turn, say)
    while isinstance(turn, Turn) and not turn.done:
        try:
            text = ask(f"answer {number + 1}> ")
        except (EOFError, KeyboardInterrupt):
            say(f"\nstopped after {number} answers, score {total:g}")
            return True
        turn = pool.step({0: _read(text, number, tools) if tools else text})[0]
        number += 1
        _show(turn, say)
        total += turn.reward if isinstance(turn, Turn) else 0.0
    if isinstance(turn, Turn) and start.name in pool.spec.scored:
        turn = pool.score([0])[0]
        _show(turn, say)
        total += turn.reward if isinstance(turn, Turn) else 0.0
    if isinstance(turn, Turn):
        say(f"done after {number} answers, score {total:g}")
    return isinstance(turn, Turn)


def _show(turn: Turn | Fault, say: Callable[[str], None]) -> None:
    if isinstance(turn, Fault):
        say(f"failed: {describe_fault(turn)}\n{turn.trace}".rstrip())
        return
    for message in turn.messages:
        say(f"{message['role']}: {message['content']}")
    if turn.reward:
        say(f"reward: {turn.reward:g}")


def _read(text: str, number: int, tools: Sequence[Mapping[str, Any]]) -> PolicyAnswer:
    """Return an answer: a call, if it is the name of a tool, alone or with arguments in braces."""
    match = _CALL.fullmatch(text.strip())
    if match is None or match[1] not in [tool["function"]["name"] for tool in tools]:
        return PolicyAnswer(text, (), number)
    try:
        return PolicyAnswer("", (Call(match[1], json.loads(match[2] or "{}")),), number)
    except ValueError as error:
        return PolicyAnswer("", (Call(match[1], {}, f"the arguments of {match[1]} are not JSON: {error}"),), number)
