"""Mutation test of the specification table: each key is made to do nothing, and one of its tests must fail.

    python tests/spec/mutate.py                       # every key and every field: an hour
    python tests/spec/mutate.py critic. engine:optim. # keys and fields with these prefixes

Prints SURVIVES for a key whose tests all pass although nothing reads it. Each mutation runs in a forked process.

    disable("critic.optim.lr")         # a key: every config of an RL run has the default
    disable("engine:optim.lr")         # a field: every engine reads the default
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from pydantic import BaseModel  # noqa: E402
from pydantic_core import PydanticUndefined  # noqa: E402

from camshaft.config import PPOConfig, load  # noqa: E402
from camshaft.config.engine import EngineConfig  # noqa: E402
from camshaft.config.rollout import RolloutEngineConfig  # noqa: E402
from camshaft.config.schema.fields import Section  # noqa: E402
from camshaft.config.schema.fsdp import FSDPOptions  # noqa: E402
from camshaft.config.tree import has_key, leaf_fields, remove  # noqa: E402
from spec.fields import FIELD_TESTS, FIELDS  # noqa: E402
from spec.keys import tests_of_key  # noqa: E402


def mutations() -> dict[str, tuple[str, ...]]:
    """Map each key, and each `part:field`, to its tests."""
    keys = {key: tests_of_key(key)[:1] if key in FIELDS else tests_of_key(key) for key in leaf_fields(PPOConfig)}
    fields = {f"{part}:{field}": tests for part, fields in FIELD_TESTS.items() for field, tests in fields.items()}
    del fields["engine:model.path"]  # has no default
    del fields["engine:options.pipeline_stages"]  # an option of an engine in the tests, not of FSDP
    return {target: tests for target, tests in (keys | fields).items() if tests}


def survives(target: str, tests: tuple[str, ...]) -> bool:
    """Return True if all tests pass in a process in which `target` is disabled."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            import pytest

            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            disable(target)
            code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])
            os._exit(0 if code == 0 else 1 if code == 1 else 3)
        os._exit(3)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1), f"{target}: pytest could not run {tests}"
    return code == 0


def disable(target: str) -> None:
    """Replace the value of a key, or of a field of a part (`part:field`), by its default until the process exits."""
    part, _, path = target.rpartition(":")
    if not part:
        _disable_key(path)
    elif part == "sampling":
        _disable_sampling(path)
    else:
        _disable_field(RolloutEngineConfig if part == "rollout" else EngineConfig, path)


def _disable_key(key: str) -> None:
    real = load.resolve

    def resolve(tree: Mapping[str, Any], schema: type[Section]) -> Any:
        mutated = copy.deepcopy(dict(tree))
        if schema is PPOConfig and has_key(mutated, key):
            remove(mutated, key)
        return real(mutated, schema)

    load.resolve = resolve


def _disable_field(root: type[BaseModel], path: str) -> None:
    """Replace a field by its default; if it has none, replace the field that contains it."""
    if path.startswith("options."):
        root, path = FSDPOptions, path.removeprefix("options.")
    *sections, name = path.split(".")
    for section in sections:
        field = root.model_fields[section]
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        inner = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
        following = name if section == sections[-1] else sections[sections.index(section) + 1]
        if inner.model_fields[following].is_required():
            name = section
            break
        root = inner
    default = root.model_fields[name].get_default(call_default_factory=True)
    assert default is not PydanticUndefined, f"{path} has no default"
    setattr(root, name, property(lambda _: default))


def _disable_sampling(name: str) -> None:
    from camshaft.rollout import SamplingParams

    default = 1 if name == "max_tokens" else getattr(SamplingParams(max_tokens=1), name)
    real = SamplingParams.__post_init__

    def post_init(params: Any) -> None:
        object.__setattr__(params, name, default)
        real(params)

    SamplingParams.__post_init__ = post_init  # pyright: ignore[reportAttributeAccessIssue]


def main(prefixes: list[str]) -> int:
    import torch  # noqa: F401  (imported once, for all forks)
    import transformers  # noqa: F401

    os.chdir(ROOT)
    survivors = 0
    for target, tests in mutations().items():
        if not prefixes or target.startswith(tuple(prefixes)):
            survivors += (survived := survives(target, tests))
            status = "SURVIVES" if survived else "noticed "
            sys.stdout.write(f"{status} {target} {' '.join(tests) if survived else ''}\n")
            sys.stdout.flush()
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
