"""Replace the keys of verl in a config by those of camshaft.

translation = translate({"trainer": {"balance_batch": True}}, {}, set())
translation.tree                            # {}
translation.notices                         # ["trainer.balance_batch of verl: not needed; ..."]
"""

import copy
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from camshaft.config.errors import Problem, group_problems
from camshaft.config.foreign.rows import Refused
from camshaft.config.foreign.verl import VERL
from camshaft.config.tree import format_value, get, has_key, put, remove


class Translation(NamedTuple):
    """A config without keys of verl."""

    tree: dict[str, Any]
    keys: frozenset[str] = frozenset()
    """Keys that replace those of verl."""
    notices: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def translate(tree: Mapping[str, Any], defaults: Mapping[str, Any], set_keys: Collection[str]) -> Translation:
    """Apply the rows of verl to the config of an RL run.

    A key and its name in verl may not have different values. The user set a key if it is in `set_keys`, or if it has no
    default.
    """
    translated = copy.deepcopy(dict(tree))
    settings: dict[str, Any] = {}
    notices: dict[str, list[str]] = {}
    refused: dict[str, dict[str, Any]] = {}
    contradictions: list[Problem] = []
    for row in VERL:
        if not has_key(translated, row.name):
            continue
        result = row.apply(get(translated, row.name), translated)
        if result is None:
            continue
        remove(translated, row.name)
        if isinstance(result, Refused):
            refused.setdefault(result.reason, {}).update(result.values)
            continue
        notices.setdefault(result.notice, []).append(row.name)
        for key, value in result.settings.items():
            is_set = key in settings or key in set_keys or not has_key(defaults, key)
            if has_key(translated, key) and is_set and get(translated, key) != value:
                contradictions.append(_contradiction(row.name, value, key, get(translated, key)))
            else:
                put(translated, key, value)
        settings |= result.settings
    return Translation(
        translated,
        frozenset(settings),
        tuple(f"{', '.join(names)} of verl: {notice}" for notice, names in notices.items() if notice),
        (*(group_problems(list(values), next(iter(values.values())), reason) for reason, values in refused.items()),
         *contradictions),
    )  # fmt: skip


def _contradiction(name: str, value: Any, key: str, present: Any) -> Problem:
    message = (
        f"stands for {key}={format_value(value)}, which is set to {format_value(present)}. Set only one of the two."
    )
    return Problem(name, value, message, (key,))
