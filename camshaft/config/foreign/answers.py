"""Answers to unknown keys: the key to type, or the reason why there is none.

answer("num_generations", 8, PPOConfig)     # "unknown key. Did you mean n (short for actor_rollout_ref.rollout.n)?"
answer("push_to_hub", True, PPOConfig)      # "Models are not uploaded to ... See docs/not-here.md#uploads."
"""

import difflib
from collections.abc import Mapping
from functools import cache
from typing import Any

from camshaft.config.foreign import openrlhf, trl
from camshaft.config.foreign.rows import Expanded, Missing, NotNeeded, Renamed, Row
from camshaft.config.foreign.topics import topic_of_key
from camshaft.config.foreign.words import WORDS
from camshaft.config.schema.fields import Section
from camshaft.config.short_names import short_names
from camshaft.config.tree import fields, format_value, has_words, nearest_keys

_VERL: tuple[Row, ...] = (
    Renamed("adv_estimator", "algorithm"),
    Renamed("ppo_mini_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"),
    Renamed("ppo_micro_batch_size_per_gpu", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
)
"""Keys of verl that users write without their section."""


@cache
def rows(schema: type[Section]) -> Mapping[str, tuple[str, Row]]:
    """Map the names of TRL, OpenRLHF and verl in a command, and words of no library, to the library and the row."""
    is_supervised = "strategy" in schema.model_fields
    tables = {
        "": WORDS,
        "verl": _VERL,
        "OpenRLHF": (*openrlhf.OPENRLHF, *(openrlhf.SUPERVISED if is_supervised else ())),
        "TRL": (*(row for rows in trl.TRL.values() for row in rows), *(trl.SUPERVISED if is_supervised else ())),
    }
    names = short_names(schema)
    return {row.name: (library, row) for library, table in tables.items() for row in table if row.name not in names}


def answer(key: str, value: Any, schema: type[Section]) -> str:
    """Return the message about a key that is not in the schema."""
    library, row = rows(schema).get(key, ("", None))
    topic = row.topic if isinstance(row, Missing) else topic_of_key(key)
    if topic is not None:
        return topic.message()
    if isinstance(row, NotNeeded):
        return f"not needed{library and f', unlike in {library}'}: {row.why}. Omit the key."
    if isinstance(row, Expanded) and "actor_rollout_ref" in schema.model_fields:
        return _meaning(row, value, library)
    names = suggest_names(key, schema) or [near for near in nearest_keys(key, fields(schema)) if has_words(near, key)]
    if names:
        return f"unknown key. Did you mean {' or '.join(names)}?"
    return f"unknown key. Keys begin with {', '.join(schema.model_fields)}."


def _meaning(row: Expanded, value: Any, library: str) -> str:
    """Return the settings that the value of a key of another library stands for."""
    values = {value: row.values[value]} if isinstance(value, str | int) and value in row.values else row.values
    settings = (f"{key}={format_value(part)}" for settings in values.values() for key, part in settings.items())
    fix = " or ".join(dict.fromkeys(settings))
    parts = (f"a name of {library}" if library else "unknown key", fix and f"set {fix}", row.note)
    return f"{'; '.join(part for part in parts if part)}."


def suggest_names(key: str, schema: type[Section]) -> list[str]:
    """Return the name to type instead of an unknown key: a name of another library, or a misspelled name."""
    names = short_names(schema)
    others = {name: row.key for name, (_, row) in rows(schema).items() if isinstance(row, Renamed)}
    typed = others.get(key)
    if typed is None and "." not in key:
        typed = next(iter(difflib.get_close_matches(key, names, n=1, cutoff=0.75)), None)
    if typed is None:
        typed = others.get(next(iter(difflib.get_close_matches(key, others, n=1, cutoff=0.9)), ""))
    if typed is None:
        return []
    target = names.get(typed, typed)
    if target not in fields(schema):
        return []
    short = next((name for name, long in names.items() if long == target), None)
    return [target if short is None else f"{short} (short for {target})"]
