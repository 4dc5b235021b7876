"""Dotted keys: the keys of a schema, access to nested dicts by key, and suggestions for misspelled keys.

leaf_fields(PPOConfig)["trainer.seed"].description
nearest_keys("trainer.sed", leaf_fields(PPOConfig))        # ["trainer.seed"]
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from camshaft.config.guards import is_mapping
from camshaft.config.schema.fields import Section


@cache
def fields(schema: type[Section], prefix: str = "") -> dict[str, FieldInfo]:
    """Map every key of the schema to its field. The keys of sections are included."""
    keys: dict[str, FieldInfo] = {}
    for name, field in schema.model_fields.items():
        key = f"{prefix}{name}"
        keys[key] = field
        section = section_class(field)
        if section is not None:
            keys.update(fields(section, f"{key}."))
    return keys


def ordered_names(section: type[Section]) -> list[str]:
    """Return the names of the keys of a section, in the order of its `key_order`."""
    names, position = list(section.key_order), 0
    for name in section.model_fields:
        if name not in names:
            names.insert(position, name)
        position = names.index(name) + 1
    return names


@cache
def leaf_fields(schema: type[Section]) -> dict[str, FieldInfo]:
    """Map every key of the schema that has a value to its field. The keys of sections are excluded."""
    return {key: field for key, field in fields(schema).items() if section_class(field) is None}


def section_class(field: FieldInfo) -> type[Section] | None:
    """Return the class of a section, or None if the field has a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def flatten(tree: Mapping[str, Any], leaves: Iterable[str], prefix: str = "") -> dict[str, Any]:
    """Map dotted keys to the values of a nested dict. Empty mappings and mappings at the keys `leaves` are values."""
    leaves = set(leaves)
    values: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if is_mapping(value) and value and key not in leaves:
            values.update(flatten(value, leaves, f"{key}."))
        else:
            values[key] = value
    return values


def expand_keys(tree: Mapping[Any, Any], leaves: Iterable[str], prefix: str = "") -> dict[str, Any]:
    """Return a copy in which dotted keys are expanded: `{"a.b": 1}` becomes `{"a": {"b": 1}}`.

    Mappings at the keys `leaves` are values and remain unchanged.
    """
    leaves = set(leaves)
    expanded: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if is_mapping(value) and key not in leaves:
            subtree = expand_keys(value, leaves, f"{key}.")
            for part, leaf in flatten({str(name): subtree}, leaves).items():
                put(expanded, part, leaf)
        else:
            put(expanded, str(name), value)
    return expanded


def has_key(tree: Mapping[str, Any], key: str) -> bool:
    """Return True if a nested dict contains a dotted key."""
    node: Any = tree
    for name in key.split("."):
        if not is_mapping(node) or name not in node:
            return False
        node = node[name]
    return True


def get(tree: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key, which must exist."""
    node: Any = tree
    for name in key.split("."):
        node = node[name]
    return node


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a dotted key. Missing sections are created and replace values that are not sections."""
    *sections, last = key.split(".")
    for name in sections:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    tree[last] = value


def merge(defaults: Any, tree: Any) -> Any:
    """Return `tree` with missing keys of every section added from `defaults`."""
    if not is_mapping(defaults) or not is_mapping(tree):
        return tree
    return {**defaults, **{name: merge(defaults.get(name), value) for name, value in tree.items()}}


def remove(tree: dict[str, Any], key: str) -> None:
    """Remove a dotted key, which must exist, and the sections that become empty."""
    section, dot, last = key.rpartition(".")
    node = get(tree, section) if dot else tree  # the section of ".a" has an empty name
    del node[last]
    if dot and not node:
        remove(tree, section)


def nearest_keys(key: str, candidates: Iterable[str], limit: int = 2) -> list[str]:
    """Return up to `limit` candidates that are most similar to `key`, as suggestions for a misspelled key.

    The similarity depends on the complete key and on its last component. A candidate that ends with `.` and `key` is an
    exact match.
    """
    last = key.rpartition(".")[2]
    initials = _initials(last)  # learning_rate is an exact match for lr

    def similarity(candidate: str) -> float:
        if candidate.endswith(f".{key}"):
            return 1.0
        key_ratio = difflib.SequenceMatcher(None, key, candidate).ratio()
        name = candidate.rpartition(".")[2]
        name_ratio = 1.0 if name == initials != last[:1] else difflib.SequenceMatcher(None, last, name).ratio()
        return (key_ratio + 2 * name_ratio) / 3

    scored = sorted(((similarity(candidate), candidate) for candidate in candidates), reverse=True)
    best = scored[0][0] if scored else 0.0
    return [candidate for score, candidate in scored[:limit] if score >= 0.7 and score > best - 0.08]


def has_words(candidate: str, key: str) -> bool:
    """Return True if `candidate` contains every word of `key`, which may be misspelled, or its abbreviation."""
    section, _, last = key.rpartition(".")
    words = re.findall("[a-z0-9]+", candidate.lower())
    is_short = len(last) > 1 and candidate.rpartition(".")[2] == _initials(last)
    typed = re.findall("[a-z0-9]+", (section if is_short else key).lower())
    return all(difflib.get_close_matches(word, words, n=1, cutoff=0.7) for word in typed)


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))


def keys_overlap(key: str, other: str) -> bool:
    """Return True if two dotted keys are equal, or if one is the key of a section that contains the other."""
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")


def format_value(value: Any) -> str:
    """Format a value as it is written on the command line: true, null, strings without quotes."""
    if isinstance(value, str):
        return value if value and value == value.strip() else json.dumps(value)
    return json.dumps(value, default=str)


def shorten(text: str, limit: int = 500) -> str:
    """Return `text`, shortened to its beginning and its length if it has more than `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 100]} ... ({len(text)} characters)"
