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
from camshaft.config.foreign.topics import topic_of_key, topic_of_name
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
    library, row = _row(key, schema)
    if isinstance(row, Missing):
        return row.topic.message()
    topic = topic_of_key(key) if row is None else topic_of_name(value) if isinstance(value, str) else None
    if topic is not None:
        return topic.message()
    if isinstance(row, NotNeeded):
        return f"not needed{library and f', unlike in {library}'}: {row.why}. Omit the key."
    if isinstance(row, Expanded) and (meaning := _meaning(row, value, library, schema)):
        return meaning
    if isinstance(row, Renamed) and not suggest_names(key, schema):
        command = "sft" if "actor_rollout_ref" in schema.model_fields else "ppo"
        return f"unknown key. It stands for {row.key} of camshaft {command}."
    names = suggest_names(key, schema) or [near for near in nearest_keys(key, fields(schema)) if has_words(near, key)]
    if names:
        return f"unknown key. Did you mean {' or '.join(names)}?"
    return f"unknown key. Keys begin with {', '.join(schema.model_fields)}."


def _row(key: str, schema: type[Section]) -> tuple[str, Row | None]:
    """Return the library and the row of a key, or of a section that stands for other keys."""
    table = rows(schema)
    if key in table:
        return table[key]
    parts = key.split(".")
    sections = (table.get(".".join(parts[:count]), ("", None)) for count in range(1, len(parts)))
    return next((entry for entry in sections if isinstance(entry[1], Expanded)), ("", None))


def _meaning(row: Expanded, value: Any, library: str, schema: type[Section]) -> str | None:
    """Return the settings that the value of a key of another library stands for; None if the command has no such key.

    A key of the actor is that of the model that a supervised command trains.
    """
    is_named = isinstance(value, str | int) and value in row.values
    values = {value: row.values[value]} if is_named else row.values
    settings = [(_local(key, schema), part) for settings in values.values() for key, part in settings.items()]
    fix = " or ".join(dict.fromkeys(f"{key}={format_value(part)}" for key, part in settings))
    otherwise = row.otherwise if isinstance(row.otherwise, str) and not is_named else ""
    parts = (f"a name of {library}" if library else "unknown key", otherwise or (fix and f"set {fix}"), row.note)
    text = f"{'; '.join(part for part in parts if part)}."
    if "actor_rollout_ref" in schema.model_fields:
        return text
    text = text.replace("actor_rollout_ref.actor.", "").replace("actor_rollout_ref.model.", "model.")
    known = {*fields(schema), *short_names(schema)}
    return text if "actor_rollout_ref" not in text and dict(settings).keys() <= known else None


def _local(key: str, schema: type[Section]) -> str:
    """Return the key of the model that a supervised command trains, for a key of the actor."""
    local = key.removeprefix("actor_rollout_ref.").removeprefix("actor.")
    return local if key not in fields(schema) and local in fields(schema) else key


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
    target = _local(names.get(typed, typed), schema)
    if target not in fields(schema):
        return []
    short = next((name for name, long in names.items() if long == target), None)
    return [target if short is None else f"{short} (short for {target})"]
