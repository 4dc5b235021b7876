"""Finding a class or a function by name: a dict of ours, an entry point of somebody's package, or `module:Class`.

    load("reference", ENGINES, "camshaft.engines", BaseEngine)
    load_function("my_package.losses:mine", POLICY_LOSSES, "camshaft.policy_losses")

The classes are imported only when they are asked for. A module that needs a library which is not
installed gives one sentence with the command that installs it.
"""

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any, TypeVar

from camshaft.errors import ConfigError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

BROUGHT_BY = {
    "ray": "camshaft[ray]", "vllm": "camshaft[vllm]", "peft": "camshaft[lora]", "wandb": "camshaft[wandb]",
    "math_verify": "camshaft[math]", "reasoning_gym": "camshaft[reasoning-gym]",
    "tensorboard": "camshaft[tensorboard]", "mlflow": "camshaft[mlflow]", "trackio": "camshaft[trackio]",
    "fsspec": "camshaft[remote]", "matplotlib": "camshaft[plot]",
    "sglang": "sglang", "torchtitan": "torchtitan", "megatron": "megatron-core",
}  # fmt: skip
"""What to install for each optional library: an extra of this package, or the library's own name."""


def find(name: str, known: Mapping[str, str], group: str) -> str | None:
    """The `module:attribute` behind `name`, or None if nobody offers it."""
    if ":" in name:
        return name
    if name in known:
        return known[name]
    return next((point.value for point in entry_points(group=group) if point.name == name), None)


def names(known: Mapping[str, str], group: str) -> list[str]:
    """All names that `load` takes."""
    return sorted({*known, *(point.name for point in entry_points(group=group))})


def load(name: str, known: Mapping[str, str], group: str, base: type[T]) -> type[T]:
    """The class called `name`, imported now; it must derive from `base`."""
    target = find(name, known, group)
    if target is None:
        raise _nobody(name, known, group, "Class")
    found = import_attribute(target)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{target} is not a {base.__name__} class")
    return found


def load_function(name: str, known: Mapping[str, F], group: str) -> F | Callable[..., Any]:
    """The function called `name`: one of `known` as it is, or somebody's, imported now."""
    if name in known:
        return known[name]
    target = find(name, {}, group)
    if target is None:
        raise _nobody(name, known, group, "function")
    found = import_attribute(target)
    if not callable(found):
        raise ConfigError(f"{target} is no function but {type(found).__name__}")
    return found


def _nobody(name: str, known: Iterable[str], group: str, kind: str) -> ConfigError:
    choices = names(dict.fromkeys(known, ""), group)
    close = difflib.get_close_matches(name, choices, n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return ConfigError(f"there is no '{name}' in {group}.{hint} Known: {', '.join(choices)}, or package.module:{kind}")


def import_attribute(target: str) -> Any:
    """`package.module:attribute`, with errors that say what to type next."""
    module_name, _, attribute = target.partition(":")
    if not attribute or not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f"'{target}' should be package.module:Class, as Python imports it, and no file name")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in BROUGHT_BY:
            raise ConfigError(f"{target} needs '{missing}': pip install '{BROUGHT_BY[missing]}'") from error
        raise ConfigError(f"{target}: there is no module '{error.name}'; is its package installed?") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(f"module {module_name} has no '{attribute}'") from error
