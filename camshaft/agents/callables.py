"""Pickle environments that were passed from Python, so that the processes of a run can create them.

pickle_environments(HigherLower)                    # or a list, or a mapping of names to classes
environment_names(HigherLower)                      # ["HigherLower"]
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


def _pickle(name: str, factory: Any) -> Source:
    try:
        data = dumps(factory)
    except PICKLE_ERRORS as error:
        raise RolloutError(
            f"the environment '{name}' cannot be sent to its processes: {error}. Create such objects in reset, or pass "
            "the path of a Python file as the environment"
        ) from error
    return Source(name, name, data, checksum_of(factory))
