"""Load a validated config from YAML files and overrides.

    config = load_ppo(["trainer.device=cpu", "algorithm.adv_estimator=grpo"])

Config files and overrides are composed (`composition.py`) and merged into the defaults, so a config file needs to
contain only the keys that differ. Then aliases are renamed, `${...}` is resolved, and all checks run. A single
`ConfigError` lists all problems. Python programs call this module; `command.py` loads configs for the command line.
"""

import copy
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from camshaft.config.auto.rules import choose
from camshaft.config.checks import check
from camshaft.config.checks.ineffective import find_notices
from camshaft.config.checks.model import find_model_notices
from camshaft.config.checks.placement import HYBRID
from camshaft.config.checks.staleness import STALENESS, find_staleness_notices
from camshaft.config.composition import compose_jobs, overridden_keys
from camshaft.config.defaults import raw_defaults
from camshaft.config.errors import Problem, format_problems, from_validation, group_problems
from camshaft.config.foreign.answers import answer
from camshaft.config.foreign.translate import Translation, translate
from camshaft.config.guards import is_mapping
from camshaft.config.run_folder import FOLDER, NAME, generated_name, uses_name
from camshaft.config.schema.aliases import rename_aliases
from camshaft.config.schema.evaluation import EvalConfig
from camshaft.config.schema.fields import Choice, Section, is_path
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.supervised import RMConfig, SFTConfig
from camshaft.config.short_names import (
    REWARD,
    REWARD_KEYS,
    expand_recipe,
    expand_short_names,
    short_names,
)
from camshaft.config.tree import expand_keys, flatten, get, has_key, leaf_fields, merge, put, remove
from camshaft.errors import ConfigError
from camshaft.machine import Machine, detect_machine
from camshaft.masking import remember_secrets

Config = TypeVar("Config", PPOConfig, SFTConfig, RMConfig, GenerateConfig, EvalConfig)

logger = logging.getLogger("camshaft.config")


def load(
    schema: type[Config],
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
    config_name: str | None = None,
    machine: Machine | None = None,
) -> Config:
    """Load the config of a command.

    Args:
        schema: Schema of the config.
        overrides: `key=value` strings. They take precedence over the config file.
        config_dir: Folder of config files and groups.
        config_name: Name of the config file without its extension. None selects the defaults.
        machine: Machine for which the values of `auto` keys are chosen. None selects this machine.
    """
    folders = [] if config_dir is None else [Path(config_dir).expanduser().absolute()]
    (job,) = compose_jobs(schema, overrides, folders, config_name)
    return from_container(job.tree, schema, overridden_keys(job.overrides), machine, job.file_keys)


load_ppo = partial(load, PPOConfig)
load_sft = partial(load, SFTConfig)
load_rm = partial(load, RMConfig)
load_generate = partial(load, GenerateConfig)
load_eval = partial(load, EvalConfig)


def from_container(
    container: Mapping[str, Any],
    schema: type[Config],
    set_keys: Collection[str] | None = None,
    machine: Machine | None = None,
    file_keys: Collection[str] = (),
) -> Config:
    """Validate a nested dict and return the config. Missing keys have their default values.

    `set_keys` lists the keys that the user set. None means that the user set all keys in the dict. `file_keys` contains
    those of config files, which take precedence over a recipe even if their values are the defaults. The values of keys
    that are `auto` depend on `machine`, by default this machine.
    """
    remember_secrets(container)
    leaves, defaults = leaf_fields(schema), raw_defaults(schema)
    expanded = expand_keys(expand_short_names(container, schema, set_keys), leaves)
    if set_keys is not None and REWARD in set_keys:
        set_keys = {*set_keys, *REWARD_KEYS}
    user_keys = set(flatten(expanded, leaves) if set_keys is None else set_keys)
    translation = translate(expanded, defaults, user_keys) if schema is PPOConfig else Translation(expanded)
    user_keys |= translation.keys
    tree, renaming_problems = rename_aliases(translation.tree, defaults, user_keys, leaves)
    problems = [*translation.problems, *renaming_problems]
    changes = changed_keys(merge(defaults, tree), schema) | set(set_keys or ()) | translation.keys
    is_set = {*changes, *user_keys, *file_keys}
    for key, value in {**expand_recipe(tree, is_set), **implied(tree, schema, is_set)}.items():
        put(tree, key, value)
    tree, choices = choose_automatic(tree, schema, detect_machine() if machine is None else machine)
    values, unresolved = _resolve_with_name(tree, schema)
    remember_secrets(values)  # of variables that the config refers to
    problems += [*unresolved, *_fill_in_models(values, schema)]
    config, invalid = _validate(values, schema, {problem.key for problem in problems})
    config = config.with_choices(choices)
    problems += invalid
    for check_results in (check_implemented(config.model_dump(), schema), check(config)):
        invalid_keys = [key for problem in problems for key in (problem.key, *problem.related)]
        problems += [
            problem
            for problem in check_results
            if not problem.involves(invalid_keys) and problem.value != MISSING_MODEL
        ]
    if problems:
        raise ConfigError(format_problems(problems, short_names(schema)))
    notices = (*find_model_notices(config), *find_notices(config, merge(defaults, tree), changes))
    if isinstance(config, PPOConfig):
        notices += tuple(find_staleness_notices(config))
    for notice in (*translation.notices, *notices):
        logger.warning("config: %s", notice)
    return config


def implied(tree: Mapping[str, Any], schema: type[Section], is_set: Collection[str]) -> dict[str, Any]:
    """Return the keys that others imply: on stale batches, the rollout has devices of its own, unless it is set."""
    if schema is not PPOConfig or HYBRID in is_set or not has_key(tree, STALENESS):
        return {}
    staleness = get(tree, STALENESS)
    return {HYBRID: False} if isinstance(staleness, int) and staleness > 0 else {}


def load_part(schema: type[Config], overrides: Sequence[str]) -> Config:
    """Load a config for a command that reads a part of it.

    Only single values are validated. What a run requires may be missing: the path of the model is then `MISSING_MODEL`.
    """
    (job,) = compose_jobs(schema, overrides)
    remember_secrets(job.tree)
    tree = expand_keys(expand_short_names(job.tree, schema, overridden_keys(job.overrides)), leaf_fields(schema))
    chosen, _ = choose_automatic(tree, schema, Machine())
    values, problems = resolve(chosen, schema)
    list(_fill_in_models(values, schema))
    config, invalid = _validate(values, schema, {problem.key for problem in problems})
    if problems := [*problems, *invalid]:
        raise ConfigError(format_problems(problems, short_names(schema)))
    return config


def choose_automatic(
    tree: Mapping[str, Any], schema: type[Section], machine: Machine
) -> tuple[dict[str, Any], list[Choice]]:
    """Return a copy of `tree` with a value for each key that is `auto`, and the choices.

    A key that refers to another key, such as `${actor_rollout_ref.actor.strategy}`, still does so if both have the same
    value. Its choice then has no reason, so it is not printed.
    """
    values, _ = resolve(tree, schema)
    chosen, merged = copy.deepcopy(dict(tree)), merge(raw_defaults(schema), tree)
    choices: list[Choice] = []
    for choice in choose(values, schema, machine):
        put(values, choice.key, choice.value)
        reference = _REFERENCE.fullmatch(str(get(merged, choice.key)))
        if reference is None or get(values, reference[1]) != choice.value:
            put(chosen, choice.key, choice.value)
            choices.append(choice)
        else:
            choices.append(replace(choice, reason=""))
    return chosen, choices


MISSING_MODEL = "<model>"
"""Placeholder for the path of a model that is not set, so that the remaining checks can run."""
_MODELS = ("actor_rollout_ref.model.path", "model.path")


def _fill_in_models(values: dict[str, Any], schema: type[Section]) -> Iterator[Problem]:
    """Yield a problem if the model is not set, and set it and the keys that refer to it to a placeholder."""
    key = next((key for key in _MODELS if has_key(values, key) and get(values, key) is None), None)
    if key is None:
        return
    references = [
        reference
        for reference, default in flatten(raw_defaults(schema), leaf_fields(schema)).items()
        if default == f"${{{key}}}" and has_key(values, reference) and get(values, reference) is None
    ]
    for name in (key, *references):
        put(values, name, MISSING_MODEL)
    name = next(short for short, target in short_names(schema).items() if target == key)
    yield Problem(key, None, f"a model is required. Set {name}=<folder>.")


def changed_keys(tree: Mapping[str, Any], schema: type[Section]) -> set[str]:
    """Return the keys whose values, before `${...}` is resolved, differ from the defaults."""
    leaves = leaf_fields(schema)
    defaults = flatten(raw_defaults(schema), leaves)
    return {key for key, value in flatten(tree, leaves).items() if key not in defaults or defaults[key] != value}


def _resolve_with_name(tree: dict[str, Any], schema: type[Section]) -> tuple[dict[str, Any], list[Problem]]:
    """Resolve `${...}`. In a run without a name, `${trainer.experiment_name}` is generated or taken from the folder."""
    merged = merge(raw_defaults(schema), tree)
    if not has_key(merged, NAME) or get(merged, NAME) is not None:
        return resolve(tree, schema)
    named = copy.deepcopy(tree)
    put(named, NAME, "*")
    values, _ = resolve(named, schema)
    folder = str(get(values, FOLDER))
    if uses_name(get(merged, "trainer")):
        try:
            model = get(values.get("actor_rollout_ref", values), "model.path")
        except (TypeError, LookupError):  # an invalid section, which the validation reports
            model = ""
        put(named, NAME, generated_name(str(model)))
    else:
        put(named, NAME, os.path.basename(folder.rstrip("/")))
    values, problems = resolve(named, schema)
    put(values, NAME, None)
    return values, problems


# -- defaults and interpolation -------------------------------------------------------------------


@cache
def resolved_defaults(schema: type[Section]) -> Mapping[str, Any]:
    """Return the defaults with `${...}` resolved."""
    return _resolve_interpolations(raw_defaults(schema))


@cache
def valid_defaults(schema: type[Section]) -> Mapping[str, Any]:
    """Return valid values for all keys: the defaults, choices for a CPU, and a placeholder for the model."""
    chosen, _ = choose_automatic({}, schema, Machine())
    values = _resolve_interpolations(merge(raw_defaults(schema), chosen))
    list(_fill_in_models(values, schema))
    return values


def resolve(tree: Mapping[str, Any], schema: type[Section]) -> tuple[dict[str, Any], list[Problem]]:
    """Merge `tree` into the defaults and resolve `${...}`.

    A value that cannot be resolved is reported as a problem and replaced by its default, so that the remaining checks
    can run. A default that cannot be resolved is not reported: it refers to an invalid value that is reported already.
    """
    leaves, defaults = leaf_fields(schema), raw_defaults(schema)
    merged = copy.deepcopy(merge(defaults, tree))
    problems: list[Problem] = []
    for key, value in flatten(tree, leaves).items():
        if value == "???":
            problems.append(Problem(key, value, f"a value is required. Set {key}=<value>."))
            _reset(merged, key, schema)
    while True:
        try:
            return _resolve_interpolations(merged), problems
        except OmegaConfBaseException as error:
            key = _config_key(merged, error.full_key or "", leaves)
            if not key:
                raise ConfigError(f"cannot compose the config: {error}") from error
            if not has_key(defaults, key) or get(merged, key) != get(defaults, key):
                problems.append(Problem(key, get(merged, key), str(error).splitlines()[0]))
            _reset(merged, key, schema)


def _resolve_interpolations(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with `${...}` resolved.

    OmegaConf is slow, so it only resolves trees with interpolations other than references to keys, such as
    `${oc.env:HOME}`, and trees with values or references that it rejects.
    """
    try:
        return _resolve_references(dict(tree), tree)
    except (LookupError, TypeError, RecursionError):
        return to_dict(OmegaConf.create(dict(tree)), resolve=True)


_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}", re.ASCII)


def _resolve_references(node: dict[str, Any] | list[Any] | str | float | None, tree: Mapping[str, Any]) -> Any:
    """Return a copy of `node` with references such as `${trainer.seed}` replaced by values of `tree`.

    Raises:
        LookupError, TypeError: `node` contains something else that OmegaConf resolves or rejects.
    """
    if type(node) is dict and all(type(name) is str for name in node):
        return {name: _resolve_references(value, tree) for name, value in node.items()}
    if type(node) is list:
        return [_resolve_references(item, tree) for item in node]
    if type(node) in (bool, int, float, NoneType) or (type(node) is str and "${" not in node):
        return node
    if type(node) is not str:
        raise TypeError(node)
    first, *parts = _REFERENCE.split(node)
    values, literals = [_resolve_references(get(tree, key), tree) for key in parts[::2]], [first, *parts[1::2]]
    if "???" in values or any("${" in literal or "\\" in literal for literal in literals):
        raise TypeError(node)
    if literals == ["", ""]:
        return values[0]
    if any(isinstance(value, dict | list) for value in values):
        raise TypeError(node)
    return first + "".join(f"{value}{literal}" for value, literal in zip(values, literals[1:], strict=True))


def _config_key(tree: Mapping[str, Any], path: str, leaves: Collection[str]) -> str:
    """Return the config key that contains the OmegaConf node at `path`, for example `a.b` for `a.b[0].c`."""
    key, node = "", tree
    while is_mapping(node) and key not in leaves:
        name = max((name for name in node if f"{path}.".startswith((f"{name}.", f"{name}["))), key=len, default=None)
        if name is None:
            break
        key, path, node = f"{key}.{name}" if key else name, path[len(name) + 1 :], node[name]
    return key


def _reset(tree: dict[str, Any], key: str, schema: type[Section]) -> None:
    """Replace the value of a key with a valid one."""
    defaults = valid_defaults(schema)
    put(tree, key, copy.deepcopy(get(defaults, key)) if has_key(defaults, key) else None)


def to_dict(tree: DictConfig | ListConfig, resolve: bool = False) -> dict[str, Any]:
    """Convert an OmegaConf config to a dict."""
    container: Any = OmegaConf.to_container(tree, resolve=resolve)
    assert is_mapping(container)
    return {str(key): value for key, value in container.items()}


# -- validation -----------------------------------------------------------------------------------


def _validate(tree: dict[str, Any], schema: type[Config], reported: set[str]) -> tuple[Config, list[Problem]]:
    """Return the config and the problems of single values, except for keys in `reported`.

    Invalid values are replaced by valid ones, so that the remaining checks can run.
    """
    try:
        return schema.model_validate(tree), []
    except ValidationError as error:
        problems = from_validation(error, tree, schema, answer)
    leaves = leaf_fields(schema)
    for problem in problems:
        if any(key == problem.key or key.startswith(f"{problem.key}.") for key in leaves):
            put(tree, problem.key, copy.deepcopy(get(valid_defaults(schema), problem.key)))
        elif has_key(tree, problem.key):
            remove(tree, problem.key)
    return schema.model_validate(tree), [problem for problem in problems if problem.key not in reported]


class NotImplementedValue(NamedTuple):
    """A value that the specification allows for some keys and that camshaft does not implement.

    In the message, `{key}` stands for the first key that has this value.
    """

    keys: tuple[str, ...]
    value: Any
    message: str


NOT_IMPLEMENTED = (
    NotImplementedValue(
        ("actor_rollout_ref.rollout.multi_turn.history", "rollout.multi_turn.history"),
        "template",
        "rewritten histories, which make one episode several rows, are not implemented. Set {key}=append.",
    ),
    NotImplementedValue(
        ("async_training.mode",),
        "stream",
        "single rows that overlap, and go on with newer weights, are not implemented yet. Set {key}=pipeline.",
    ),
)

REMOTE_PATHS = frozenset(
    {
        "trainer.default_hdfs_dir",
        *("data.train_files", "data.val_files", "data.path", "data.tokenizer"),
        *("model.path", "model.lora_adapter_path"),
        *("actor_rollout_ref.model.path", "actor_rollout_ref.model.lora_adapter_path"),
        *("critic.model.path", "critic.model.lora_adapter_path", "critic.model.tokenizer_path"),
        *("reward_model.model.path", "reward_model.model.input_tokenizer"),
    }
)
"""Keys whose paths may be URLs of remote file systems: all inputs, and the folder for copies of checkpoints."""


def check_implemented(tree: Mapping[str, Any], schema: type[Section]) -> Iterator[Problem]:
    """Yield a problem for every valid value that is not implemented. Keys with the same cause are one problem."""
    leaves = leaf_fields(schema)
    for entry in NOT_IMPLEMENTED:
        keys = [key for key in entry.keys if key in leaves and get(tree, key) == entry.value]
        if keys:
            yield group_problems(keys, get(tree, keys[0]), entry.message.format(key=keys[0]))
    remote: dict[str, list[str]] = {}
    for key, field in leaves.items():
        if is_path(field) and key not in REMOTE_PATHS:
            value = get(tree, key)
            for path in [value] if isinstance(value, str) else value or ():
                if "://" in path:
                    remote.setdefault(path, []).append(key)
    for path, keys in remote.items():
        if not any(path.startswith(f"{folder}/") for folder in remote):  # report a folder and its contents only once
            message = "must be a local path. Only data, models and trainer.default_hdfs_dir accept URLs."
            yield group_problems(keys, path, message)
