"""Compose a config from config files and overrides, in the syntax of Hydra.

    for job in compose_jobs(PPOConfig, ["lr=1e-5,1e-4"], [Path("conf")], "mine", sweep=True):
        from_container(job.tree, PPOConfig, overridden_keys(job.overrides), file_keys=job.file_keys)

Hydra's parser reads the overrides, and OmegaConf the files (`config_files.py`). Short names are expanded in each file
before the files are merged, so that `algorithm: dapo` in one file and `algorithm: {lam: 0.9}` in another do not
conflict. Keys of Hydra (`hydra.*`) are accepted, but only `hydra.searchpath` is read.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from camshaft.config.config_files import ConfigFiles
from camshaft.config.defaults import raw_defaults
from camshaft.config.foreign.topics import topic_of_key
from camshaft.config.foreign.verl import CONFIG_FILES
from camshaft.config.guards import is_list, is_mapping
from camshaft.config.schema.evaluation import EvalConfig
from camshaft.config.schema.fields import Section
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.supervised import RMConfig, SFTConfig
from camshaft.config.short_names import REWARD, expand_overrides, expand_short_names, reset_reward
from camshaft.config.tree import (
    expand_keys,
    flatten,
    format_value,
    get,
    has_key,
    leaf_fields,
    merge,
    put,
    remove,
    shorten,
)
from camshaft.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

BUILT_IN: dict[type[Section], str] = {
    PPOConfig: "ppo_trainer",
    SFTConfig: "sft_trainer",
    RMConfig: "rm_trainer",
    GenerateConfig: "generation",
    EvalConfig: "evaluation",
}
"""Name of the defaults of each command in the defaults list of a config file."""

_PLAIN_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")
_PATH = re.compile(r"(?!\w+\(|[\[{])(?!.*\$\{)[^,'\"]*/[^,'\"]*")
_FUNCTIONS = re.compile(r"[\w./~-]+:[A-Za-z_]\w*(,[A-Za-z_]\w*)+")


class Job(NamedTuple):
    """A composed config, before `${...}` is resolved. Keys that neither a file nor an override sets are missing."""

    tree: dict[str, Any]
    overrides: list[str]
    file_keys: frozenset[str]
    """Keys that config files set."""


def compose_jobs(
    schema: type[Section],
    overrides: Sequence[str],
    folders: Sequence[Path] = (),
    name: str | None = None,
    sweep: bool = False,
) -> list[Job]:
    """Return a job for each combination of the values of the overrides.

    Args:
        schema: Schema of the config.
        overrides: Overrides, which take precedence over the files.
        folders: Folders of config files and groups.
        name: Name of the config file. None selects the defaults.
        sweep: Allow overrides with several values.
    """
    overrides = expand_overrides(overrides, schema, list(map(str, folders)))
    overrides = [_quote_path(override, folders) for override in overrides]
    combinations = [overrides] if not sweep else itertools.product(*_swept_overrides(overrides, folders))
    return [_compose_job(schema, list(combination), folders, name) for combination in combinations]


def _compose_job(schema: type[Section], overrides: list[str], folders: Sequence[Path], name: str | None) -> Job:
    parsed = [parse_override(text) for text in overrides]
    for text, override in zip(overrides, parsed, strict=True):
        if override.is_sweep_override():
            raise ConfigError(
                f"cannot compose the config: several values in {shorten(text)}\n"
                "To start a run for each value, add -m. For a list, write key=[1,2]; for a text, \"key='1,2'\"."
            )
    files = ConfigFiles(folders, {BUILT_IN[schema]: {}} | (CONFIG_FILES if schema is PPOConfig else {}))
    for override in parsed:
        if override.key_or_group == "hydra.searchpath":
            files.add_search_path({"searchpath": override.value()})
    keys_of_hydra = [override for override in parsed if _is_key_of_hydra(override)]
    groups = [
        override
        for override in parsed
        if not isinstance(override.value(), dict) and files.has_group(str(override.key_or_group))
    ]
    tree = _merge_files(schema, files.contents(name or BUILT_IN[schema], groups))
    leaves = leaf_fields(schema)
    file_keys = flatten(tree, leaves).keys()
    for override in parsed:
        if override not in groups and override not in keys_of_hydra:
            _apply(override, tree, schema)
    deleted = [str(override.key_or_group) for override in parsed if override.is_delete()]
    kept = (key for key in file_keys if not any(f"{key}.".startswith(f"{name}.") for name in deleted))
    return Job(tree, overrides, frozenset(kept))


def _merge_files(schema: type[Section], contents: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for content in contents:
        if REWARD in content:
            tree = merge(tree, expand_keys(reset_reward(), ()))
        tree = merge(tree, expand_keys(expand_short_names(content, schema), leaf_fields(schema)))
    return tree


# -- overrides ------------------------------------------------------------------------------------


@cache
def _parser() -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()


def parse_override(text: str) -> "Override":
    """Parse an override with the grammar of Hydra."""
    from hydra.errors import HydraException

    try:
        override: Override = _parser().parse_override(text)
        if not override.key_or_group:
            raise ValueError("an override without a key")
    except (HydraException, ValueError, RecursionError) as error:
        raise ConfigError(
            f"cannot compose the config: {shorten(str(error))}\nin {shorten(text)}\n"
            "Quote a value with special characters: \"key='value'\""
        ) from error
    return override


def _swept_overrides(overrides: Iterable[str], folders: Sequence[Path]) -> Iterable[list[str]]:
    """Return the overrides of each key with a single value. The last override of a key replaces earlier ones."""
    from hydra.core.override_parser.types import Glob

    choices: dict[str, list[str]] = {}
    for text in overrides:
        override = parse_override(text)
        key, value = override.get_key_element(), override.value()
        if not override.is_sweep_override():
            choices[key] = [text]
        elif isinstance(value, Glob):
            options = ConfigFiles(folders).options(str(override.key_or_group))
            choices[key] = [f"{key}={option}" for option in value.filter(options)]
        elif override.is_discrete_sweep():
            choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            raise ConfigError(f"cannot compose the config: a sweep over an interval has no end\nin {shorten(text)}")
    return choices.values()


def _is_key_of_hydra(override: "Override") -> bool:
    """Return True for keys that only Hydra's application reads."""
    key = str(override.key_or_group)
    if key == "hydra" or key.startswith("hydra/"):
        raise ConfigError(
            f"'{override.input_line}' sets an option of Hydra's application, which camshaft does not run. Omit it."
        )
    return key.startswith("hydra.")


def _apply(override: "Override", tree: dict[str, Any], schema: type[Section]) -> None:
    """Apply an override to a config in which keys with their defaults are missing."""
    key, text, value = str(override.key_or_group), shorten(str(override.input_line)), override.value()
    if override.package is not None:
        if (topic := topic_of_key(str(value))) is not None:
            raise ConfigError(f"{text}: {topic.message()}")
        raise ConfigError(
            f"cannot compose the config: Override {text} looks like a config group override, but config group '{key}' "
            "does not exist."
        )
    complete = merge(raw_defaults(schema), tree)
    exists = has_key(complete, key)
    if override.is_delete():
        if not exists:
            raise ConfigError(f"cannot compose the config: Could not delete from config. '{key}' does not exist.")
        if value is not None and value != get(complete, key):
            raise ConfigError(
                f"cannot compose the config: Could not delete from config. The value of '{key}' is "
                f"{format_value(get(complete, key))} and not {format_value(value)}."
            )
        if has_key(tree, key):
            remove(tree, key)
        return
    if not exists and not override.is_add() and not override.is_force_add() and not _PLAIN_KEY.fullmatch(key):
        raise ConfigError(
            f"cannot compose the config: Could not override '{shorten(key)}'.\nTo append to your config use +{text}"
        )
    put(tree, key, merge(get(tree, key), value) if has_key(tree, key) else value)


def _quote_path(override: str, folders: Sequence[Path]) -> str:
    """Quote a path, because the grammar of Hydra requires quotes around characters such as ~ = # and accented letters.

    Several functions of a file, `file.py:f,g`, are one value too, and not those of a sweep. The value of a config group
    (a folder in `folders`) is unchanged.
    """
    key, _, value = override.partition("=")
    is_group = any((folder / key.lstrip("+~")).is_dir() for folder in folders)
    is_path = _PATH.fullmatch(value) or _FUNCTIONS.fullmatch(value)
    return f"{key}='{value}'" if is_path and not is_group else override


def as_override(key: str, value: Any) -> str:
    """Return `key=value` with the quotes that the command line requires."""
    from hydra.core.override_parser.types import Quote, QuotedString

    def element(value: Any) -> str:
        if isinstance(value, str):
            return QuotedString(value, Quote.double).with_quotes()
        if is_mapping(value):
            return "{" + ",".join(f"{name}:{element(item)}" for name, item in value.items()) + "}"
        if is_list(value):
            return "[" + ",".join(map(element, value)) + "]"
        return format_value(value)

    return f"{key}={element(value)}"


def overridden_keys(overrides: Sequence[str]) -> set[str]:
    """Return the keys that `overrides` set. The value of a section, such as `{enable: false}`, sets keys in it."""
    keys: set[str] = set()
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if not override.startswith("~"):
            keys |= {key, *(f"{key}.{name}" for name in _keys_of_mapping(value))}
    return keys


def _keys_of_mapping(value: str) -> Iterable[str]:
    """Return the keys in the value of an override, if it is a mapping."""
    mapping = parse_override(f"key={value}").value() if value.startswith("{") else None
    return flatten(mapping, ()) if is_mapping(mapping) else ()
