"""Dotted keys: those of a schema, those of a nested dict, and the nearest to a misspelt one.

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
    """Every key of the schema in its order, sections included."""
    found = {}
    for name, field in schema.model_fields.items():
        key = f"{prefix}{name}"
        found[key] = field
        inner = as_section(field)
        if inner is not None:
            found.update(fields(inner, f"{key}."))
    return found


@cache
def leaf_fields(schema: type[Section]) -> dict[str, FieldInfo]:
    """Every key that has a value of its own."""
    return {key: field for key, field in fields(schema).items() if as_section(field) is None}


def as_section(field: FieldInfo) -> type[Section] | None:
    """The section behind a key, or None if the key has a value of its own."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def flatten(tree: Mapping[str, Any], leaves: Iterable[str], prefix: str = "") -> dict[str, Any]:
    """Dotted keys and values of a nested dict; a mapping is a value where `leaves` says so, or where empty."""
    leaves = set(leaves)
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in leaves:
            found.update(flatten(value, leaves, f"{key}."))
        else:
            found[key] = value
    return found


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys and values of a nested dict, down to values that are no mappings."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= flat(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def nested(tree: Mapping[Any, Any], leaves: Iterable[str], prefix: str = "") -> dict[str, Any]:
    """A copy in which `{"a.b": 1}`, easily written in a file, is `{"a": {"b": 1}}`."""
    leaves = set(leaves)
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in leaves:
            inner = nested(value, leaves, f"{key}.")
            for part, leaf in flatten({str(name): inner}, leaves).items():
                put(found, part, leaf)
        else:
            put(found, str(name), value)
    return found


def has(tree: Mapping[str, Any], key: str) -> bool:
    """Whether a nested dict holds a dotted key."""
    node: Any = tree
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return False
        node = node[name]
    return True


def get(tree: Mapping[str, Any], key: str) -> Any:
    """The value behind a dotted key that is there."""
    node: Any = tree
    for name in key.split("."):
        node = node[name]
    return node


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key, making or replacing what stands in the way of it."""
    *sections, last = key.split(".")
    for name in sections:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    tree[last] = value


def remove(tree: dict[str, Any], key: str) -> None:
    """Take out a dotted key that is there, and the sections that this leaves empty."""
    section, dot, last = key.rpartition(".")
    node = get(tree, section) if dot else tree  # of ".a" the section has an empty name
    del node[last]
    if dot and not node:
        remove(tree, section)


def nearest(key: str, known: Iterable[str], limit: int = 2) -> list[str]:
    """The known keys that look most like `key`: as a whole and in the last name, or equal from some level on."""
    last = key.rpartition(".")[2]
    initials = "".join(word[:1] for word in last.split("_"))  # learning_rate for lr

    def likeness(candidate: str) -> float:
        if candidate.endswith(f".{key}"):
            return 1.0
        whole = difflib.SequenceMatcher(None, key, candidate).ratio()
        name = candidate.rpartition(".")[2]
        end = 1.0 if name == initials != last[:1] else difflib.SequenceMatcher(None, last, name).ratio()
        return (whole + 2 * end) / 3

    scored = sorted(((likeness(candidate), candidate) for candidate in known), reverse=True)
    best = scored[0][0] if scored else 0.0
    return [candidate for score, candidate in scored[:limit] if score >= 0.7 and score > best - 0.08]


def overlap(key: str, other: str) -> bool:
    """Whether two dotted keys are the same, or one is a section that holds the other."""
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")


def shown(value: Any) -> str:
    """A value as it is typed on the command line: true, null, text without quotes."""
    if isinstance(value, str):
        return value if value and value == value.strip() else json.dumps(value)
    return json.dumps(value, default=str)


def abbreviated(text: str, longest: int = 500) -> str:
    """The text, or its beginning and its length where it fills a screen."""
    return text if len(text) <= longest else f"{text[: longest - 100]} ... ({len(text)} characters)"
