"""Load the configured reward functions and validate their signatures.

    function, *others = load_functions(spec)
    function.call([sample])             # a batch of samples if function.arguments.batched

`worker.py` calls `load_functions` at startup, so errors are raised before training. They list the available functions.
"""

import inspect
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from camshaft.errors import CamshaftError
from camshaft.plugins import REWARDS, defined_functions, find_target, import_attribute, import_file, list_names
from camshaft.rewards import GROUP, REGISTERED
from camshaft.rewards.arguments import BATCH, SINGLE, Arguments
from camshaft.rewards.messages import DEFAULT_NAME, FunctionInfo, FunctionSpec, Sample, Spec
from camshaft.subprocesses import extend_import_path


class RewardFunction(NamedTuple):
    """A loaded reward function, with the additional keyword arguments of every call."""

    function: Callable[..., Any]
    kwargs: dict[str, Any]
    arguments: Arguments

    def call(self, samples: Sequence[Sample]) -> Any:
        """Call the function with a single sample, or with a batch of samples if it is batched."""
        arguments = self.arguments.batch(samples) if self.arguments.batched else self.arguments.single(samples[0])
        return self.function(**arguments | self.kwargs)

    @property
    def info(self) -> FunctionInfo:
        """Properties of the function for the pool."""
        batched, columns, required = self.arguments.batched, self.arguments.columns, self.arguments.required
        target = self.function
        is_coroutine = any(map(inspect.iscoroutinefunction, (target, type(target).__call__)))
        name = getattr(target, "__name__", type(target).__name__)
        concurrent = is_coroutine and not batched
        return FunctionInfo(name, batched, concurrent, columns, required, self.arguments.takes_environments)


def load_functions(spec: Spec) -> list[RewardFunction]:
    """Load the functions of `spec` and validate them. Raise CamshaftError on failure."""
    files = [Path(function.path or "").expanduser() for function in spec.functions]
    folders = [str(file.resolve().parent) for file in files if file.is_file()]  # a file can import modules beside it
    extend_import_path([*folders, *spec.sys_path])
    return [_load_function(function, spec.has_environments) for function in spec.functions]


def _load_function(spec: FunctionSpec, has_environments: bool) -> RewardFunction:
    if spec.pickled is not None:
        function = pickle.loads(spec.pickled)  # from the pipe of the driver, never from a file
    elif spec.path is None:
        function = _find_function(spec)
    else:
        function = _find_attribute(import_file(spec.path, "reward"), spec.path, spec.name)
    if not callable(function):
        raise CamshaftError(f"{spec.text} has type {type(function).__name__}; it must be callable")
    return RewardFunction(function, spec.kwargs, _arguments(function, spec, has_environments))


def _find_function(spec: FunctionSpec) -> Any:
    target = find_target(spec.name, REWARDS, GROUP)
    if target is None:
        raise CamshaftError(
            f"no reward function '{spec.name}'; use one of {', '.join(list_names(REWARDS, GROUP))}. For a custom "
            "function, set custom_reward_function.path and name"
        )
    return import_attribute(target)


def _find_attribute(module: ModuleType, path: str, name: str) -> Any:
    """Return the function that is registered as `name`, or the attribute `name` of the module.

    The only function of a module needs no name.
    """
    registered = {name: value for name, value in REGISTERED.items() if value.__module__ == module.__name__}
    for names in (registered, vars(module), REGISTERED):  # other modules may register functions too
        if name in names:
            return names[name]
    functions = defined_functions(module) | registered
    if name == DEFAULT_NAME and len(functions) == 1:
        return next(iter(functions.values()))
    if not functions:
        raise CamshaftError(f"{path} has no function")
    raise CamshaftError(
        f"{path} has no function '{name}'; its functions are {', '.join(functions)}. Select one with "
        f"reward={path}:<function> (custom_reward_function.name)"
    )


def _arguments(function: Callable[..., Any], spec: FunctionSpec, has_environments: bool) -> Arguments:
    """Return the arguments of the function. Raise CamshaftError if its parameters do not match."""
    conflicts = sorted({*SINGLE, *BATCH} & spec.kwargs.keys())
    if conflicts:
        raise CamshaftError(
            f"reward_kwargs contains {', '.join(conflicts)}, already passed from the dataset; remove them from "
            "reward_kwargs"
        )
    try:
        return Arguments.of(function, spec.batched, spec.kwargs, has_environments)
    except TypeError as error:
        setting = "" if spec.batched is None else f" with custom_reward_function.batched={str(spec.batched).lower()}"
        raise CamshaftError(f"{spec.text}{inspect.signature(function)} cannot be called{setting}: {error}") from error
