"""Config errors: a `Problem` per invalid key, and the error message that lists all problems.

raise ConfigError(format_problems([Problem("trainer.seed", "abc", "must be an integer >= 0")]))
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from camshaft.config.schema.fields import Section, describe
from camshaft.config.tree import (
    fields,
    flatten,
    format_value,
    get,
    has_key,
    keys_overlap,
    leaf_fields,
    section_class,
    shorten,
)
from camshaft.masking import mask_value
from camshaft.plugins import find_target, list_names

Answer = Callable[[str, Any, type[Section]], str]
"""Function that returns the message about an unknown key with a value."""
ABSENT = object()
"""Value of a problem whose key has no value in the config."""
_NUMBER = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Problem:
    """An invalid value of a config key. The message states the reason and a fix."""

    key: str
    value: Any
    message: str
    related: tuple[str, ...] = ()
    """Other keys that the problem depends on. If one of them has an invalid value, the problem is not reported."""

    def involves(self, keys: Iterable[str]) -> bool:
        """Return True if the problem depends on at least one of `keys`."""
        return any(keys_overlap(involved, key) for key in keys for involved in (self.key, *self.related))


def group_problems(keys: Sequence[str], value: Any, message: str) -> Problem:
    """Return one problem for several keys that have the same cause."""
    addition = f"\nThe same applies to {', '.join(keys[1:])}." if keys[1:] else ""
    return Problem(keys[0], value, message + addition, tuple(keys[1:]))


def unknown_name(
    key: str, name: str, choices: Sequence[str], form: str = "module:Class", related: tuple[str, ...] = ()
) -> Problem:
    """Return the problem of a name that is neither built in nor an entry point. `choices` are the valid names."""
    suggestions = difflib.get_close_matches(name, [choice for choice in choices if choice[:1] == name[:1]], n=1)
    hint = f" Did you mean {suggestions[0]}?" if suggestions else ""
    valid_names = f"one of {', '.join(choices)}, or " if choices else ""
    return Problem(key, name, f"must be {valid_names}package.{form}.{hint}", related)


def check_name(
    key: str, name: str, built_in: Iterable[str], kind: str, form: str = "module:Class", related: tuple[str, ...] = ()
) -> Iterator[Problem]:
    """Yield a problem unless `name` is a key of `built_in`, an entry point of `camshaft.<kind>` or an import path."""
    targets, group = dict.fromkeys(built_in, ""), f"camshaft.{kind}"
    if find_target(name, targets, group) is None:
        yield unknown_name(key, name, list_names(targets, group), form, related)


def format_problems(problems: Iterable[Problem], short_names: Mapping[str, str] | None = None) -> str:
    """Format all problems as one error message that shows the key, the value and the reason of each problem.

    `short_names` maps short names to keys. The message ends with those of its keys.
    """
    blocks: list[str] = []
    for problem in problems:
        value = "" if problem.value is ABSENT else f" = {shorten(format_value(mask_value(problem.value)))}"
        message = problem.message.replace("\n", "\n      ")
        blocks.append(f"  {problem.key}{value}\n      {message}")
    count = "1 error" if len(blocks) == 1 else f"{len(blocks)} errors"
    text = "\n".join(blocks)
    names = [f"{name} for {key}" for name, key in (short_names or {}).items() if _needs_short_name(name, key, text)]
    blocks += [f"Short names: {', '.join(names)}."] if names else []
    blocks = [f"{count} in the config:", *blocks, "Run `camshaft config explain KEY` for the description of a key."]
    return "\n\n".join(blocks)


def _needs_short_name(name: str, key: str, text: str) -> bool:
    """Return True if a text contains a key as a whole word, and not its short name with a value or an explanation."""
    contains_key = re.search(rf"(?<![\w.]){re.escape(key)}(?!\w|\.\w)", text)
    return bool(contains_key) and not re.search(rf"(?<![\w.]){re.escape(name)}(?:=| \(short for )", text)


def from_validation(
    error: ValidationError, tree: Mapping[str, Any], schema: type[Section], answer: Answer
) -> list[Problem]:
    """Convert a validation error of pydantic to one problem per key. `answer` tells about unknown keys."""
    keys = fields(schema)
    problems: dict[str, Problem] = {}
    for item in error.errors(include_url=False):
        parts = [str(part) for part in item["loc"]]
        if item["type"] == "extra_forbidden":
            key = ".".join(parts)
            for leaf, value in flatten({key: get(tree, key)}, leaf_fields(schema)).items():
                problems[leaf] = Problem(leaf, mask_value(value, leaf), answer(leaf, value, schema))
            continue
        prefixes = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        key = next((prefix for prefix in prefixes if prefix in keys), ".".join(parts))
        value = get(tree, key) if has_key(tree, key) else ABSENT
        section, expected = section_class(keys[key]), describe(keys[key])
        if section is not None:
            expected = f"a section with the keys {', '.join(section.model_fields)}"
        message = f"must be {expected}"
        if value == "":
            message += ", not an empty string"
        elif isinstance(value, str) and _NUMBER.fullmatch(value) and re.search("an integer|a number", expected):
            convert = f"'{key}=\"${{oc.decode:${{oc.env:NAME}}}}\"'"
            message += f", but is a string. To convert an environment variable, write {convert}."
        problems[key] = Problem(key, value, message)
    return list(problems.values())
