"""Load the configured reward function and validate its signature. Used by `worker.py`.

    function = load_function(spec)
    function.call([sample])             # or a batch of samples if function.batched

Errors are raised at startup and list the available functions.
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
from camshaft.plugins import REWARDS, find, import_attribute, names
from camshaft.rewards import GROUP, REGISTERED
from camshaft.rewards.messages import Sample, Spec

ARGUMENTS = Sample._fields
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


class RewardFunction(NamedTuple):
    """A loaded function with the additional arguments of every call."""

    function: Callable[..., Any]
    kwargs: dict[str, Any]
    batched: bool

    def call(self, samples: Sequence[Sample]) -> Any:
        """Call the function with one sample, or with all samples if it is batched."""
        if self.batched:
            columns = map(list, zip(*samples, strict=True))
            return self.function(**dict(zip(BATCH_ARGUMENTS, columns, strict=True)), **self.kwargs)
        (sample,) = samples
        return self.function(**sample._asdict(), **self.kwargs)


def load_function(spec: Spec) -> RewardFunction:
    """Load the function of `spec`; raise CamshaftError if that fails."""
    sys.path.extend(entry for entry in spec.sys_path if entry not in sys.path)
    function = _find_function(spec) if spec.path is None else _attribute(_module(spec.path), spec.path, spec.name)
    if not callable(function):
        raise CamshaftError(f"{title(spec)} must be callable, got {type(function).__name__}")
    return RewardFunction(function, spec.kwargs, _checked_signature(function, spec))


def title(spec: Spec) -> str:
    """Return the name of the function for messages."""
    return f"{spec.path}:{spec.name}" if spec.path else spec.name


def _find_function(spec: Spec) -> Any:
    target = find(spec.name, REWARDS, GROUP)
    if target is None:
        raise CamshaftError(
            f"no reward function '{spec.name}'; known: {', '.join(names(REWARDS, GROUP))}. For a custom function set "
            "custom_reward_function.path and name"
        )
    return import_attribute(target)


def _module(path: str) -> ModuleType:
    file = Path(path).expanduser()
    if file.suffix != ".py" and not file.exists() and "/" not in path:
        return importlib.import_module(path)
    if not file.is_file():
        raise CamshaftError(f"no reward file {file} (working directory: {os.getcwd()})")
    sys.path.insert(0, str(file.resolve().parent))  # the file can import modules of its folder
    name = f"camshaft_reward_{file.stem}"
    module_spec = importlib.util.spec_from_file_location(name, file)
    if module_spec is None or module_spec.loader is None:
        raise CamshaftError(f"{file} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle resolve classes through sys.modules
    module_spec.loader.exec_module(module)
    return module


def _attribute(module: ModuleType, path: str, name: str) -> Any:
    """Return the function registered as `name`, or the attribute `name` of the module."""
    if name in REGISTERED:
        return REGISTERED[name]
    if name in vars(module):
        return vars(module)[name]
    functions = [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
    functions = [name for name in functions if name != "register_reward"] + list(REGISTERED)
    raise CamshaftError(f"{path} has no '{name}'; its functions: {', '.join(functions) or 'none'}")


def _checked_signature(function: Callable[..., Any], spec: Spec) -> bool:
    """Return True if the function is batched; raise CamshaftError if its signature does not match."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return bool(spec.batched)  # C functions have no signature
    batched = BATCH_ARGUMENTS[1] in signature.parameters if spec.batched is None else spec.batched
    arguments = BATCH_ARGUMENTS if batched else ARGUMENTS
    taken = sorted(set(arguments) & spec.kwargs.keys())
    if taken:
        raise CamshaftError(f"reward_kwargs contains {taken}, which come from the data; remove them")
    try:
        signature.bind(**dict.fromkeys(arguments), **spec.kwargs)
    except TypeError as error:
        extra = f" and reward_kwargs {sorted(spec.kwargs)}" if spec.kwargs else ""
        setting = "" if spec.batched is None else f" (custom_reward_function.batched={str(spec.batched).lower()})"
        raise CamshaftError(
            f"{title(spec)}{signature} cannot be called with {', '.join(arguments)}{extra}{setting}: {error}"
        ) from error
    return batched
