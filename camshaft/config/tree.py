"""Dotted keys: the keys of a schema, access to nested dicts, and the nearest match to a misspelled key.

leaf_fields(PPOConfig)["trainer.seed"].description
nearest("trainer.sed", leaf_fields(PPOConfig))        # ["trainer.seed"]
"""

import difflib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from camshaft.config.schema.fields import Section


@cache
def fields(schema: type[Section], prefix: str = "") -> dict[str, FieldInfo]:
    """Return every key of the schema in order, including sections."""
    keys = {}
    for name, field in schema.model_fields.items():
        key = f"{prefix}{name}"
        keys[key] = field
        inner = as_section(field)
        if inner is not None:
            keys.update(fields(inner, f"{key}."))
    return keys


@cache
def leaf_fields(schema: type[Section]) -> dict[str, FieldInfo]:
    """Return every key that has a value, which excludes sections."""
    return {key: field for key, field in fields(schema).items() if as_section(field) is None}


def as_section(field: FieldInfo) -> type[Section] | None:
    """Return the section class of a key, or None if the key has a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def flatten(tree: Mapping[str, Any], leaves: Iterable[str], prefix: str = "") -> dict[str, Any]:
    """Map dotted keys to the values of a nested dict. Empty mappings and the keys in `leaves` count as values."""
    leaves = set(leaves)
    values: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in leaves:
            values.update(flatten(value, leaves, f"{key}."))
        else:
            values[key] = value
    return values


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Map dotted keys to the values of a nested dict; no mapping counts as a value."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= flat(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def nested(tree: Mapping[Any, Any], leaves: Iterable[str], prefix: str = "") -> dict[str, Any]:
    """Return a copy with dotted keys expanded: `{"a.b": 1}` becomes `{"a": {"b": 1}}`."""
    leaves = set(leaves)
    expanded: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in leaves:
            inner = nested(value, leaves, f"{key}.")
            for part, leaf in flatten({str(name): inner}, leaves).items():
                put(expanded, part, leaf)
        else:
            put(expanded, str(name), value)
    return expanded


def has(tree: Mapping[str, Any], key: str) -> bool:
    """Return True if a nested dict contains a dotted key."""
    node: Any = tree
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return False
        node = node[name]
    return True


def get(tree: Mapping[str, Any], key: str) -> Any:
    """Return the value of an existing dotted key."""
    node: Any = tree
    for name in key.split("."):
        node = node[name]
    return node


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; missing sections are created, and values in their place are replaced."""
    *sections, last = key.split(".")
    for name in sections:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    tree[last] = value


def remove(tree: dict[str, Any], key: str) -> None:
    """Remove an existing dotted key, and the sections that become empty."""
    section, dot, last = key.rpartition(".")
    node = get(tree, section) if dot else tree  # the section of ".a" has an empty name
    del node[last]
    if dot and not node:
        remove(tree, section)


def nearest(key: str, candidates: Iterable[str], limit: int = 2) -> list[str]:
    """Return the candidates most similar to `key`, by the complete key and by its last name.

    A candidate that ends in `.key` is an exact match.
    """
    last = key.rpartition(".")[2]
    initials = "".join(word[:1] for word in last.split("_"))  # matches learning_rate to lr

    def similarity(candidate: str) -> float:
        if candidate.endswith(f".{key}"):
            return 1.0
        of_keys = difflib.SequenceMatcher(None, key, candidate).ratio()
        name = candidate.rpartition(".")[2]
        of_names = 1.0 if name == initials != last[:1] else difflib.SequenceMatcher(None, last, name).ratio()
        return (of_keys + 2 * of_names) / 3

    scored = sorted(((similarity(candidate), candidate) for candidate in candidates), reverse=True)
    best = scored[0][0] if scored else 0.0
    return [candidate for score, candidate in scored[:limit] if score >= 0.7 and score > best - 0.08]


def overlap(key: str, other: str) -> bool:
    """Return True if two dotted keys are equal, or one is a section that contains the other."""
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")


def shown(value: Any) -> str:
    """Format a value as on the command line: true, null, strings without quotes."""
    if isinstance(value, str):
        return value if value and value == value.strip() else json.dumps(value)
    return json.dumps(value, default=str)


def abbreviated(text: str, limit: int = 500) -> str:
    """Return the text; beyond `limit` characters, its beginning and its length."""
    return text if len(text) <= limit else f"{text[: limit - 100]} ... ({len(text)} characters)"
