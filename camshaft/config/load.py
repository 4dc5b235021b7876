"""Load a validated config from YAML files and overrides.

    config = load_ppo(["trainer.device=cpu", "algorithm.adv_estimator=grpo"])

Hydra composes files and overrides, and the result is merged over the defaults, so a file may contain a few keys only
and a deleted key falls back to its default. Then aliases are renamed, `${...}` is resolved, and all checks run. One
`ConfigError` lists every problem. Programs use this module; `command.py` does the same for a command line.
"""

import contextlib
import copy
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from camshaft.config.backends import rollouts_that_read, unread_by
from camshaft.config.checks import check
from camshaft.config.errors import Problem, from_validation, grouped, report
from camshaft.config.schema.evaluation import EvalConfig
from camshaft.config.schema.fields import Section, is_path
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.supervised import RMConfig, SFTConfig, SupervisedConfig
from camshaft.config.tree import abbreviated, flatten, get, has, leaf_fields, nested, put, remove, shown
from camshaft.errors import CamshaftError, ConfigError

Config = TypeVar("Config", PPOConfig, SFTConfig, RMConfig, GenerateConfig, EvalConfig)

HOME = Path(__file__).parent
DEFAULTS: dict[type[Section], str] = {
    PPOConfig: "ppo_trainer",
    SFTConfig: "sft_trainer",
    RMConfig: "rm_trainer",
    GenerateConfig: "generation",
    EvalConfig: "evaluation",
}
"""The YAML file with the defaults of each schema."""

logger = logging.getLogger("camshaft.config")

_SIMPLE_OVERRIDE = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*=")
_PATH = re.compile(r"(?!\w+\(|[\[{])(?!.*\$\{)[^,'\"]*/[^,'\"]*")


def load_ppo(overrides: Sequence[str] = (), config_dir: str | None = None, config_name: str | None = None) -> PPOConfig:
    """Load the config of an RL run: defaults, then the file `config_name` in `config_dir`, then `overrides`."""
    return _load(PPOConfig, overrides, config_dir, config_name)


def load_sft(overrides: Sequence[str] = (), config_dir: str | None = None, config_name: str | None = None) -> SFTConfig:
    """Load the config of `camshaft sft`; arguments as in `load_ppo`."""
    return _load(SFTConfig, overrides, config_dir, config_name)


def load_rm(overrides: Sequence[str] = (), config_dir: str | None = None, config_name: str | None = None) -> RMConfig:
    """Load the config of `camshaft rm`; arguments as in `load_ppo`."""
    return _load(RMConfig, overrides, config_dir, config_name)


def load_generate(
    overrides: Sequence[str] = (), config_dir: str | None = None, config_name: str | None = None
) -> GenerateConfig:
    """Load the config of `camshaft generate`; arguments as in `load_ppo`."""
    return _load(GenerateConfig, overrides, config_dir, config_name)


def load_eval(
    overrides: Sequence[str] = (), config_dir: str | None = None, config_name: str | None = None
) -> EvalConfig:
    """Load the config of `camshaft eval`; arguments as in `load_ppo`."""
    return _load(EvalConfig, overrides, config_dir, config_name)


def _load(schema: type[Config], overrides: Sequence[str], config_dir: str | None, config_name: str | None) -> Config:
    composed = _compose(schema, overrides, config_dir, config_name)
    return from_container(composed, schema, keys_of(overrides))


def from_container(
    container: Mapping[str, Any], schema: type[Config], set_keys: Collection[str] | None = None
) -> Config:
    """Validate a nested dict; missing keys get their defaults.

    `set_keys` are the keys that the user set, if the dict also contains others.
    """
    leaves = leaf_fields(schema)
    written = nested(container, leaves)
    user_keys = flatten(written, leaves).keys() if set_keys is None else set_keys
    tree, problems = rename(written, raw_defaults(schema), user_keys, leaves)
    values, unresolved = resolve(tree, schema)
    problems += unresolved
    config, invalid = _validate(values, schema, {problem.key for problem in problems})
    problems += invalid
    for check_results in (
        check_implemented(config.model_dump(), schema),
        check(config),
        _check_disabled_correction(config, schema),
    ):
        invalid_keys = [key for problem in problems for key in (problem.key, *problem.related)]
        problems += [problem for problem in check_results if not problem.involves(invalid_keys)]
    if problems:
        raise ConfigError(report(problems))
    _warn_without_effect(config, user_keys)
    _warn_unread_by_rollout(tree, frozenset(set_keys or ()))
    return config


# -- defaults and interpolation -------------------------------------------------------------------


@cache
def _default_file(schema: type[Section]) -> DictConfig:
    defaults = OmegaConf.load(HOME / f"{DEFAULTS[schema]}.yaml")
    assert isinstance(defaults, DictConfig)
    return defaults


def raw_defaults(schema: type[Section]) -> dict[str, Any]:
    """Return the defaults as written, with `${...}` unresolved."""
    return to_dict(_default_file(schema))


@cache
def resolved_defaults(schema: type[Section]) -> Mapping[str, Any]:
    """Return the defaults with `${...}` resolved."""
    return to_dict(_default_file(schema), resolve=True)


def resolve(tree: Mapping[str, Any], schema: type[Section]) -> tuple[dict[str, Any], list[Problem]]:
    """Merge `tree` over the defaults and resolve `${...}`; a value that cannot be resolved gets its default.

    A default that cannot be resolved depends on an invalid value, for which there is a problem already.
    """
    leaves, defaults = leaf_fields(schema), raw_defaults(schema)
    written, problems = copy.deepcopy(_merge(defaults, tree)), []
    for key, value in flatten(tree, leaves).items():
        if value == "???":
            problems.append(Problem(key, value, "missing value. Set it."))
            _reset(written, key, schema)
    while True:
        try:
            return to_dict(OmegaConf.create(written), resolve=True), problems
        except OmegaConfBaseException as error:
            key = _config_key(written, error.full_key or "", leaves)
            if not key:
                raise ConfigError(f"cannot compose the config: {error}") from error
            if not has(defaults, key) or get(written, key) != get(defaults, key):
                problems.append(Problem(key, get(written, key), str(error).splitlines()[0]))
            _reset(written, key, schema)


def _merge(defaults: Any, tree: Any) -> Any:
    """Return `tree` with the missing keys of every section from `defaults`."""
    if not isinstance(defaults, Mapping) or not isinstance(tree, Mapping):
        return tree
    return {**defaults, **{name: _merge(defaults.get(name), value) for name, value in tree.items()}}


def _config_key(tree: Mapping[str, Any], path: str, leaves: Collection[str]) -> str:
    """Return the config key that contains an OmegaConf node: `a.b` for `a.b[0].c`."""
    key, node = "", tree
    while isinstance(node, Mapping) and key not in leaves:
        name = max((name for name in node if f"{path}.".startswith((f"{name}.", f"{name}["))), key=len, default=None)
        if name is None:
            break
        key, path, node = f"{key}.{name}" if key else name, path[len(name) + 1 :], node[name]
    return key


def _reset(tree: dict[str, Any], key: str, schema: type[Section]) -> None:
    """Replace an invalid value by its default."""
    defaults = resolved_defaults(schema)
    put(tree, key, copy.deepcopy(get(defaults, key)) if has(defaults, key) else None)


def to_dict(tree: DictConfig | ListConfig, resolve: bool = False) -> dict[str, Any]:
    """Convert a composed config to a dict."""
    container = OmegaConf.to_container(tree, resolve=resolve)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


# -- aliases --------------------------------------------------------------------------------------

ALIASES = {
    "actor_rollout_ref.model.external_libs": "actor_rollout_ref.model.external_lib",
    "actor_rollout_ref.model.tokenizer_path": "data.tokenizer",
    "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.optim.clip_grad": "actor_rollout_ref.actor.grad_clip",
    "actor_rollout_ref.actor.optim.grad_clip": "actor_rollout_ref.actor.grad_clip",
    "critic.model.external_libs": "critic.model.external_lib",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "critic.optim.clip_grad": "critic.grad_clip",
    "critic.optim.grad_clip": "critic.grad_clip",
    "reward_model.model.external_libs": "reward_model.model.external_lib",
    "reward_model.model.fsdp_config.min_num_params": "reward_model.model.fsdp_config.wrap_policy.min_num_params",
    "reward.custom_reward_function": "custom_reward_function",
    "algorithm.gemma": "algorithm.gamma",
    "model.external_libs": "model.external_lib",
    "optim.warmup_style": "optim.lr_scheduler_type",
    "optim.clip_grad": "grad_clip",
    "optim.grad_clip": "grad_clip",
    "data.n_samples": "rollout.n",
}
"""Alias to key; the alias of a section applies to all keys in it."""

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}
VALUE_ALIASES: dict[str, dict[str, str]] = {
    "trainer.logger": {"file": "jsonl", "tracking": "wandb"},
    "actor_rollout_ref.actor.fsdp_config.model_dtype": _DTYPES,
    "actor_rollout_ref.ref.fsdp_config.model_dtype": _DTYPES,
    "actor_rollout_ref.rollout.dtype": _DTYPES,
    "rollout.dtype": _DTYPES,
    "critic.model.fsdp_config.model_dtype": _DTYPES,
    "reward_model.model.fsdp_config.model_dtype": _DTYPES,
    "fsdp_config.model_dtype": _DTYPES,
}
"""Key to the aliases of its value, or of the items of its list."""


def rename(
    tree: Mapping[str, Any], defaults: Mapping[str, Any], set_keys: Collection[str], leaves: Collection[str]
) -> tuple[dict[str, Any], list[Problem]]:
    """Rename aliases with a warning for each; a problem is an alias that contradicts its key.

    `set_keys` are the keys that the user set; any other key counts as unset if it equals `defaults`.
    """
    renamed = copy.deepcopy(dict(tree))
    problems: list[Problem] = []
    for alias, key in ALIASES.items():
        if not has(renamed, alias) or not any(leaf == key or leaf.startswith(f"{key}.") for leaf in leaves):
            continue
        logger.warning("config: '%s' is a deprecated alias; use '%s'", alias, key)
        for leaf, value in flatten({alias: get(renamed, alias)}, [alias] if key in leaves else leaves).items():
            problems += _move(renamed, leaf, key + leaf.removeprefix(alias), value, defaults, set_keys)
        remove(renamed, alias)
    for key, aliases in VALUE_ALIASES.items():
        if has(renamed, key) and key in leaves:
            put(renamed, key, _rename_value(key, get(renamed, key), aliases))
    return renamed, problems


def _move(
    tree: dict[str, Any], alias: str, key: str, value: Any, defaults: Mapping[str, Any], set_keys: Collection[str]
) -> list[Problem]:
    if has(tree, key) and get(tree, key) != value:
        set_by_user = key in set_keys or not has(defaults, key) or get(tree, key) != get(defaults, key)
        if set_by_user:
            message = f"is an alias of {key}, which is set to {shown(get(tree, key))}. Set only one of the two."
            return [Problem(alias, value, message)]
    put(tree, key, value)
    return []


def _rename_value(key: str, value: Any, aliases: Mapping[str, str]) -> Any:
    if isinstance(value, list | tuple):
        return [_rename_value(key, item, aliases) for item in value]
    if not isinstance(value, str) or value not in aliases:
        return value
    logger.warning("config: %s=%s is a deprecated alias; use %s", key, value, aliases[value])
    return aliases[value]


# -- validation -----------------------------------------------------------------------------------


def _validate(tree: dict[str, Any], schema: type[Config], reported: set[str]) -> tuple[Config, list[Problem]]:
    """Return the config and the problems of single values; invalid values get their defaults for later checks.

    Problems of the keys in `reported` are omitted.
    """
    try:
        return schema.model_validate(tree), []
    except ValidationError as error:
        problems = from_validation(error, tree, schema)
    leaves = leaf_fields(schema)
    for problem in problems:
        if any(key == problem.key or key.startswith(f"{problem.key}.") for key in leaves):
            put(tree, problem.key, copy.deepcopy(get(resolved_defaults(schema), problem.key)))
        elif has(tree, problem.key):
            remove(tree, problem.key)
    return schema.model_validate(tree), [problem for problem in problems if problem.key not in reported]


@dataclass(frozen=True)
class NotImplementedValue:
    """Values of keys that the specification has and camshaft does not implement.

    In the message, `{key}` is the first of the keys and `{section}` the section of that key.
    """

    keys: tuple[str, ...]
    matches: Callable[[Any], bool]
    message: str


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


NOT_IMPLEMENTED = (
    NotImplementedValue(
        ("actor_rollout_ref.actor.strategy", "critic.strategy", "reward_model.strategy", "strategy"),
        _is("megatron", "torchtitan"),
        "is not implemented. Set {key}=fsdp, or {key}=reference for a single process.",
    ),
    NotImplementedValue(
        (
            "actor_rollout_ref.actor.fsdp_config.model_dtype",
            "critic.model.fsdp_config.model_dtype",
            "fsdp_config.model_dtype",
        ),
        _is("bfloat16"),
        "bfloat16 weights lose optimizer updates smaller than their rounding error: keep float32 weights and compute "
        "in bfloat16. Set {key}=float32 {section}.mixed_precision.param_dtype=bfloat16.",
    ),
    NotImplementedValue(
        ("actor_rollout_ref.hybrid_engine",),
        _is(False),
        "actor and rollout on separate devices are not implemented. Set {key}=true.",
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
"""Keys that accept URLs of remote file systems: inputs, and the folder for copies of checkpoints."""


def check_implemented(tree: Mapping[str, Any], schema: type[Section]) -> Iterator[Problem]:
    """Yield every value of a valid config that is not implemented; keys with the same cause are one problem."""
    leaves = leaf_fields(schema)
    for entry in NOT_IMPLEMENTED:
        keys = [key for key in entry.keys if key in leaves and entry.matches(get(tree, key))]
        if keys:
            message = entry.message.format(key=keys[0], section=keys[0].rpartition(".")[0])
            yield grouped(keys, get(tree, keys[0]), message)
    remote: dict[str, list[str]] = {}
    for key, field in leaves.items():
        if is_path(field) and key not in REMOTE_PATHS:
            value = get(tree, key)
            for path in [value] if isinstance(value, str) else value or ():
                if "://" in path:
                    remote.setdefault(path, []).append(key)
    for path, keys in remote.items():
        if not any(path.startswith(f"{folder}/") for folder in remote):  # one problem for a folder and its contents
            message = "must be a local path; only data, models and trainer.default_hdfs_dir accept a URL."
            yield grouped(keys, path, message)


def _check_disabled_correction(config: Config, schema: type[Config]) -> Iterator[Problem]:
    """Report settings of a rollout correction that is disabled."""
    section = "algorithm.rollout_correction"
    if not isinstance(config, PPOConfig) or config.algorithm.rollout_correction.rollout_is is not None:
        return
    for leaf in ("rollout_is_threshold", "rollout_is_batch_normalize"):
        key, related = f"{section}.{leaf}", (f"{section}.rollout_is",)
        value = get(config.model_dump(), key)
        if value != get(resolved_defaults(schema), key):
            message = f"has no effect without {section}.rollout_is. Set {section}.rollout_is=token, or omit the key."
            yield Problem(key, value, message, related)


def _warn_without_effect(
    config: PPOConfig | SupervisedConfig | GenerateConfig | EvalConfig, user_keys: Collection[str]
) -> None:
    """Log a warning for each compatibility setting without effect."""
    if isinstance(config, GenerateConfig | EvalConfig):
        return
    models = {"model": config.model} if isinstance(config, SupervisedConfig) else {
        "actor_rollout_ref.model": config.actor_rollout_ref.model,
        "critic.model": config.critic.model,
    }  # fmt: skip
    for key, model in models.items():
        if not model.use_remove_padding:
            logger.warning("config: %s.use_remove_padding=false has no effect: batches are never padded", key)
    if "trainer.use_legacy_worker_impl" in user_keys:
        logger.warning("config: trainer.use_legacy_worker_impl has no effect: no legacy implementation exists")


def _warn_unread_by_rollout(tree: Mapping[str, Any], set_keys: frozenset[str]) -> None:
    """Log a warning for each key that the user set and the selected rollout does not read."""
    section = next((path for path in ("actor_rollout_ref.rollout", "rollout") if has(tree, path)), None)
    if section is None or not has(tree, f"{section}.name"):
        return
    for leaf in sorted(unread_by(str(get(tree, f"{section}.name")))):
        key = f"{section}.{leaf}"
        if key in set_keys and (leaf, get(tree, key)) != ("tensor_model_parallel_size", 1):
            value, readers = shown(get(tree, key)), ", ".join(rollouts_that_read(leaf))
            logger.warning("config: %s=%s has no effect; it is read by %s.name=%s", key, value, section, readers)


# -- Hydra ----------------------------------------------------------------------------------------


def _compose(
    schema: type[Section], overrides: Sequence[str], config_dir: str | None = None, config_name: str | None = None
) -> dict[str, Any]:
    """Compose a file and overrides; `${...}` is unresolved and nothing is validated."""
    import hydra

    folder = HOME if config_dir is None else Path(os.path.expanduser(config_dir)).absolute()
    name = config_name or DEFAULTS[schema]
    arguments = prepare_overrides(list(overrides), [str(folder)])
    if folder != HOME:
        in_folder = os.path.isfile(folder / f"{name.removesuffix('.yaml')}.yaml")
        arguments.append(f"hydra.searchpath=[file://{HOME if in_folder else folder}]")
        folder = folder if in_folder else HOME
    with (
        as_config_errors(arguments),
        _separate_hydra(),
        hydra.initialize_config_dir(str(folder), version_base="1.3", job_name="camshaft"),
    ):
        return to_dict(hydra.compose(name, arguments))


def prepare_overrides(overrides: list[str], folders: list[str]) -> list[str]:
    """Rewrite `key=value` as `++key=value`, so that Hydra accepts a misspelled key and the schema reports it.

    Hydra's own keys and config groups (folders next to the file) are unchanged. Paths are quoted, because Hydra's
    grammar requires quotes for many characters in them (~ = # and accents).
    """

    def prepare(override: str) -> str:
        key, _, value = override.partition("=")
        group = any(os.path.isdir(os.path.join(os.path.expanduser(folder), key)) for folder in folders)
        if _PATH.fullmatch(value) and not group:
            override = f"{key}='{value}'"
        is_key = _SIMPLE_OVERRIDE.match(override) is not None and key.partition(".")[0] != "hydra" and not group
        return f"++{override}" if is_key else override

    return [prepare(override) for override in overrides]


def keys_of(overrides: Sequence[str]) -> set[str]:
    """Return the keys that the overrides set."""
    return {override.lstrip("+").partition("=")[0] for override in overrides if not override.startswith("~")}


@contextlib.contextmanager
def _separate_hydra() -> Iterator[None]:
    """Save and restore the global state of Hydra, for programs that use Hydra themselves."""
    from hydra.core.global_hydra import GlobalHydra

    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = before


@contextlib.contextmanager
def as_config_errors(overrides: Iterable[str]) -> Iterator[None]:
    """Convert every exception of Hydra, which reads only `overrides` and config files, to a `ConfigError`."""
    try:
        yield
    except CamshaftError:
        raise
    except Exception as error:
        raise ConfigError(_hydra_message(error, overrides)) from error


def _hydra_message(error: Exception, overrides: Iterable[str]) -> str:
    """Describe an exception of Hydra with its cause."""
    from hydra.errors import HydraException

    reason = f"\n  {error.__cause__}" if isinstance(error.__cause__, OmegaConfBaseException) else ""
    overrides = list(overrides)
    invalid = next((override for override in overrides if not _is_parsable(override)), None)
    if invalid is not None:
        reason += f"\nin {abbreviated(invalid)}"
        reason += "\nQuote a value with special characters: \"key='value'\""
    elif not isinstance(error, HydraException | OmegaConfBaseException):
        # overrides that `prepare_overrides` left to Hydra
        candidates = [override for override in overrides if not override.startswith("++")] or overrides
        reason += f"\n({type(error).__name__} in Hydra, caused by the file or by {abbreviated(' '.join(candidates))})"
    return f"cannot compose the config: {abbreviated(str(error))}{reason}"


def _is_parsable(override: str) -> bool:
    """Return True if Hydra's grammar accepts the override and it has a key."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return bool(OverridesParser.create().parse_override(override).key_or_group)
    except (HydraException, ValueError, RecursionError):
        return False
