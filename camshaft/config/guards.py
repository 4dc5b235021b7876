"""Type guards for values of any type, such as the values of a config that is not validated yet."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Return True for a mapping."""
    return isinstance(value, Mapping)


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Return True for a sequence other than a string."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
