"""Finds the reward function that a config names, and how it wants to be called. Used by `worker.py`.

    function = load_function(spec)
    function.call([sample])             # or a batch of them, if function.batched

Errors are raised while the run starts, and say what is there instead.
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
    """A function that was found, with the further arguments of every call."""

    function: Callable[..., Any]
    kwargs: dict[str, Any]
    batched: bool

    def call(self, samples: Sequence[Sample]) -> Any:
        """What it returns for these samples; one, unless it takes batches."""
        if self.batched:
            columns = map(list, zip(*samples, strict=True))
            return self.function(**dict(zip(BATCH_ARGUMENTS, columns, strict=True)), **self.kwargs)
        (sample,) = samples
        return self.function(**sample._asdict(), **self.kwargs)


def load_function(spec: Spec) -> RewardFunction:
    """The function that `spec` names."""
    sys.path.extend(entry for entry in spec.sys_path if entry not in sys.path)
    function = _named(spec) if spec.path is None else _attribute(_module(spec.path), spec.path, spec.name)
    if not callable(function):
        raise CamshaftError(f"{title(spec)} is a {type(function).__name__}, not a function")
    return RewardFunction(function, spec.kwargs, _checked_signature(function, spec))


def title(spec: Spec) -> str:
    """What messages call the function."""
    return f"{spec.path}:{spec.name}" if spec.path else spec.name


def _named(spec: Spec) -> Any:
    target = find(spec.name, REWARDS, GROUP)
    if target is None:
        known = ", ".join(names(REWARDS, GROUP))
        raise CamshaftError(
            f"there is no reward function '{spec.name}'; known: {known}. A function of your own is given by the "
            "path of its file and its name"
        )
    return import_attribute(target)


def _module(path: str) -> ModuleType:
    file = Path(path).expanduser()
    if file.suffix != ".py" and not file.exists() and "/" not in path:
        return importlib.import_module(path)
    if not file.is_file():
        raise CamshaftError(f"there is no reward file {file} (looked from {os.getcwd()})")
    sys.path.insert(0, str(file.resolve().parent))  # so that the file can import its neighbours
    name = f"camshaft_reward_{file.stem}"
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None:
        raise CamshaftError(f"{file} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses and pickle look classes up here
    found.loader.exec_module(module)
    return module


def _attribute(module: ModuleType, path: str, name: str) -> Any:
    """What was registered as `name` there, or else is called so."""
    if name in REGISTERED:
        return REGISTERED[name]
    if name in vars(module):
        return vars(module)[name]
    there = [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
    there = [name for name in there if name != "register_reward"] + list(REGISTERED)
    raise CamshaftError(f"{path} has no '{name}'; its functions: {', '.join(there) or 'none'}")


def _checked_signature(function: Callable[..., Any], spec: Spec) -> bool:
    """Whether the function takes batches; an error if it cannot be called."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return bool(spec.batched)  # a function written in C does not tell
    batched = BATCH_ARGUMENTS[1] in signature.parameters if spec.batched is None else spec.batched
    arguments = BATCH_ARGUMENTS if batched else ARGUMENTS
    taken = sorted(set(arguments) & spec.kwargs.keys())
    if taken:
        raise CamshaftError(f"reward_kwargs gives {taken}, which come from the data")
    try:
        signature.bind(**dict.fromkeys(arguments), **spec.kwargs)
    except TypeError as error:
        extra = f" and reward_kwargs {sorted(spec.kwargs)}" if spec.kwargs else ""
        asked = "" if spec.batched is None else f" (custom_reward_function.batched={str(spec.batched).lower()})"
        raise CamshaftError(
            f"{title(spec)}{signature} cannot be called with {', '.join(arguments)}{extra}{asked}: {error}"
        ) from error
    return batched
