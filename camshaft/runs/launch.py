"""The config values, reward functions, environments and hooks with which a run was started."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from camshaft.errors import ConfigError
from camshaft.tracking.base import Command

PYTHON = "python:"
"""Prefix of the name of a reward function, an environment or a program that was passed from Python."""


@dataclass(frozen=True)
class Launch:
    """The values and Python objects with which a run was started."""

    command: Command
    values: Mapping[str, Any]
    """Config keys and their values."""
    reward: Callable[..., Any] | Sequence[Any] | None = None
    """Python functions that score the responses. None if the config names the function."""
    on_step: tuple[Callable[..., Any], ...] = ()
    environment: Any = None
    """Python classes of environments. None if the config names them."""
    agent: Any = None
    """Python function that plays episodes. None if the config names it."""
    tools: Any = None
    """Python functions that the policy calls. None if the config names them."""


def as_hooks(on_step: Any) -> tuple[Callable[..., Any], ...]:
    """Return a hook, a sequence of hooks, or None as a tuple."""
    if on_step is None:
        return ()
    hooks = (on_step,) if callable(on_step) or not isinstance(on_step, Iterable) else tuple(on_step)
    if not all(map(callable, hooks)):
        raise ConfigError(f"on_step={on_step!r}; pass a function or a list of functions hook(step, batch, metrics)")
    return hooks
