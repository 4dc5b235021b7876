"""Short names of the config keys that most commands set.

    expand_short_names({"model": "models/tiny", "lr": 1e-5}, PPOConfig)
    # {"actor_rollout_ref.model.path": "models/tiny", "actor_rollout_ref.actor.optim.lr": 1e-5}
    expand_overrides(["lr=1e-5,1e-4", "data.seed=3"], PPOConfig)
    # ["actor_rollout_ref.actor.optim.lr=1e-5,1e-4", "data.seed=3"]

Short names stand at the fields of their keys. They are valid on the command line, in config files and in Python.
`data`, `model`, `algorithm` and `rollout` are names of sections too: a mapping is the section, any other value is the
value of the short name.
"""

import os.path
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, get_origin

from camshaft.config.defaults import raw_defaults
from camshaft.config.errors import Problem, format_problems
from camshaft.config.guards import is_list, is_mapping
from camshaft.config.schema.fields import Section, ShortName, marks
from camshaft.config.schema.reward import DEFAULT_FUNCTION, split_function
from camshaft.config.tree import flatten, format_value, leaf_fields
from camshaft.errors import ConfigError

REWARD = "reward"
"""Short name that sets two keys, the file and the function in it, or one with a list of functions."""
REWARD_PATH, REWARD_NAME = "custom_reward_function.path", "custom_reward_function.name"
REWARD_FUNCTIONS = "custom_reward_function.functions"
REWARD_KEYS = (REWARD_PATH, REWARD_NAME, REWARD_FUNCTIONS)


_ORDER = (
    "model", "data", "val_data", "data.output_path", "reward", "reward_weights", "environment", "max_turns",
    "algorithm", "steps", "epochs", "lr", "batch", "n", "lora", "max_length", "prompt_length", "response_length",
    "engine", "rollout", "device", "devices", "seed", "out",
)  # fmt: skip
"""Short names, or their keys, in the order of help texts. Others follow."""


@cache
def declared_short_names(schema: type[Section]) -> dict[str, ShortName]:
    """Map the keys of a schema that have a short name to it, in the order of its help text."""
    keys: dict[str, tuple[str, ShortName]] = {}
    for key in flatten(raw_defaults(schema), leaf_fields(schema)):
        for mark in marks(leaf_fields(schema)[key], ShortName):
            keys.setdefault(mark.name, (key, mark))
    order = {name: index for index, name in enumerate(_ORDER)}
    return dict(sorted(keys.values(), key=lambda entry: order.get(entry[0], order.get(entry[1].name, len(order)))))


RECIPES: dict[str, dict[str, Any]] = {
    "ppo": {"algorithm.adv_estimator": "gae"},
    "reinforce++": {"algorithm.adv_estimator": "reinforce_plus_plus"},
    "reinforce++_baseline": {"algorithm.adv_estimator": "reinforce_plus_plus_baseline"},
    "dr_grpo": {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": False,
        "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm",
    },
    "dapo": {
        "algorithm.adv_estimator": "grpo",
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.metric": "score",
        "actor_rollout_ref.actor.clip_ratio_low": 0.2,
        "actor_rollout_ref.actor.clip_ratio_high": 0.28,
        "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
        "actor_rollout_ref.rollout.n": 16,
    },
    "gspo": {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.actor.policy_loss.loss_mode": "gspo",
        "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
        "actor_rollout_ref.actor.clip_ratio_low": 3e-4,
        "actor_rollout_ref.actor.clip_ratio_high": 4e-4,
    },
    "cispo": {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.actor.policy_loss.loss_mode": "cispo",
        "actor_rollout_ref.actor.clip_ratio_low": 10.0,
        "actor_rollout_ref.actor.clip_ratio_high": 0.28,
    },
    "gmpo": {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.actor.policy_loss.loss_mode": "geo_mean",
        "actor_rollout_ref.actor.clip_ratio_low": 0.4,
        "actor_rollout_ref.actor.clip_ratio_high": 0.4,
    },
    "sapo": {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.actor.policy_loss.loss_mode": "sapo",
    },
    "dppo": {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.actor.policy_loss.loss_mode": "dppo_tv",
        "actor_rollout_ref.actor.clip_ratio_low": 0.15,
        "actor_rollout_ref.actor.clip_ratio_high": 0.15,
        "actor_rollout_ref.actor.clip_ratio_c": 20.0,
    },
}
"""Maps algorithm names that are not advantage estimators to the keys that they set. Keys that the user sets win."""


def short_names(schema: type[Section]) -> dict[str, str]:
    """Map the short names of a command to its config keys."""
    return {entry.name: key for key, entry in declared_short_names(schema).items()}


def expand_short_names(
    values: Mapping[str, Any], schema: type[Section], set_keys: Collection[str] | None = None
) -> dict[str, Any]:
    """Replace short names with config keys, and raise a `ConfigError` for contradictions.

    Other keys, including nested sections, are copied unchanged. `set_keys` lists the keys and short names that
    overrides set; a short name takes precedence over all other keys. None means that it must not contradict any key.
    """
    names = short_names(schema)
    mappings = _mapping_names(schema)
    sections = [key for key, value in values.items() if is_mapping(value) and key not in mappings]
    expanded = {key: value for key, value in values.items() if key not in names or key in sections}
    problems: list[Problem] = []
    for name in [name for name in names if name in values and name not in expanded]:
        if name == REWARD and set_keys is not None:
            expanded |= {key: default for key, default in reset_reward().items() if key not in set_keys}
        for key, value in _assignments(name, names[name], values[name]).items():
            present = _lookup(expanded, key)
            if present is _ABSENT or (set_keys is not None and key not in set_keys):
                expanded[key] = value
            elif present != value:
                problems.append(_contradiction(name, values[name], key, present))
    if problems:
        raise ConfigError(format_problems(problems))
    return expanded


@cache
def _mapping_names(schema: type[Section]) -> frozenset[str]:
    """Return the short names of keys whose value is a mapping. That of other names is a section."""
    leaves = leaf_fields(schema)
    return frozenset(name for name, key in short_names(schema).items() if get_origin(leaves[key].annotation) is dict)


_ABSENT = object()


def _lookup(values: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key in a mapping whose keys may be dotted at any level."""
    if key in values:
        return values[key]
    for section, subtree in values.items():
        if is_mapping(subtree) and key.startswith(f"{section}."):
            value = _lookup(subtree, key.removeprefix(f"{section}."))
            if value is not _ABSENT:
                return value
    return _ABSENT


def _assignments(name: str, key: str, value: Any) -> dict[str, Any]:
    return split_reward(value) if name == REWARD else {key: value}


def split_reward(value: Any) -> dict[str, Any]:
    """Return the keys that `reward` sets: path and name of a function, or a list of functions."""
    if is_list(value):
        return {REWARD_FUNCTIONS: list(value)}
    if isinstance(value, str) and value.startswith("["):  # an override that is not parsed yet
        return {REWARD_FUNCTIONS: value}
    if value is None:
        return {REWARD_PATH: None, REWARD_NAME: None}
    if not isinstance(value, str):
        return {REWARD_PATH: value}
    path, name = split_function(value)
    return {key: part for key, part in ((REWARD_PATH, path), (REWARD_NAME, name)) if part is not None}


def reset_reward() -> dict[str, Any]:
    """Return the defaults of the keys that `reward` sets, so that a later `reward` replaces an earlier one."""
    return {REWARD_PATH: None, REWARD_NAME: DEFAULT_FUNCTION, REWARD_FUNCTIONS: []}


def _contradiction(name: str, value: Any, key: str, present: Any) -> Problem:
    message = f"is short for {key}, which is set to {format_value(present)}. Set only one of the two."
    return Problem(name, value, message)


def expand_recipe(tree: Mapping[str, Any], is_set: Collection[str]) -> dict[str, Any]:
    """Return the keys that the value of `algorithm.adv_estimator` sets, if it is a name in `RECIPES`.

    Keys in `is_set`, which the user sets, are omitted.
    """
    estimator = _lookup(tree, "algorithm.adv_estimator")
    recipe = RECIPES.get(estimator, {}) if isinstance(estimator, str) else {}
    return {key: value for key, value in recipe.items() if key == "algorithm.adv_estimator" or key not in is_set}


# -- overrides ------------------------------------------------------------------------------------

_OVERRIDE = re.compile(r"(?P<prefix>\+{0,2}|~)(?P<key>[A-Za-z_]\w*)(?P<part>(?:\.\w+)*)(?P<rest>=.*)?", re.DOTALL)


def expand_overrides(overrides: Sequence[str], schema: type[Section], folders: Iterable[str] = ()) -> list[str]:
    """Replace short names in overrides, which may have a prefix (`+`, `++`, `~`) or several values of a sweep.

    `folders` contain config groups, whose names take precedence over short names. `reward`, which sets several keys, is
    replaced by `expand_short_names` after the config is composed.
    """
    names = {
        name: key
        for name, key in short_names(schema).items()
        if not any(os.path.isdir(os.path.join(os.path.expanduser(folder), name)) for folder in folders)
    }
    _check_contradictions(overrides, names)
    return [part for override in overrides for part in _expand_override(override, names, _mapping_names(schema))]


def _expand_override(override: str, names: Mapping[str, str], mappings: Collection[str]) -> list[str]:
    match = _OVERRIDE.fullmatch(override)
    if match is None or match["key"] not in names or (match["part"] and match["key"] not in mappings):
        return [override]
    name, prefix, rest = match["key"], match["prefix"], match["rest"] or ""
    if name in mappings:
        return [f"{prefix}{names[name]}{match['part']}{rest}"]
    if name == REWARD:
        return [f"~{key}" for key in REWARD_KEYS] if prefix == "~" else [override]
    return [override if rest.startswith("={") else f"{prefix}{names[name]}{rest}"]


def _check_contradictions(overrides: Iterable[str], names: Mapping[str, str]) -> None:
    """Raise a `ConfigError` if a short name and its key have different values."""
    values: dict[str, str] = {}
    for override in overrides:
        key, equals, value = override.lstrip("+").partition("=")
        if equals and not override.startswith("~") and not value.startswith("{"):
            values[key] = value
    problems: list[Problem] = []
    for name in [name for name in names if name in values]:
        for key, value in _assignments(name, names[name], values[name]).items():
            if key in values and _unquote(values[key]) != _unquote(value):
                problems.append(_contradiction(name, _unquote(values[name]), key, _unquote(values[key])))
    if problems:
        raise ConfigError(format_problems(problems))


def _unquote(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
