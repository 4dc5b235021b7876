"""Section `multi_turn` of the rollout: environments that answer the policy."""

import os.path
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, PositiveFloat

from camshaft.config.errors import Problem
from camshaft.config.schema.fields import Count, Environments, Functions, Section, Text, Unread, key

AUTO = "auto"

KEY = "multi_turn.environment"
"""Key of the environment in the section of a rollout."""
AGENT_KEY = "multi_turn.agent"
"""Key of the program in the section of a rollout."""

TOOLS_KEY = "multi_turn.tools"
"""Key of the tools in the section of a rollout."""
FORMAT_KEY = "multi_turn.format"
"""Key of the format of tool calls in the section of a rollout."""

PLAYED = Unread(
    lambda section: not section.plays(), "{environment}", "set [environment]=file.py:Class, or omit the key"
)
WITH_CLASS = Unread(
    lambda section: not section.environment, "{environment}", "set [environment]=file.py:Class, or omit the key"
)
WITH_ENVIRONMENT = Unread(
    lambda section: not (section.environment or section.tools),
    "{environment}",
    "set [environment]=file.py:Class, or omit the key",
)
WITH_AGENT = Unread(lambda section: section.agent is None, "{agent}", "set [agent]=file.py:function, or omit the key")


class NamedEnvironment(NamedTuple):
    """A configured environment."""

    name: str
    """Name by which the column `environment` selects it: that of its class, file or entry point."""
    target: str


class MultiTurnConfig(Section):
    """Episodes of several turns with an environment, which is a class with the methods reset and step, or with a
    program that sends requests for answers. See agents.md.

    Without both, a response is one generation.
    """

    environment: Environments = key(
        None,
        "Environment that answers the policy: file.py:Class, package.module:Class, or an entry point of "
        "camshaft.environments. Of several in a list, the column environment of the data selects one by the name of "
        "its class. null generates single responses.",
        short=("environment", "file.py:Class of an environment"),
    )
    tools: Functions = key(
        [],
        "Functions that the policy may call: file.py:f,g, package.module:f, or a list of them. The public methods of "
        "an environment are tools beside them. The column tools of the data chooses by name.",
        short=("tools", "file.py:f,g of functions that the policy calls"),
    )
    format: str = key(
        AUTO,
        "Format of tool calls in answers: hermes, json, file.py:function, or an entry point of camshaft.tool_parsers. "
        "auto uses the response_template of the tokenizer, or the format that the chat template writes.",
        unread=PLAYED,
    )
    environment_kwargs: dict[str, Any] = key(
        {}, "Keyword arguments of the constructor of the environment.", unread=WITH_CLASS
    )
    agent: Annotated[Text, AfterValidator(os.path.expanduser)] | None = key(
        None,
        "Program that owns the conversation and sends requests to a base URL, instead of an environment: "
        "file.py:function, package.module:function, or a command line, in which {base_url} and {api_key} are replaced.",
        short=("agent", "file.py:function or command line of a program"),
    )
    allow_sampling: bool = key(
        False,
        "Let the requests of a program set sampling options, such as temperature. Otherwise, a request with other "
        "options than those of the run is an error.",
        unread=WITH_AGENT,
    )
    max_concurrency: Count = key(64, "Number of programs that run at the same time on each rank.", unread=WITH_AGENT)
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
        None,
        "Length in tokens from which a text of the environment is truncated. null truncates none.",
        unread=WITH_ENVIRONMENT,
    )
    tool_response_truncate_side: Literal["left", "middle", "right"] = key(
        "middle",
        "Part of a truncated text that is kept: its beginning (left), its end (right) or both (middle).",
        unread=(
            WITH_ENVIRONMENT,
            Unread(lambda section: section.max_tool_response_length is None, "{max_tool_response_length}"),
        ),
    )
    history: Literal["append", "template"] = key(
        "append",
        "Context of an answer: append uses the tokens that were sampled before, as TRL and verl do. template, the "
        "history as the chat template rewrites it, is not implemented.",
        unread=PLAYED,
    )
    schedule: Literal["waves", "stream"] = key(
        "waves",
        "Order of answers. waves: the policy answers when all environments have, which repeats a run bit by bit. "
        "stream: an episode whose environment has answered joins the batch that is being generated, so that slow "
        "environments hold up only their own episodes; a repeated run is then equal up to rounding.",
        unread=WITH_ENVIRONMENT,
    )
    num_workers: Count = key(4, "Number of processes on each rank that run environments.", unread=WITH_ENVIRONMENT)
    timeout: PositiveFloat = key(
        30.0,
        "Time limit, in seconds, of a call of step, or of a program between an answer and its next request.",
        unread=PLAYED,
    )
    start_timeout: PositiveFloat = key(
        120.0,
        "Time limit, in seconds, of loading an environment, and of its construction and reset; or of loading a "
        "program, and up to its first request.",
        unread=PLAYED,
    )
    episode_timeout: PositiveFloat | None = key(
        None,
        "Time limit, in seconds, of all calls of the environment in an episode together, or of a program, without the "
        "time of the policy. null does not limit them.",
        unread=PLAYED,
    )

    def plays(self) -> bool:
        """Return True if the policy plays episodes, with an environment, tools or a program."""
        return bool(self.environment or self.tools) or self.agent is not None

    def player_key(self) -> str:
        """Return the key that is set among those of environments, tools and programs."""
        return KEY if self.environment else TOOLS_KEY if self.tools else AGENT_KEY

    def problems(self) -> Iterator[Problem]:
        if self.environment and self.agent is not None:
            message = "is set, but so is [environment], which answers the policy itself. Remove one of them."
            yield Problem("agent", self.agent, message, ("environment",))
        if self.tools and self.agent is not None:
            yield Problem("agent", self.agent, "is set, but so is [tools], which a program brings itself.", ("tools",))

    def selected_tools(self) -> tuple[NamedEnvironment, ...]:
        """Return the functions to load."""
        parts = [target.rpartition(":") for target in self.tools]
        names = [(path, name) for path, _, names in parts for name in names.split(",")]
        return tuple(NamedEnvironment(name.strip(), f"{path}:{name.strip()}") for path, name in names)

    def selected(self) -> tuple[NamedEnvironment, ...]:
        """Return the environments to load."""
        return tuple(NamedEnvironment(_name(target), target) for target in self.environment)


def _name(target: str) -> str:
    name = target.rpartition(":")[2] if ":" in target else target.rpartition("/")[2].removesuffix(".py")
    return name.rpartition(".")[2]
