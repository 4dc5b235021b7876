"""Checks of the selection of scoring functions."""

import re
from collections.abc import Iterator

from camshaft.config.errors import Problem, check_name
from camshaft.config.schema.reward import DEFAULT_FUNCTION, CustomRewardConfig
from camshaft.plugins import REWARDS

CUSTOM = "custom_reward_function"


def check_scoring_function(custom: CustomRewardConfig) -> Iterator[Problem]:
    """Check the selection of the scoring functions. A function in a file is checked when it is imported."""
    problems = list(_check_function_list(custom))
    yield from problems
    for function in () if problems else custom.selected():
        if function.path is not None:
            continue
        if function.name == "format" and "pattern" in function.kwargs:
            pattern = function.kwargs["pattern"]
            try:
                re.compile(str(pattern))
            except re.error as error:
                message = (
                    f"invalid regular expression: {error}. Put the pattern in single quotes if the shell changes it."
                )
                yield Problem(f"{CUSTOM}.reward_kwargs", {"pattern": pattern}, message)
        key, related = (f"{CUSTOM}.functions", ()) if custom.functions else (f"{CUSTOM}.name", (f"{CUSTOM}.path",))
        yield from check_name(key, function.name, REWARDS, "rewards", "module:function", related)


def _check_function_list(custom: CustomRewardConfig) -> Iterator[Problem]:
    """Check the keys that refer to several functions."""
    functions, weights = custom.functions, custom.weights
    key, weights_key = f"{CUSTOM}.functions", f"{CUSTOM}.weights"
    if not functions:
        if weights:
            yield Problem(
                weights_key, weights, f"requires {key}. Set it to one function per weight, or omit the key.", (key,)
            )
        return
    if weights and len(weights) != len(functions):
        message = f"has {len(weights)} numbers for {len(functions)} functions. Set one weight for each of {key}."
        yield Problem(weights_key, weights, message, (key,))
    others = {"path": custom.path, "batched": custom.batched, "name": custom.name}
    for name, value in others.items():
        if value is not None and (name, value) != ("name", DEFAULT_FUNCTION):
            yield Problem(f"{CUSTOM}.{name}", value, f"applies to a single function. Omit it, or {key}.", (key,))
    labels = [function.label for function in custom.selected()]
    for label in sorted({label for label in labels if labels.count(label) > 1}):
        message = f"selects two functions with the name {label}. Remove one of them, or set file.py:function."
        yield Problem(key, functions, message)
    for label, kwargs in custom.reward_kwargs.items():
        if label not in labels or not isinstance(kwargs, dict):
            form = f"{CUSTOM}.reward_kwargs.{labels[0]}.<argument>=<value>"
            message = f"must be the arguments of a function: {', '.join(labels)}. Set, for example, {form}."
            yield Problem(f"{CUSTOM}.reward_kwargs.{label}", kwargs, message, (key,))
