"""Load the configured reward function and validate its signature.

    function = load_function(spec)
    function.call([sample])             # a batch of samples if function.batched

`worker.py` calls `load_function` at startup, so errors are raised before training. They list the available functions.
"""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from camshaft.errors import CamshaftError
from camshaft.plugins import REWARDS, find_target, import_attribute, list_names
from camshaft.rewards import GROUP, REGISTERED
from camshaft.rewards.arguments import BATCH, SINGLE, Arguments
from camshaft.rewards.messages import Sample, Spec
from camshaft.subprocesses import extend_import_path

DEFAULT_NAME = "compute_score"


class RewardFunction(NamedTuple):
    """A loaded reward function, with the additional keyword arguments of every call."""

    function: Callable[..., Any]
    kwargs: dict[str, Any]
    arguments: Arguments

    def call(self, samples: Sequence[Sample]) -> Any:
        """Call the function with a single sample, or with a batch of samples if it is batched."""
        arguments = self.arguments.batch(samples) if self.arguments.batched else self.arguments.single(samples[0])
        return self.function(**arguments | self.kwargs)


def load_function(spec: Spec) -> RewardFunction:
    """Load the function of `spec` and validate it. Raise CamshaftError on failure."""
    extend_import_path([*_file_folder(spec.path), *spec.sys_path])
    if spec.path is None:
        function = _find_function(spec)
    else:
        function = _find_attribute(_import_module(spec.path), spec.path, spec.name)
    if not callable(function):
        raise CamshaftError(f"{function_name(spec)} has type {type(function).__name__}; it must be callable")
    return RewardFunction(function, spec.kwargs, _arguments(function, spec))


def _file_folder(path: str | None) -> list[str]:
    """Return the folder of a reward file, so that the file can import other modules of its folder."""
    file = Path(path or "").expanduser()
    return [str(file.resolve().parent)] if file.is_file() else []


def function_name(spec: Spec) -> str:
    """Return the name of the function for error messages."""
    return f"{spec.path}:{spec.name}" if spec.path else spec.name


def _find_function(spec: Spec) -> Any:
    target = find_target(spec.name, REWARDS, GROUP)
    if target is None:
        raise CamshaftError(
            f"no reward function '{spec.name}'; use one of {', '.join(list_names(REWARDS, GROUP))}. For a custom "
            "function, set custom_reward_function.path and name"
        )
    return import_attribute(target)


def _import_module(path: str) -> ModuleType:
    file = Path(path).expanduser()
    if file.suffix != ".py" and not file.exists() and "/" not in path:
        return importlib.import_module(path)
    if not file.is_file():
        raise CamshaftError(f"the reward file {file} does not exist (working directory: {os.getcwd()}); check the path")
    name = f"camshaft_reward_{file.stem}"
    module_spec = importlib.util.spec_from_file_location(name, file)
    if module_spec is None or module_spec.loader is None:
        raise CamshaftError(f"{file} is not a Python file; the file name must end in .py")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle look up classes in sys.modules
    module_spec.loader.exec_module(module)
    return module


def _find_attribute(module: ModuleType, path: str, name: str) -> Any:
    """Return the function that is registered as `name`, or the attribute `name` of the module.

    The only function of a module needs no name.
    """
    if name in REGISTERED:
        return REGISTERED[name]
    if name in vars(module):
        return vars(module)[name]
    functions = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    } | REGISTERED
    if name == DEFAULT_NAME and len(functions) == 1:
        return next(iter(functions.values()))
    raise CamshaftError(
        f"{path} has no function '{name}'; its functions are {', '.join(functions) or 'none'}. "
        "Set custom_reward_function.name"
    )


def _arguments(function: Callable[..., Any], spec: Spec) -> Arguments:
    """Return the arguments of the function. Raise CamshaftError if its parameters do not match."""
    conflicts = sorted({*SINGLE, *BATCH} & spec.kwargs.keys())
    if conflicts:
        raise CamshaftError(
            f"reward_kwargs contains {', '.join(conflicts)}, already passed from the dataset; remove them from "
            "reward_kwargs"
        )
    try:
        return Arguments.of(function, spec.batched, spec.kwargs)
    except TypeError as error:
        setting = "" if spec.batched is None else f" with custom_reward_function.batched={str(spec.batched).lower()}"
        raise CamshaftError(
            f"{function_name(spec)}{inspect.signature(function)} cannot be called{setting}: {error}"
        ) from error
