"""Resolution of names to classes and functions: built-in names, entry points of other packages, and import paths.

    load("reference", ENGINES, "camshaft.engines", BaseEngine)
    load_function("my_package.losses:mine", POLICY_LOSSES, "camshaft.policy_losses")

Modules are imported only when one of their classes is loaded. Errors name the command that installs a missing library.
"""

import difflib
import importlib
import importlib.util
import inspect
import operator
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from camshaft.errors import ConfigError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_FUNCTION = re.compile(r"[^\s{}]+\.py(:\w+)?|[\w.]+:[\w.]+")

MAX_NAMES = 10
"""Largest number of names that an error about an unknown one lists."""

TESTED_SDK = ">=0.38,<0.39"
"""Versions of the package `tinker`, the SDK of clients, with which `camshaft serve` is tested."""

PROVIDED_BY = {
    "ray": "camshaft[ray]", "vllm": "camshaft[vllm]", "peft": "camshaft[lora]", "wandb": "camshaft[wandb]",
    "math_verify": "camshaft[math]", "reasoning_gym": "camshaft[reasoning-gym]",
    "tensorboard": "camshaft[tensorboard]", "mlflow": "camshaft[mlflow]", "trackio": "camshaft[trackio]",
    "prometheus_client": "camshaft[prometheus]", "fsspec": "camshaft[remote]", "datasets": "camshaft[datasets]",
    "matplotlib": "camshaft[plot]", "google.protobuf": "camshaft[serve]",
    "sglang": "--no-deps sglang", "megatron": "megatron-core==0.16.1 psutil", "psutil": "psutil", "triton": "triton",
    "torchtitan": "--no-deps torchtitan==0.3.0", "tyro": "tyro", "spmd_types": "spmd_types==0.2.3",
}  # fmt: skip
"""Maps optional libraries to the arguments of pip that install them, mostly as an extra of camshaft."""

TRACKERS = {
    "console": "camshaft.tracking.console:ConsoleTracker",
    "jsonl": "camshaft.tracking.jsonl:JsonlTracker",
    "mlflow": "camshaft.tracking.mlflow:MLflowTracker",
    "prometheus": "camshaft.tracking.prometheus:PrometheusTracker",
    "tensorboard": "camshaft.tracking.tensorboard:TensorBoardTracker",
    "trackio": "camshaft.tracking.trackio:TrackioTracker",
    "wandb": "camshaft.tracking.wandb:WandbTracker",
}
"""Built-in trackers. Other packages register trackers as entry points of the group `camshaft.trackers`."""

REWARDS = {
    "auto": "camshaft.rewards.auto:compute_score",
    "exact_match": "camshaft.rewards.exact_match:compute_score",
    "gsm8k": "camshaft.rewards.gsm8k:compute_score",
    "math": "camshaft.rewards.math_answer:compute_score",
    "format": "camshaft.rewards.format:compute_score",
    "arithmetic": "camshaft.rewards.arithmetic:compute_score",
    "reasoning_gym": "camshaft.rewards.reasoning_gym:compute_score",
}
"""Built-in scoring functions. Other packages register functions as entry points of the group `camshaft.rewards`."""


def is_function(text: str) -> bool:
    """Return True if a text is `file.py:function`, `file.py` or `package.module:function`, and not a command line."""
    return _FUNCTION.fullmatch(text) is not None


def function_file(text: str) -> str | None:
    """Return the file of `file.py:function` or `file.py`, and None for other texts."""
    path, suffix, _ = text.rpartition(".py")
    return path + suffix if suffix and is_function(text) else None


def find_target(name: str, built_in: Mapping[str, str], group: str) -> str | None:
    """Return the import path `module:attribute` of `name`, or None if the name is unknown."""
    if ":" in name:
        return name
    if name in built_in:
        return built_in[name]
    return next((point.value for point in _entry_points(group) if point.name == name), None)


def list_names(built_in: Mapping[str, str], group: str) -> list[str]:
    """Return all built-in names and all entry points of the group, sorted."""
    return sorted({*built_in, *(point.name for point in _entry_points(group))})


def list_entry_points(group: str) -> list[tuple[str, str, str]]:
    """Return name, import path and description of each entry point. The description is that of its package."""
    return sorted(
        (point.name, point.value, f"{point.dist.metadata.get('Summary') or 'no description'} ({point.dist.name})")
        for point in _entry_points(group)
    )


def _entry_points(group: str) -> Iterable[Any]:
    """Return the entry points of a group. The import is slow, and most reward workers do not need it."""
    from importlib.metadata import entry_points

    return entry_points(group=group)


def load(name: str, built_in: Mapping[str, str], group: str, base: type[T]) -> type[T]:
    """Import and return the class `name`; raise ConfigError if it is not a subclass of `base`."""
    target = resolve_target(name, built_in, group)
    loaded = import_attribute(target)
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise ConfigError(f"{target} is not a subclass of {base.__name__}")
    return loaded


def resolve_target(name: str, built_in: Mapping[str, str], group: str, kind: str = "Class") -> str:
    """Return the import path `module:attribute` of `name`; raise ConfigError if the name is unknown."""
    target = find_target(name, built_in, group)
    if target is None:
        choices = list_names(built_in, group)
        suggestions = difflib.get_close_matches(name, choices, n=1)
        hint = f" Did you mean '{suggestions[0]}'?" if suggestions else ""
        valid = f"{', '.join(choices)}, or package.module:{kind}"
        raise ConfigError(f"unknown name '{name}' in {group}.{hint} Use {valid}")
    return target


def load_function(name: str, built_in: Mapping[str, F], group: str) -> F | Callable[..., Any]:
    """Return the function `name`: a value of `built_in`, or an imported function of another package."""
    if name in built_in:
        return built_in[name]
    target = resolve_target(name, dict.fromkeys(built_in, ""), group, "function")
    loaded = import_attribute(target)
    if not callable(loaded):
        raise ConfigError(f"{target} must be callable, got {type(loaded).__name__}")
    return loaded


def install_command(library: str, *options: str) -> str:
    """Return the command that installs an optional library, also if camshaft is imported from a checkout."""
    packages = PROVIDED_BY[library].split()
    if packages[0].startswith("camshaft[") and (root := checkout()) is not None:
        packages = ["-e", packages[0].replace("camshaft", str(root))]
    return shlex.join(["pip", "install", *options, *packages])


def checkout() -> Path | None:
    """Return the checkout of the repository that this package is imported from. None if the package is installed."""
    root = Path(__file__).resolve().parents[1]
    project = root / "pyproject.toml"
    is_checkout = project.is_file() and 'name = "camshaft"' in project.read_text(encoding="utf-8")
    return root if is_checkout else None


def import_attribute(target: str) -> Any:
    """Import `package.module:attribute`, or `package.module:Class.attribute`.

    Raise ConfigError if the path is invalid.
    """
    module_name, _, attribute = target.partition(":")
    if not attribute or not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f"'{target}' is not an import path; write package.module:Class, not a file name")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        library, _, submodule = (error.name or "").partition(".")
        if library in PROVIDED_BY and submodule and importlib.util.find_spec(library) is not None:
            raise ConfigError(
                f"{target} requires the module '{error.name}', which the installed version of '{library}' lacks: "
                f"{install_command(library, '--upgrade')}"
            ) from error
        if library in PROVIDED_BY:
            raise ConfigError(
                f"{target} requires '{library}', which is not installed: {install_command(library)}"
            ) from error
        raise ConfigError(
            f"{target}: the module '{error.name}' does not exist; check the name, or install its package"
        ) from error
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError as error:
        hint = _names_of(module, attribute)
        raise ConfigError(f"module {module_name} has no attribute '{attribute}'; {hint}") from error


def _names_of(module: ModuleType, attribute: str) -> str:
    """Return a hint with the nearest name of a module, or with the classes and functions that it defines."""
    names = [name for name in vars(module) if not name.startswith("_")]
    if nearest := difflib.get_close_matches(attribute, names, n=1):
        return f"did you mean '{nearest[0]}'?"
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return f"it defines {', '.join(own)}" if 0 < len(own) <= MAX_NAMES else "check the name"


@cache
def import_file(path: str, label: str) -> ModuleType:
    """Import a Python file, or a module of the import path. `label` says in errors what the file contains."""
    file = Path(path).expanduser()
    if file.suffix != ".py" and not file.exists() and "/" not in path:
        return importlib.import_module(path)
    if not file.is_file():
        raise ConfigError(f"the {label} file {file} does not exist (working directory: {os.getcwd()}); check the path")
    name = f"camshaft_{label}_{file.stem}"
    while name in sys.modules:  # a file of the same name in another folder
        name += "_"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} is not a Python file; the file name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up classes in sys.modules
    spec.loader.exec_module(module)
    return module


def defined_functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the public functions that a module defines itself, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


def find_in_file(
    path: str,
    name: str,
    noun: str,
    setting: str,
    candidates: Callable[[ModuleType], Mapping[str, Any]] = defined_functions,
) -> Any:
    """Return the attribute `name` of a Python file. An empty name selects the only one of the candidates.

    Raise ConfigError if there is no such attribute. `noun` and `setting` say in errors what the attribute is, and which
    key selects it.
    """
    module = import_file(path, noun)
    found = candidates(module)
    if not name and len(found) == 1:
        name = next(iter(found))
    if name not in vars(module):
        fix = f"{setting}={path}:{next(iter(found), 'name')}"
        problem = f"no {noun} '{name}'" if name else f"more than one {noun}" if found else f"no {noun}"
        raise ConfigError(f"{path} has {problem}; it defines {', '.join(found) or 'none'}. Set {fix}")
    return vars(module)[name]
