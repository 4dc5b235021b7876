"""Section `multi_turn` of the rollout: environments that answer the policy."""

from typing import Any, Literal, NamedTuple

from pydantic import PositiveFloat

from camshaft.config.schema.fields import Count, Environments, Section, Unread, key

KEY = "multi_turn.environment"
"""Key of the environment in the section of a rollout."""

PLAYED = Unread(
    lambda section: not section.environment, "{environment}", "set [environment]=file.py:Class, or omit the key"
)


class NamedEnvironment(NamedTuple):
    """A configured environment."""

    name: str
    """Name by which the column `environment` selects it: that of its class, file or entry point."""
    target: str


class MultiTurnConfig(Section):
    """Episodes of several turns with an environment, which is a class with the methods reset and step. See agents.md.

    Without an environment, a response is one generation.
    """

    environment: Environments = key(
        None,
        "Environment that answers the policy: file.py:Class, package.module:Class, or an entry point of "
        "camshaft.environments. Of several in a list, the column environment of the data selects one by the name of "
        "its class. null generates single responses.",
        short=("environment", "file.py:Class of an environment"),
    )
    environment_kwargs: dict[str, Any] = key(
        {}, "Keyword arguments of the constructor of the environment.", unread=PLAYED
    )
    max_assistant_turns: Count | None = key(
        None,
        "Maximum number of answers in an episode. null does not limit them.",
        short=("max_turns", "answers in an episode"),
        unread=PLAYED,
    )
    max_turn_length: Count | None = key(
        None,
        "Maximum length of an answer in tokens. null limits it only by the length of the episode "
        "(data.max_response_length).",
        unread=PLAYED,
    )
    max_tool_response_length: Count | None = key(
        None, "Length in tokens from which a text of the environment is truncated. null truncates none.", unread=PLAYED
    )
    tool_response_truncate_side: Literal["left", "middle", "right"] = key(
        "middle",
        "Part of a truncated text that is kept: its beginning (left), its end (right) or both (middle).",
        unread=Unread(lambda section: section.max_tool_response_length is None, "{max_tool_response_length}"),
    )
    history: Literal["append", "template"] = key(
        "append",
        "Context of an answer: append uses the tokens that were sampled before, as TRL and verl do. template, the "
        "history as the chat template rewrites it, is not implemented.",
        unread=PLAYED,
    )
    num_workers: Count = key(4, "Number of processes on each rank that run environments.", unread=PLAYED)
    timeout: PositiveFloat = key(30.0, "Time limit, in seconds, of a call of step.", unread=PLAYED)
    start_timeout: PositiveFloat = key(
        120.0, "Time limit, in seconds, of loading an environment, and of its construction and reset.", unread=PLAYED
    )
    episode_timeout: PositiveFloat | None = key(
        None,
        "Time limit, in seconds, of all calls of the environment in an episode together, without the time of the "
        "policy. null does not limit them.",
        unread=PLAYED,
    )

    def selected(self) -> tuple[NamedEnvironment, ...]:
        """Return the environments to load."""
        return tuple(NamedEnvironment(_name(target), target) for target in self.environment)


def _name(target: str) -> str:
    name = target.rpartition(":")[2] if ":" in target else target.rpartition("/")[2].removesuffix(".py")
    return name.rpartition(".")[2]
