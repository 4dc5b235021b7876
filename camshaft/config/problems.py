"""One thing that is wrong in a config, and all of them as the text of one error.

raise ConfigError(report([Problem("trainer.seed", "abc", "must be a whole number of 0 or more")]))
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


@dataclass(frozen=True)
class Problem:
    """What is wrong with the value of one key, in words that say what to type instead."""

    key: str
    value: Any
    sentence: str
    others: tuple[str, ...] = ()
    """Further keys that it rests on: if one of them is wrong by itself, this is not worth telling."""

    def rests_on(self, keys: Iterable[str]) -> bool:
        return any(overlap(mine, key) for key in keys for mine in (self.key, *self.others))


def grouped(keys: Sequence[str], value: Any, sentence: str) -> Problem:
    """Several keys with one cause as one problem."""
    also = f"\nLikewise {', '.join(keys[1:])}." if keys[1:] else ""
    return Problem(keys[0], value, sentence + also, tuple(keys[1:]))


def unknown_name(
    key: str, name: str, choices: Sequence[str], own: str = "module:Class", rests_on: tuple[str, ...] = ()
) -> Problem:
    """A name that is neither built in nor an entry point; `choices` are those that are."""
    close = difflib.get_close_matches(name, choices, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    listed = f"one of {', '.join(choices)}, or " if choices else ""
    return Problem(key, name, f"must be {listed}package.{own}.{hint}", rests_on)


def check_name(
    key: str, name: str, built_in: Iterable[str], kind: str, own: str = "module:Class", rests_on: tuple[str, ...] = ()
) -> Iterator[Problem]:
    """A problem if `name` is neither built in, nor an entry point of `camshaft.<kind>`, nor `module:attribute`."""
    known, group = dict.fromkeys(built_in, ""), f"camshaft.{kind}"
    if find(name, known, group) is None:
        yield unknown_name(key, name, names(known, group), own, rests_on)


ABSENT = object()
"""The value of a problem whose key has none to show."""


def report(problems: Iterable[Problem]) -> str:
    """The text of the error: every problem with its key and value."""
    blocks = []
    for problem in problems:
        value = "" if problem.value is ABSENT else f" = {abbreviated(shown(problem.value))}"
        sentence = problem.sentence.replace("\n", "\n      ")
        blocks.append(f"  {problem.key}{value}\n      {sentence}")
    count = "One thing is" if len(blocks) == 1 else f"{len(blocks)} things are"
    blocks = [f"{count} wrong in the config:", *blocks, "`camshaft config explain KEY` says what a key is for."]
    return "\n\n".join(blocks)


def unknown(key: str, value: Any, schema: type[Section]) -> Problem:
    """A key that the schema does not have, with those that may have been meant."""
    close = nearest(key, fields(schema))
    if close:
        return Problem(key, value, f"there is no such key. Did you mean {' or '.join(close)}?")
    return Problem(key, value, f"there is no such key. Keys begin with {', '.join(schema.model_fields)}.")


def from_validation(error: ValidationError, tree: Mapping[str, Any], schema: type[Section]) -> list[Problem]:
    """What pydantic found, one problem per key, in words."""
    known = fields(schema)
    found: dict[str, Problem] = {}
    for item in error.errors(include_url=False):
        parts = [str(part) for part in item["loc"]]
        if item["type"] == "extra_forbidden":
            key = ".".join(parts)
            for leaf, value in flatten({key: get(tree, key)}, leaf_fields(schema)).items():
                found[leaf] = unknown(leaf, value, schema)
            continue
        key = next((part for part in _heads(parts) if part in known), ".".join(parts))
        value = get(tree, key) if has(tree, key) else ABSENT
        found[key] = Problem(key, value, f"must be {_expected(key, schema)}")
    return list(found.values())


def _heads(names: list[str]) -> list[str]:
    """Dotted keys from the whole location down to its first name."""
    return [".".join(names[:count]) for count in range(len(names), 0, -1)]


def _expected(key: str, schema: type[Section]) -> str:
    field = fields(schema)[key]
    section = as_section(field)
    if section is None:
        return describe(field)
    return f"a section with the keys {', '.join(section.model_fields)}"
