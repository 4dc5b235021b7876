"""A key, or a field of what a part is told, that does nothing: what a test that proves it must not survive.

    forget("critic.optim.lr")         # every config of an RL run has the default, whatever was typed
    forget("engine:optim.lr")         # every engine reads the default, whatever it was told

For one process, which is to end with it; `deaf.py` starts such processes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from camshaft.config import PPOConfig, load
from camshaft.config.engine import EngineConfig
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.config.schema.fields import Section
from camshaft.config.schema.fsdp import FSDPOptions
from camshaft.config.tree import has, remove


def forget(what: str) -> None:
    kind, _, path = what.rpartition(":")
    if not kind:
        _forget_key(path)
    elif kind == "sampling":
        _forget_sampling(path)
    else:
        _forget_field(RolloutEngineConfig if kind == "rollout" else EngineConfig, path)


def _forget_key(key: str) -> None:
    real = load.resolve

    def resolve(tree: Mapping[str, Any], schema: type[Section]) -> Any:
        kept = copy.deepcopy(dict(tree))
        if schema is PPOConfig and has(kept, key):
            remove(kept, key)
        return real(kept, schema)

    load.resolve = resolve


def _forget_field(root: type[BaseModel], path: str) -> None:
    """Names above the last lead to the class that has the field; one without a default goes with what holds it."""
    if path.startswith("options."):
        root, path = FSDPOptions, path.removeprefix("options.")
    *way, name = path.split(".")
    for step in way:
        field = root.model_fields[step]
        options = [field.annotation, *getattr(field.annotation, "__args__", ())]
        inner = next(kind for kind in options if isinstance(kind, type) and issubclass(kind, BaseModel))
        if inner.model_fields[name if step == way[-1] else way[way.index(step) + 1]].is_required():
            name = step
            break
        root = inner
    default = root.model_fields[name].get_default(call_default_factory=True)
    assert default is not PydanticUndefined, f"{path} has no default"
    setattr(root, name, property(lambda _: default))


def _forget_sampling(name: str) -> None:
    from camshaft.rollout import SamplingParams

    default = 1 if name == "max_tokens" else getattr(SamplingParams(max_tokens=1), name)
    real = SamplingParams.__post_init__

    def made(params: Any) -> None:
        object.__setattr__(params, name, default)
        real(params)

    SamplingParams.__post_init__ = made  # pyright: ignore[reportAttributeAccessIssue]
