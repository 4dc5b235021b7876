"""Config errors: one `Problem` per wrong key, and the text of the error that lists them all.

raise ConfigError(report([Problem("trainer.seed", "abc", "must be an integer >= 0")]))
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from camshaft.config.schema.fields import Section, describe
from camshaft.config.tree import (
    abbreviated,
    as_section,
    fields,
    flatten,
    get,
    has,
    leaf_fields,
    nearest,
    overlap,
    shown,
)
from camshaft.plugins import find, names

ABSENT = object()
"""The value of a problem whose key has no value to show."""


@dataclass(frozen=True)
class Problem:
    """An invalid value of one key; the message states the reason and the fix."""

    key: str
    value: Any
    message: str
    related: tuple[str, ...] = ()
    """Further keys that the problem depends on; it is not reported if one of them is invalid by itself."""

    def involves(self, keys: Iterable[str]) -> bool:
        """Return True if the problem depends on one of `keys`."""
        return any(overlap(involved, key) for key in keys for involved in (self.key, *self.related))


def grouped(keys: Sequence[str], value: Any, message: str) -> Problem:
    """Report several keys with the same cause as one problem."""
    addition = f"\nThe same applies to {', '.join(keys[1:])}." if keys[1:] else ""
    return Problem(keys[0], value, message + addition, tuple(keys[1:]))


def unknown_name(
    key: str, name: str, choices: Sequence[str], form: str = "module:Class", related: tuple[str, ...] = ()
) -> Problem:
    """Report a name that is neither built in nor an entry point; `choices` are the valid names."""
    close = difflib.get_close_matches(name, choices, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    listed = f"one of {', '.join(choices)}, or " if choices else ""
    return Problem(key, name, f"must be {listed}package.{form}.{hint}", related)


def check_name(
    key: str,
    name: str,
    built_in: Iterable[str],
    kind: str,
    form: str = "module:Class",
    related: tuple[str, ...] = (),
) -> Iterator[Problem]:
    """Report `name` unless it is built in, an entry point of `camshaft.<kind>`, or `package.module:attribute`."""
    targets, group = dict.fromkeys(built_in, ""), f"camshaft.{kind}"
    if find(name, targets, group) is None:
        yield unknown_name(key, name, names(targets, group), form, related)


def report(problems: Iterable[Problem]) -> str:
    """Format the problems as one error text, each with its key and value."""
    blocks = []
    for problem in problems:
        value = "" if problem.value is ABSENT else f" = {abbreviated(shown(problem.value))}"
        message = problem.message.replace("\n", "\n      ")
        blocks.append(f"  {problem.key}{value}\n      {message}")
    count = "1 error" if len(blocks) == 1 else f"{len(blocks)} errors"
    blocks = [f"{count} in the config:", *blocks, "Run `camshaft config explain KEY` for the description of a key."]
    return "\n\n".join(blocks)


def unknown_key(key: str, value: Any, schema: type[Section]) -> Problem:
    """Report a key that the schema does not have, with the nearest keys."""
    close = nearest(key, fields(schema))
    if close:
        return Problem(key, value, f"unknown key. Did you mean {' or '.join(close)}?")
    return Problem(key, value, f"unknown key. Keys begin with {', '.join(schema.model_fields)}.")


def from_validation(error: ValidationError, tree: Mapping[str, Any], schema: type[Section]) -> list[Problem]:
    """Convert the errors of pydantic to one problem per key."""
    keys = fields(schema)
    problems: dict[str, Problem] = {}
    for item in error.errors(include_url=False):
        parts = [str(part) for part in item["loc"]]
        if item["type"] == "extra_forbidden":
            key = ".".join(parts)
            for leaf, value in flatten({key: get(tree, key)}, leaf_fields(schema)).items():
                problems[leaf] = unknown_key(leaf, value, schema)
            continue
        key = next((part for part in _prefixes(parts) if part in keys), ".".join(parts))
        value = get(tree, key) if has(tree, key) else ABSENT
        problems[key] = Problem(key, value, f"must be {_expected(key, schema)}")
    return list(problems.values())


def _prefixes(names: list[str]) -> list[str]:
    """Return the dotted keys from the complete location down to its first name."""
    return [".".join(names[:count]) for count in range(len(names), 0, -1)]


def _expected(key: str, schema: type[Section]) -> str:
    field = fields(schema)[key]
    section = as_section(field)
    if section is None:
        return describe(field)
    return f"a section with the keys {', '.join(section.model_fields)}"
