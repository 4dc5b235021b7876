"""Config keys in which runs differ, for tables and comparisons.

differing_keys([run.config() for run in runs])      # {"actor_rollout_ref.actor.optim.lr": [1e-05, 0.001]}
key_columns(runs)                                   # {"lr": ["1e-05", "0.001"]}
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from camshaft.config.render import SCHEMAS
from camshaft.config.schema.algorithm import estimator_inputs
from camshaft.config.short_names import declared_short_names
from camshaft.config.tree import format_value
from camshaft.tracking.run_folder import RunFolder

MACHINE_KEYS = ("trainer.default_local_dir", "trainer.experiment_name", "trainer.validation_data_dir")
"""Config keys that differ between all runs and are left out of comparisons."""
MAX_COLUMNS = 6
"""Maximum number of keys that a table of runs shows."""
MAX_WIDTH = 24
"""Maximum number of characters of a value in a table of runs."""

Config = Mapping[str, Any]


def differing_keys(configs: Sequence[Config]) -> dict[str, list[Any]]:
    """Return the values of the keys that all configs have and that are not equal in all of them.

    Names, folders, and roles that no run has are left out.
    """
    ignored = _ignored_in_all(configs)
    shared = [key for key in configs[0] if not key.startswith(ignored) and all(key in config for config in configs)]
    values = {key: [config[key] for config in configs] for key in shared}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def missing_keys(configs: Sequence[Config]) -> list[str]:
    """Return the keys that only some of the configs have, as those of different commands."""
    ignored = _ignored_in_all(configs)
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if not key.startswith(ignored) and not all(key in config for config in configs)]


def _ignored_in_all(configs: Sequence[Config]) -> tuple[str, ...]:
    return tuple(set.intersection(*(set(ignored_keys(config)) for config in configs)))


def ignored_keys(config: Config) -> Iterator[str]:
    """Yield prefixes of keys that are not compared: of names and folders, and of roles that a PPO run does not have."""
    yield from MACHINE_KEYS
    estimator = config.get("algorithm.adv_estimator")
    if not config.get("critic.enable") and estimator is not None and not estimator_inputs(estimator).values:
        yield "critic."
    if not config.get("reward_model.enable", True):
        yield "reward_model."


def key_columns(runs: Sequence[RunFolder]) -> dict[str, list[str]]:
    """Return the columns of a table of runs: the keys in which runs of the same command differ, by their short names.

    Keys with a short name come first, and at most `MAX_COLUMNS` keys are shown. Runs of other commands have empty
    cells.
    """
    columns: dict[str, list[str]] = {}
    commands = [run.info().get("command", "") for run in runs]
    for command in dict.fromkeys(commands):
        indices = [index for index, name in enumerate(commands) if name == command and runs[index].config()]
        if len(indices) < 2:
            continue
        differences = differing_keys([runs[index].config() for index in indices])
        for key, label in _labels(differences, command).items():
            cells = columns.setdefault(label, [""] * len(runs))
            for index, text in zip(indices, _texts(differences[key]), strict=True):
                cells[index] = text
    return dict(list(columns.items())[:MAX_COLUMNS])


def _labels(keys: Mapping[str, Any], command: str) -> dict[str, str]:
    """Return a label of each key: its short name, or as many of its last parts as tell it from the others."""
    entries = declared_short_names(SCHEMAS[command]) if command in SCHEMAS else {}
    short = {key: entry.name for key, entry in entries.items() if key in keys}
    labels = dict(short)
    others = [key for key in keys if key not in short]
    for key in others:
        parts = key.split(".")
        names = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        labels[key] = next(
            name
            for name in names
            if name not in short.values() and not any(other != key and other.endswith(f".{name}") for other in others)
        )
    return labels


def _texts(values: Sequence[Any]) -> list[str]:
    """Return short texts of values. Paths are reduced to their names if these differ as the paths do."""
    texts = [format_value(value) for value in values]
    names = [PurePath(text).name if "/" in text else text for text in texts]
    texts = names if len(set(names)) == len(set(texts)) else texts
    return [text if len(text) <= MAX_WIDTH else f"...{text[3 - MAX_WIDTH :]}" for text in texts]
