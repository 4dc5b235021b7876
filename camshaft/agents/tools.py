"""Tools: methods of an environment, and plain functions, that the policy calls.

    form = form_of(Calculator)                     # names of the tools, and whether `step` answers texts
    schemas = [schema_of(method_of(Calculator, name)) for name in form.tools]

As in TRL's `environment_factory`, every public method besides `reset`, `close` and `get_reward` is a tool. A class
whose only other method is `step` has no tools. `tool_methods` of a class with both says which methods are tools.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from camshaft.errors import RolloutError

RESERVED = ("reset", "close", "get_reward")
"""Public methods that are no tools."""

STEP = "step"

_ERROR_CHARACTERS = 500


class NoEnvironment:
    """The environment of a run that has only functions as tools."""

    tool_methods = ()

    def reset(self) -> None:
        """Say nothing."""


class Form(NamedTuple):
    """The roles of the methods of an environment."""

    tools: tuple[str, ...]
    """Names of the methods that the policy calls."""
    has_step: bool
    """True if `step` replies to answers without calls."""
    is_async: bool
    """True if one of the methods is a coroutine function."""
    is_scored: bool
    """True if the episode has a final score: of `get_reward`, or of the attribute `reward` beside tools."""


def form_of(kind: type, has_functions: bool = False) -> Form:
    """Return the form of a class. With `has_functions`, plain functions are tools beside its methods."""
    public = [name for name in dir(kind) if not name.startswith("_") and _is_method(kind, name)]
    public = [name for name in public if name not in RESERVED]
    subject = f"the environment {kind.__name__}"
    if not _is_method(kind, "reset"):
        raise RolloutError(f"{subject} has no method 'reset'; define reset, and step or methods that are tools")
    chosen: Any = getattr(kind, "tool_methods", None)  # of a user's class
    if chosen is None and STEP in public and len(public) > 1:
        others = [name for name in public if name != STEP]
        raise RolloutError(
            f"{subject} has step and the public methods {', '.join(others)}. Set tool_methods = {others} in the class "
            "to make them tools, or tool_methods = [] if they are none"
        )
    tools = tuple(name for name in public if name != STEP) if chosen is None else tuple(chosen)
    if missing := [name for name in tools if name not in public]:
        raise RolloutError(f"{subject} has no method '{missing[0]}', which tool_methods names; correct the name")
    has_step = STEP in public and STEP not in tools
    if not has_step and not tools and not has_functions:
        raise RolloutError(f"{subject} has no method step, and no public method that is a tool; define one of them")
    used = [name for name in ("reset", "get_reward", *tools, *([STEP] if has_step else [])) if hasattr(kind, name)]
    is_async = any(inspect.iscoroutinefunction(getattr(kind, name)) for name in used)
    is_scored = bool(tools or has_functions) or _is_method(kind, "get_reward")
    return Form(tools, has_step, is_async, is_scored)


def _is_method(kind: type, name: str) -> bool:
    return inspect.isroutine(getattr(kind, name, None))


def schemas_of(kind: type, form: Form, functions: Mapping[str, Callable[..., Any]]) -> tuple[dict[str, Any], ...]:
    """Return the JSON schemas of plain functions, and then those of the methods of a class that are tools."""
    methods = [schema_of(_bound(kind, name), f"the method {kind.__name__}.{name}") for name in form.tools]
    return (*(schema_of(function, f"the function {name}") for name, function in functions.items()), *methods)


def schema_of(function: Callable[..., Any], subject: str) -> dict[str, Any]:
    """Return the JSON schema of a tool: from its name, its type hints, and its docstring in Google's style."""
    from transformers.utils.chat_template_utils import (
        get_json_schema,  # takes a second, and only one process of a run needs it
    )

    try:
        return get_json_schema(function)
    except Exception as error:  # exceptions for docstrings and for type hints, and those of annotations
        raise RolloutError(
            f"{subject} cannot be a tool: {error} Write a type hint for each argument, and a docstring with a "
            "description and a line 'name: description' below 'Args:' for each argument"
        ) from error


def _bound(kind: type, name: str) -> Callable[..., Any]:
    """Return a method without its first parameter, as it is called."""
    method = inspect.getattr_static(kind, name)
    return getattr(kind, name) if isinstance(method, staticmethod | classmethod) else method.__get__(object())


def text_of(result: Any) -> Any:
    """Return the content of a message for the result of a tool. Lists of text parts are kept."""
    is_parts = isinstance(result, list) and bool(result)
    if is_parts and all(isinstance(part, Mapping) and part.get("type") == "text" for part in result):
        return result
    return result if isinstance(result, str) else str(result)


def error_text(error: BaseException | str) -> str:
    """Return what the policy is told about a failed call."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}".removesuffix(": ")
    return f"error: {text}" if len(text) <= _ERROR_CHARACTERS else f"error: {text[:_ERROR_CHARACTERS]}..."
