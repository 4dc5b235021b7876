"""Pickle environments, tools or a program that were passed from Python, so that the processes of a run can create them.

pickle_environments(HigherLower)                    # or a list, or a mapping of names to classes
environment_names(HigherLower)                      # ["HigherLower"]
pickle_agent(solve)                                 # a function
"""

from collections.abc import Mapping, Sequence
from typing import Any

from camshaft.agents.messages import Source
from camshaft.errors import RolloutError
from camshaft.rewards.callables import PICKLE_ERRORS, checksum_of, dumps, name_of


def pickle_environments(environment: Any) -> tuple[Source, ...]:
    """Pickle a class or function that returns an environment, or several of them.

    Raise RolloutError for other objects, and if one captures an object that cannot be pickled.
    """
    return tuple(_pickle(name, factory) for name, factory in _named(environment).items())


def pickle_agent(agent: Any) -> tuple[Source]:
    """Pickle a function that plays episodes. Raise RolloutError as `pickle_environments` does."""
    return (_pickle(agent_name(agent), agent, "program"),)


def agent_name(agent: Any) -> str:
    """Return the name of a program. Raise RolloutError for other objects."""
    if not callable(agent):
        raise RolloutError(f"agent={agent!r}; pass a function solve(base_url, api_key, **row), its path, or a command")
    return name_of(agent, "agent")


def pickle_tools(tools: Any) -> tuple[Source, ...]:
    """Pickle functions that are tools. Raise RolloutError for other objects."""
    return tuple(_pickle(name, function, "tool") for name, function in named_tools(tools).items())


def named_tools(tools: Any) -> dict[str, Any]:
    """Return functions that are tools by their names. Raise RolloutError for other objects."""
    functions: Sequence[Any] = tools if isinstance(tools, list | tuple) else [tools]
    for function in functions:
        if not callable(function):
            raise RolloutError(f"tools contains {function!r}; pass functions, or the path file.py:function")
    return {name_of(function, "tool"): function for function in functions}


def environment_names(environment: Any) -> list[str]:
    """Return the names of environments. Raise RolloutError for other objects."""
    return list(_named(environment))


def _named(environment: Any) -> dict[str, Any]:
    if isinstance(environment, Mapping):
        named = {str(name): factory for name, factory in environment.items()}
    else:
        factories: Sequence[Any] = environment if isinstance(environment, list | tuple) else [environment]
        named = {name_of(factory, "environment"): factory for factory in factories}
    for factory in named.values():
        if not callable(factory):
            raise RolloutError(
                f"environment contains {factory!r}; pass a class with the methods reset and step, or its path"
            )
    return named


def _pickle(name: str, factory: Any, noun: str = "environment") -> Source:
    try:
        data = dumps(factory)
    except PICKLE_ERRORS as error:
        raise RolloutError(
            f"the {noun} '{name}' cannot be sent to its processes: {error}. Create such objects in its calls, or pass "
            f"the path of a Python file as the {noun}"
        ) from error
    return Source(name, name, data, checksum_of(factory), noun == "tool")
