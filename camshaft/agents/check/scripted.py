"""Episodes with scripted answers, in the processes of environments.

episodes = play_episodes(pool, {0: Start({})}, scripted_policy(pool.spec, starts), limit=50)
episodes[0].answers, episodes[0].turns
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from camshaft.agents.calls import Call, PolicyAnswer
from camshaft.agents.environment import Fault, Start, Turn
from camshaft.agents.messages import Spec
from camshaft.agents.pool import EnvironmentPool

BROKEN = Call("", {}, "the tool call cannot be read: it is not JSON")
"""The malformed call of scripted episodes."""

_WORDS = ("yes", "no", "a", "stop", "42", "-1", "1.5", "go left", "open 3", "{}", "\u00e4 \u2713", "")

Policy = Callable[[int, Sequence[Turn | Fault]], str | PolicyAnswer | None]
"""(number of the episode, turns so far) -> the next answer, or None to stop."""


@dataclass
class Played:
    """An episode that was played."""

    start: Start
    answers: list[str | PolicyAnswer] = field(default_factory=list)
    turns: list[Turn | Fault] = field(default_factory=list)
    """Results of `reset`, of the answers, and of reading the score if there is one."""

    @property
    def fault(self) -> Fault | None:
        return self.turns[-1] if isinstance(self.turns[-1], Fault) else None

    @property
    def replies(self) -> list[Turn]:
        """The turns without failures."""
        return [turn for turn in self.turns if isinstance(turn, Turn)]

    def position(self, index: int) -> str:
        """Return the name of a turn."""
        if index == 0:
            return "reset"
        return f"answer {index}" if index <= len(self.answers) else "the score"


def play_episodes(pool: EnvironmentPool, starts: Mapping[int, Start], policy: Policy, limit: int) -> dict[int, Played]:
    """Play episodes with up to `limit` answers each. They are not ended in the pool."""
    turns = pool.reset(starts)
    episodes = {number: Played(start, turns=[turns[number]]) for number, start in starts.items()}
    while True:
        answers: dict[int, str | PolicyAnswer] = {}
        for number, played in episodes.items():
            turn = played.turns[-1]
            if isinstance(turn, Turn) and not turn.done and len(played.answers) < limit:
                answer = policy(number, played.turns)
                if answer is not None:
                    answers[number] = answer
        if not answers:
            break
        for number, turn in pool.step(answers).items():
            episodes[number].answers.append(answers[number])
            episodes[number].turns.append(turn)
    played = [number for number, each in episodes.items() if each.answers and each.fault is None]
    scored = [number for number in played if starts[number].name in pool.spec.scored]
    for number, turn in pool.score(scored).items() if scored else ():
        episodes[number].turns.append(turn)
    return episodes


def scripted_policy(spec: Spec, starts: Mapping[int, Start]) -> Policy:
    """Return a policy with random short texts, and with random calls of the tools and one that cannot be read."""
    generators = {number: random.Random(number) for number in starts}

    def answer(number: int, turns: Sequence[Turn | Fault]) -> str | PolicyAnswer:
        rng, turn = generators[number], turns[-1]
        schemas = spec.schemas.get(starts[number].name, ())
        said = turn.said if isinstance(turn, Turn) and isinstance(turn.said, str) else ""
        text = rng.choice([*_WORDS, str(rng.randrange(10)), *said.split()[-1:]])
        if not schemas:
            return text
        count = len(turns) - 1
        if count and rng.random() < 0.4:
            return PolicyAnswer(text, (), count)
        function = rng.choice(schemas)["function"]
        call = Call(function["name"], random_value(function.get("parameters", {}), rng))
        return PolicyAnswer("", (call, BROKEN) if count == 0 else (call,), count)

    return answer


def random_value(schema: Mapping[str, Any], rng: random.Random) -> Any:
    """Return a random value that fits a JSON schema."""
    if schema.get("enum"):
        return rng.choice(schema["enum"])
    for options in (schema.get("anyOf"), schema.get("oneOf")):
        if options:
            return random_value(rng.choice(options), rng)
    kind = schema.get("type", "string")
    kind = rng.choice(kind) if isinstance(kind, list) else kind
    if kind == "object":
        required = schema.get("required", ())
        properties: Mapping[str, Any] = schema.get("properties", {})
        return {
            name: random_value(each, rng) for name, each in properties.items() if name in required or rng.random() < 0.5
        }
    if kind == "array":
        return [random_value(schema.get("items", {}), rng) for _ in range(rng.randrange(3))]
    values = {"integer": rng.randrange(10), "number": round(rng.uniform(-3, 9), 2), "boolean": rng.random() < 0.5}
    return None if kind == "null" else values.get(kind, rng.choice(_WORDS))
