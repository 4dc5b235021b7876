"""Compose and validate configs from command-line arguments.

    for config in compose(sys.argv[1:], PPOConfig): ...

The arguments are overrides, and options with the names that they have in Hydra. `composition.py` composes the configs,
and `load.py` validates them.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from camshaft.config.composition import Job, compose_jobs, overridden_keys
from camshaft.config.defaults import raw_defaults
from camshaft.config.foreign.answers import suggest_names
from camshaft.config.foreign.topics import topic_of_key
from camshaft.config.load import Config, from_container, to_dict
from camshaft.config.run_folder import NUMBER, name_after
from camshaft.config.schema.fields import Section
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.supervised import SupervisedConfig
from camshaft.config.short_names import declared_short_names, expand_short_names
from camshaft.config.tree import expand_keys, flatten, get, has_key, leaf_fields, merge
from camshaft.errors import ConfigError
from camshaft.masking import HIDDEN, mask_yaml, printable, remember_arguments, secret_values

_OVERRIDE = re.compile(r"(\+{0,2}[A-Za-z_$][\w$./@:-]*=|~[A-Za-z_])")
MIN_PRINTED_LENGTH = 6
"""Shortest secret that is masked wherever a printed config contains it."""

_FOLDERS = ("--config-dir", "-cd", "--config-path", "-cp")
_NAMES = ("--config-name", "-cn")
_PRINTS = ("--cfg", "-c")
_SWEEPS = ("--multirun", "-m")
_FLAGS = (*_SWEEPS, "--resolve", "--run", "-r")
_FILES = ("--config", "--config-file", "--config_file", "--yaml", "-f")
"""Options that pass a config file in other programs."""
_OF_HYDRA = ("--hydra-help", "--info", "-i", "--experimental-rerun", "--package", "-p", "--version")
"""Options of Hydra's application, which the commands do not run."""


@dataclass
class Arguments:
    """Arguments of a command."""

    overrides: list[str] = field(default_factory=list[str])
    folders: list[Path] = field(default_factory=list[Path])
    """Folders of config files and groups."""
    name: str | None = None
    """Name of the config file. None selects the defaults."""
    sweeps: bool = False
    prints: bool = False
    """Print the config instead of starting a run."""
    resolves: bool = False
    """Resolve `${...}` in the printed config."""


def compose(argv: Sequence[str], schema: type[Config]) -> list[Config]:
    """Return the validated configs that `argv` describes: one config, or one per job of a sweep (`-m`).

    All configs of a sweep are validated before the function returns. With `--cfg job` the config is printed, after its
    errors, and the result is empty. Secrets in the printed config are masked.
    """
    remember_arguments(argv)
    arguments = _parse_arguments(argv, schema)
    jobs = compose_jobs(schema, arguments.overrides, arguments.folders, arguments.name, arguments.sweeps)
    try:
        configs = [
            from_container(job.tree, schema, overridden_keys(job.overrides), file_keys=job.file_keys) for job in jobs
        ]
        if len(configs) > 1:
            configs = [_named_after_sweep(config, configs, jobs) for config in configs]
        _check_folders(configs, jobs)
    except ConfigError as error:
        if not arguments.prints:
            raise
        sys.stderr.write(f"{printable(str(error))}\n\n")
        _print_configs(jobs, schema, arguments.resolves)
        raise ConfigError("the config is invalid; its errors stand before it") from error
    if arguments.prints:
        _print_configs(jobs, schema, arguments.resolves)
    return [] if arguments.prints else configs


def _parse_arguments(argv: Sequence[str], schema: type[Section]) -> Arguments:
    """Parse options and overrides, and raise a `ConfigError` for an argument that is neither."""
    arguments, remaining = Arguments(), iter(argv)
    for argument in remaining:
        option, equals, value = argument.partition("=")
        if not argument.startswith("-"):
            if not equals and not _OVERRIDE.match(argument):
                if argument.endswith((".yaml", ".yml")):
                    raise ConfigError(f"'{argument}' is not an override. {_describe_file(argument)}")
                raise ConfigError(f"'{argument}' is not an override. Write key=value, for example trainer.seed=7.")
            arguments.overrides.append(argument)
        elif option in _FLAGS:
            arguments.sweeps |= option in _SWEEPS
            arguments.resolves |= option == "--resolve"
        elif option in (*_FOLDERS, *_NAMES, *_PRINTS):
            value = value if equals else next(remaining, "")
            _set_option(arguments, option, value)
        elif option in _FILES:
            raise ConfigError(f"'{option}' is not an option. {_describe_file(value or next(remaining, ''))}")
        elif option in _OF_HYDRA:
            raise ConfigError(
                f"'{option}' is an option of Hydra's application, which camshaft does not run. Omit it, or see --help."
            )
        else:
            if (topic := topic_of_key(option.lstrip("-"))) is not None:
                raise ConfigError(f"{argument}: {topic.message()}")
            names = suggest_names(option.lstrip("-").replace("-", "_"), schema)
            key = f" with the key {names[0]}" if names else ", for example trainer.seed=7"
            raise ConfigError(f"'{argument}' is not an option. Write key=value{key}.")
    return arguments


def _describe_file(path: str) -> str:
    """Return a sentence on how to pass a config file."""
    folder, name = Path(path or "DIR/NAME.yaml").parent, Path(path or "NAME").stem
    return (
        f"Write --config-dir {folder} --config-name {name} for a file with keys of camshaft. Files of other libraries "
        "are not read."
    )


def _set_option(arguments: Arguments, option: str, value: str) -> None:
    if not value:
        raise ConfigError(f"'{option}' requires a value. Write {option}=VALUE.")
    if option in _FOLDERS:
        arguments.folders.append(Path(value).expanduser().absolute())
    elif option in _NAMES:
        arguments.name = value
    elif value in ("job", "all"):
        arguments.prints = True
    else:
        raise ConfigError(f"{option}={value}: only the config of the run can be printed. Write --cfg job.")


def _print_configs(jobs: Sequence[Job], schema: type[Section], resolve: bool) -> None:
    for job in jobs:
        _print_config(job, schema, resolve)


def _print_config(job: Job, schema: type[Section], resolve: bool) -> None:
    """Print the config of a job without secrets."""
    tree = expand_keys(expand_short_names(job.tree, schema, overridden_keys(job.overrides)), leaf_fields(schema))
    tree = merge(raw_defaults(schema), tree)
    try:
        text = OmegaConf.to_yaml(OmegaConf.create(tree), resolve=resolve)
    except OmegaConfBaseException as error:
        raise ConfigError(f"cannot print the config: {error}") from error
    masked = mask_yaml(text)
    for secret in sorted(secret_values(tree, min_length=MIN_PRINTED_LENGTH), key=len, reverse=True):
        masked = masked.replace(secret, HIDDEN)
    sys.stdout.write(masked)


# -- sweeps ---------------------------------------------------------------------------------------


def _named_after_sweep(config: Config, configs: Sequence[Config], jobs: Sequence[Job]) -> Config:
    """Return the config with the swept keys in the generated name of its run."""
    if not isinstance(config, PPOConfig | SupervisedConfig):
        return config
    names = declared_short_names(type(config))
    values = flatten(config.model_dump(), leaf_fields(type(config)))
    keys = _swept_keys(configs, jobs)
    return name_after(
        config, {names[key].name if key in names else key.rpartition(".")[2]: values[key] for key in keys}
    )


def _swept_keys(configs: Sequence[Config], jobs: Sequence[Job], without: str = "") -> list[str]:
    """Return the keys in which the jobs of a sweep differ."""
    leaves = leaf_fields(type(configs[0]))
    values = [flatten(config.model_dump(), leaves) for config in configs]
    differing = [leaf for leaf in leaves if leaf != without and any(other[leaf] != values[0][leaf] for other in values)]
    overridden = {key for job in jobs for key in overridden_keys(job.overrides)}
    # Omit keys that differ only because they are interpolated from an overridden key. A config group sets keys without
    # an override; then all differing keys are used.
    return [leaf for leaf in differing if leaf in overridden] or differing


def _check_folders(configs: Sequence[Config], jobs: Sequence[Job]) -> None:
    """Raise a `ConfigError` if several jobs of a sweep would write to the same folder."""
    for key in ("trainer.default_local_dir", "trainer.export_path", "data.output_path", "data.metrics_path"):
        folders = [folder for folder in (_output_folder(config, key) for config in configs) if folder]
        folders = [folder for folder in folders if NUMBER not in folder]  # each run gets another number
        shared = next((folder for folder in folders if folders.count(folder) > 1), None)
        if shared is not None:
            raise ConfigError(
                f"{folders.count(shared)} jobs of this sweep would write to {key}={shared}.\n"
                f"Set {_separate_folders(key, shared, configs, jobs)}"
            )


def _output_folder(config: Config, key: str) -> str | None:
    if key == "trainer.export_path" and isinstance(config, SupervisedConfig):
        return config.export_path()
    values = config.model_dump()
    return get(values, key) if has_key(values, key) else None


def _separate_folders(key: str, shared: str, configs: Sequence[Config], jobs: Sequence[Job]) -> str:
    """Return an override that gives each job a separate folder, named after the values in which the jobs differ."""
    name, tree = "trainer.experiment_name", merge(raw_defaults(type(configs[0])), jobs[0].tree)
    by_name = has_key(tree, key) and f"${{{name}}}" in str(get(tree, key))
    target = name if by_name else key
    swept = _swept_keys(configs, jobs, without=target)
    if not swept:
        return "different values, because the configs of these jobs are equal."
    folder = "_".join(f"{leaf.rpartition('.')[2]}_${{{leaf}}}" for leaf in swept)
    return f"'{target}={folder}'" if by_name else f"'{target}={shared}/{folder}'"


def parse_options(overrides: list[str]) -> dict[str, Any]:
    """Parse arguments such as `["a=1", "b.c=true"]` to a nested dict, with the value syntax of config overrides."""
    invalid = [override for override in overrides if not override.partition("=")[2] or override.startswith("=")]
    if invalid:
        raise ConfigError(f"'{invalid[0]}' is not an option. Write KEY=VALUE, for example fsdp_size=2.")
    return to_dict(OmegaConf.from_dotlist(overrides))
