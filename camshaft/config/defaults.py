"""Defaults of each command, read from the fields of its schema.

raw_defaults(PPOConfig)["data"]["train_batch_size"]     # "auto"
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from camshaft.config.schema.fields import DifferingDefaults, Section, marks
from camshaft.config.tree import has_key, ordered_names, put, section_class


@cache
def raw_defaults(schema: type[Section]) -> Mapping[str, Any]:
    """Return the default of every key of a schema, with `${...}` unresolved."""
    return _defaults(schema)


def _defaults(section: type[Section]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name in ordered_names(section):
        field = section.model_fields[name]
        kind = section_class(field)
        tree[name] = field.default if kind is None else _defaults(kind)
        for differing in marks(field, DifferingDefaults):
            for key, value in differing.values.items():
                assert has_key(tree[name], key), f"{section.__name__}.{name} has no key {key}"
                put(tree[name], key, value)
    return tree
