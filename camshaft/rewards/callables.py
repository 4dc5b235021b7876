"""Pickle reward functions that were passed from Python, so that the worker processes can call them.

    functions = pickle_reward([(is_correct, 1.0), (is_short, 0.1)])     # or one function
    build_rewards(config.custom_reward_function, pickled=functions)
    reward_name([is_correct, is_short])                                 # is_correct_is_short

Functions of `__main__`, of a notebook, and closures and lambdas are pickled by value with cloudpickle; functions of
importable modules by name. The bytes are sent through the pipe to a worker. They are never written to a file.
"""

import dis
import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from io import BytesIO
from types import CodeType, FunctionType, MethodType
from typing import Any

from camshaft.errors import RewardError
from camshaft.rewards.messages import FunctionSpec

Function = Callable[..., Any]
PICKLE_ERRORS = (TypeError, ValueError, AttributeError, pickle.PicklingError)
"""Errors of `dumps`."""
_Cached = type(lru_cache(len))
_MAIN = "__main__"


def pickle_reward(reward: Function | Sequence[Any]) -> tuple[FunctionSpec, ...]:
    """Pickle a function, or a list of functions and (function, weight) pairs, for the worker processes.

    Raise RewardError if a function captures an object that cannot be pickled.
    """
    pairs = _weighted(reward)
    names = _unique([name_of(function) for function, _ in pairs])
    return tuple(
        _pickle(function, name, "" if callable(reward) else name, weight)
        for (function, weight), name in zip(pairs, names, strict=True)
    )


def reward_name(reward: Function | Sequence[Any]) -> str:
    """Return the names of the functions of a reward as one name. Raise RewardError for other objects."""
    return "_".join(_unique([name_of(function) for function, _ in _weighted(reward)]))


def reward_checksum(functions: Sequence[FunctionSpec]) -> str:
    """Return a checksum of the code and the weights of functions."""
    return hashlib.sha256(repr([(function.checksum, function.weight) for function in functions]).encode()).hexdigest()


def name_of(function: Function, default: str = "reward") -> str:
    """Return a name for messages and metrics, which is `default` for a lambda."""
    while isinstance(function, partial):
        function = function.func
    named = isinstance(function, FunctionType | MethodType | type | _Cached)
    name = getattr(function, "__name__", "") if named else type(function).__name__
    return name if name.isidentifier() else default


def _weighted(reward: Function | Sequence[Any]) -> list[tuple[Function, float]]:
    entries: list[Any] = [reward] if callable(reward) or not isinstance(reward, Sequence) else list(reward)
    pairs: list[tuple[Any, Any]] = [
        (entry[0], entry[1]) if isinstance(entry, tuple) and len(entry) == 2 else (entry, 1.0) for entry in entries
    ]
    for entry, (function, weight) in zip(entries, pairs, strict=True):
        if not callable(function) or isinstance(weight, bool) or not isinstance(weight, int | float):
            raise RewardError(
                f"reward contains {entry!r}; pass a function, a path, or a list of functions and (function, weight) "
                "pairs"
            )
    if not pairs:
        raise RewardError("reward is an empty list; pass at least one function")
    return [(function, float(weight)) for function, weight in pairs]


def _unique(names: Sequence[str]) -> list[str]:
    """Number names that occur more than once: reward, reward_2."""
    return [f"{name}_{names[: i + 1].count(name)}" if name in names[:i] else name for i, name in enumerate(names)]


def _pickle(function: Function, name: str, label: str, weight: float) -> FunctionSpec:
    try:
        data = dumps(function)
    except PICKLE_ERRORS as error:
        raise RewardError(
            f"the reward function '{name}' cannot be sent to the scoring processes: {error}. Create such objects "
            "inside the function, or pass the path of a Python file as the reward"
        ) from error
    return FunctionSpec(None, name, label=label, weight=weight, pickled=data, checksum=checksum_of(function))


def checksum_of(function: Function) -> str:
    """Return a checksum of the code of a function or class, and of the values that it captures."""
    return hashlib.sha256(repr(_describe(function, ())).encode()).hexdigest()


def dumps(function: Function) -> bytes:
    """Pickle a function or class. Functions of a script with `lru_cache`, which pickle would name, go by value.

    Raise one of `PICKLE_ERRORS` on failure.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, _Cached) and (obj.__module__ == _MAIN or "<locals>" in obj.__qualname__):
                return _cache, (obj.__wrapped__, obj.cache_parameters())
            return super().reducer_override(obj)

    with BytesIO() as file:
        Pickler(file).dump(function)
        return file.getvalue()


def _cache(function: Function, parameters: Mapping[str, Any]) -> Any:
    return lru_cache(**parameters)(function)


_PLAIN = (str, bytes, bool, int, float, complex, type(None))


def _describe(value: Any, parents: tuple[int, ...]) -> Any:
    """Return a description of a value that does not depend on addresses, file names and line numbers.

    `parents` are the objects that contain the value, because a function may capture itself.
    """
    if id(value) in parents:
        return "..."

    def describe(part: Any) -> Any:
        return _describe(part, (*parents, id(value)))

    if isinstance(value, CodeType):
        return value.co_code, value.co_names, value.co_varnames, list(map(describe, value.co_consts))
    if isinstance(value, FunctionType):
        cells = [describe(cell.cell_contents) for cell in value.__closure__ or ()]
        parts = [value.__code__, value.__defaults__, value.__kwdefaults__]
        return *map(describe, parts), cells, *map(describe, _script_globals(value).items())
    if isinstance(value, _Cached):
        return describe(value.__wrapped__), repr(value.cache_parameters())
    if isinstance(value, MethodType):
        return describe(value.__func__), type(value.__self__).__qualname__, _settings(value.__self__)
    if isinstance(value, partial):
        return describe(value.func), describe(value.args), describe(value.keywords)
    if isinstance(value, set | frozenset):
        return sorted(map(repr, map(describe, value)))
    if isinstance(value, Mapping):
        return [(repr(key), describe(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return list(map(describe, value))
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, type):
        methods = {name: item for name, item in vars(value).items() if isinstance(item, (FunctionType, *_PLAIN))}
        names = sorted(methods.keys() - {"__module__", "__doc__", "__firstlineno__", "__static_attributes__"})
        return value.__qualname__, [(name, describe(methods[name])) for name in names]
    call = next((vars(base)["__call__"] for base in type(value).__mro__ if "__call__" in vars(base)), None)
    if isinstance(call, FunctionType):
        return type(value).__qualname__, describe(call), _settings(value)
    return type(value).__qualname__


def _script_globals(function: FunctionType) -> dict[str, Any]:
    """Return the functions and the constants of a script that a function of the script refers to.

    Containers that calls may change, such as caches, and globals that the function sets are omitted.
    """
    if function.__module__ != _MAIN:
        return {}
    values = {name: function.__globals__.get(name) for name in sorted(_names(function.__code__))}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (FunctionType, _Cached, partial, tuple, frozenset, *_PLAIN)) and value is not None
        if getattr(value, "__module__", _MAIN) == _MAIN
    }


def _names(code: CodeType) -> set[str]:
    """Return the names of globals that code and the functions in it read but do not set."""
    steps = list(dis.get_instructions(code))
    loaded = {step.argval for step in steps if step.opname == "LOAD_GLOBAL"}
    stored = {step.argval for step in steps if step.opname == "STORE_GLOBAL"}
    return (loaded - stored).union(*(_names(part) for part in code.co_consts if isinstance(part, CodeType)))


def _settings(value: Any) -> list[tuple[str, str]]:
    """Return the attributes of an object that are numbers, strings or other plain values."""
    attributes = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    return [(name, repr(item)) for name, item in attributes.items() if isinstance(item, _PLAIN)]
