"""Compose and validate configs from command-line arguments.

    for config in compose(sys.argv[1:], PPOConfig): ...

Hydra parses the arguments (overrides, `-m`, `--config-dir`, ...) and composes the configs. `load.py` validates them.
"""

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from camshaft.config.hydra_errors import as_config_errors
from camshaft.config.hydra_files import check_aliases, keys_of_files
from camshaft.config.load import (
    DEFAULTS,
    HOME,
    Config,
    as_override,
    from_container,
    overridden_keys,
    override_defaults,
    prepare_overrides,
    to_dict,
)
from camshaft.config.schema.fields import Section
from camshaft.config.schema.supervised import SupervisedConfig
from camshaft.config.short_names import expand_overrides, short_names, suggest_names
from camshaft.config.tree import flatten, get, has_key, leaf_fields
from camshaft.errors import ConfigError
from camshaft.masking import HIDDEN, mask_yaml, remember_arguments, secret_values

_OVERRIDE = re.compile(r"(\+{0,2}[A-Za-z_$][\w$./@:-]*=|~[A-Za-z_])")
MIN_PRINTED_LENGTH = 6
"""Shortest secret that is masked wherever a printed config contains it, for example in the list of all overrides."""
_FOLDERS = ("--config-dir", "-cd", "--config-path", "-cp")
_PRINTS = ("--cfg", "-c", "--package", "-p")
"""Options of Hydra that print the config. Each of them takes a value."""
_TAKES_VALUE = (*_FOLDERS, *_PRINTS, "--config-name", "-cn", "--info", "-i", "--experimental-rerun")
_FLAGS = ("--hydra-help", "--help", "-h", "--resolve", "--multirun", "-m", "--run", "-r", "--version")
_OPTIONS = (*_TAKES_VALUE, *_FLAGS)
"""Options of Hydra that the commands accept."""


class Composed(NamedTuple):
    """Result of Hydra for one job."""

    tree: dict[str, Any]
    """The config before `${...}` is resolved."""
    overrides: list[str]
    file_keys: dict[str, Any]
    """Keys that config files set."""


def compose(argv: Sequence[str], schema: type[Config]) -> list[Config]:
    """Return the validated configs that `argv` describes: one config, or one per job of a sweep (`-m`).

    All configs of a sweep are validated before the function returns. With `--cfg job` the config is printed and
    validated, and the result is empty. Secrets in the printed config are masked. Hydra creates no folders, and does not
    change the working directory or logging.
    """
    remember_arguments(argv)
    _check_arguments(argv, schema)
    arguments = _expand_short_names(argv, schema)
    overrides = prepare_overrides(arguments, [str(HOME)])
    if (tree := override_defaults(schema, overrides)) is not None:
        return [from_container(tree, schema, overridden_keys(overrides))]
    arguments_without_printing = _without_printing(arguments)
    only_print = arguments_without_printing != arguments
    printed = io.StringIO()
    composed: list[Composed] = []
    try:
        if only_print:
            composed = _run_hydra(arguments_without_printing, schema)
            arguments = [*_overrides_of_files(composed, schema), *arguments]
        with contextlib.redirect_stdout(printed):
            composed = _run_hydra(arguments, schema) or composed
    finally:
        _print_masked(printed.getvalue(), [job.tree for job in composed])
    configs = [
        from_container(job.tree, schema, overridden_keys(job.overrides), file_keys=job.file_keys) for job in composed
    ]
    _check_folders(configs, composed)
    return [] if only_print else configs


def _overrides_of_files(composed: Sequence[Composed], schema: type[Config]) -> list[str]:
    """Return the keys that short names of config files set, as overrides, so that Hydra prints their values."""
    return [
        as_override(key, job.file_keys[key])
        for job in composed[:1]
        for key in short_names(schema).values()
        if key in job.file_keys and key not in overridden_keys(job.overrides)
    ]


def _print_masked(text: str, trees: Sequence[dict[str, Any]]) -> None:
    """Print the output of Hydra without secrets."""
    masked = mask_yaml(text)
    for secret in sorted(secret_values(*trees, min_length=MIN_PRINTED_LENGTH), key=len, reverse=True):
        masked = masked.replace(secret, HIDDEN)
    sys.stdout.write(masked)


def _check_arguments(argv: Sequence[str], schema: type[Section]) -> None:
    """Raise a `ConfigError` for an argument that is neither an option, nor a value of an option, nor an override."""
    for previous, argument in zip(["", *argv], argv, strict=False):
        is_override = "=" in argument or _OVERRIDE.match(argument)
        if not argument.startswith("-") and not is_override and previous not in _TAKES_VALUE:
            raise ConfigError(f"'{argument}' is not an override. Write key=value, for example trainer.seed=7.")
        names = suggest_names(argument.partition("=")[0].lstrip("-").replace("-", "_"), schema)
        if argument.startswith("-") and argument.partition("=")[0] not in _OPTIONS and previous not in _TAKES_VALUE:
            key = f" with the key {names[0]}" if names else ", for example trainer.seed=7"
            raise ConfigError(f"'{argument}' is not an option. Write key=value{key}.")


def _expand_short_names(argv: Sequence[str], schema: type[Config]) -> list[str]:
    """Replace short names in the overrides."""
    options = [argument for argument in argv if not _OVERRIDE.match(argument)]
    overrides = [argument for argument in argv if _OVERRIDE.match(argument)]
    folders = [folder for folder in map(_folder, options, [*options[1:], ""]) if folder]
    return [*expand_overrides(overrides, schema, [str(HOME), *folders]), *options]


def _without_printing(argv: Sequence[str]) -> list[str]:
    """Return the arguments without the options that print the config, such as `--cfg job`."""
    return [
        argument
        for previous, argument in zip(["", *argv], argv, strict=False)
        if argument.partition("=")[0] not in (*_PRINTS, "--resolve") and previous not in _PRINTS
    ]


# -- sweeps ---------------------------------------------------------------------------------------


def _check_folders(configs: Sequence[Config], composed: Sequence[Composed]) -> None:
    """Raise a `ConfigError` if several jobs of a sweep would write to the same folder."""
    for key in ("trainer.default_local_dir", "trainer.export_path", "data.output_path", "data.metrics_path"):
        folders = [folder for folder in (_output_folder(config, key) for config in configs) if folder]
        shared = next((folder for folder in folders if folders.count(folder) > 1), None)
        if shared is not None:
            raise ConfigError(
                f"{folders.count(shared)} jobs of this sweep would write to {key}={shared}.\n"
                f"Set {_separate_folders(key, shared, configs, composed)}"
            )


def _output_folder(config: Config, key: str) -> str | None:
    if key == "trainer.export_path" and isinstance(config, SupervisedConfig):
        return config.export_path()
    values = config.model_dump()
    return get(values, key) if has_key(values, key) else None


def _separate_folders(key: str, shared: str, configs: Sequence[Config], composed: Sequence[Composed]) -> str:
    """Return an override that gives each job a separate folder, named after the values in which the jobs differ."""
    name, tree = "trainer.experiment_name", composed[0].tree
    by_name = has_key(tree, key) and f"${{{name}}}" in str(get(tree, key))
    target = name if by_name else key
    leaves = leaf_fields(type(configs[0]))
    values = [flatten(config.model_dump(), leaves) for config in configs]
    differing = [leaf for leaf in leaves if leaf != target and any(other[leaf] != values[0][leaf] for other in values)]
    overridden = {key for job in composed for key in overridden_keys(job.overrides)}
    # Omit keys that differ only because they are interpolated from an overridden key. A config group sets keys without
    # an override; then all differing keys are used.
    swept = [leaf for leaf in differing if leaf in overridden] or differing
    if not swept:
        return "different values, because the configs of these jobs are equal."
    folder = "_".join(f"{leaf.rpartition('.')[2]}_${{{leaf}}}" for leaf in swept)
    return f"'{target}={folder}'" if by_name else f"'{target}={shared}/{folder}'"


# -- Hydra ----------------------------------------------------------------------------------------


def _run_hydra(argv: list[str], schema: type[Section]) -> list[Composed]:
    """Run `hydra.main` and return its results. Empty if Hydra only printed."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    configs: list[Composed] = []
    process = os.getpid()

    def collect(composed: DictConfig) -> None:
        if os.getpid() != process:
            raise ConfigError(
                "hydra/launcher is not supported, because the jobs of a sweep run in this process. Omit the key."
            )
        settings = HydraConfig.get()
        # As typed: an interpolated value may contain characters that the grammar accepts only in quotes.
        typed = OmegaConf.to_container(settings.overrides, resolve=False)
        assert isinstance(typed, dict)
        overrides = typed["task"]
        file_keys = keys_of_files(schema, [*overrides, *typed["hydra"]], settings, HOME)
        configs.append(Composed(to_dict(composed), overrides, file_keys))

    main = hydra.main(version_base="1.3", config_path=str(HOME), config_name=DEFAULTS[schema])(collect)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = _hydra_arguments(argv, scratch)
        with as_config_errors(filter(_OVERRIDE.match, arguments)), _process_arguments([sys.argv[0], *arguments]):
            main()
    return configs


def _hydra_arguments(argv: list[str], scratch: str) -> list[str]:
    """Return the arguments for Hydra: settings that keep it from writing files, the overrides, then the options."""
    overrides = [argument for argument in argv if _OVERRIDE.match(argument)]
    options = [argument for argument in argv if not _OVERRIDE.match(argument)]
    quiet = [
        f"hydra.run.dir={scratch}",
        f"hydra.sweep.dir={scratch}",
        "hydra.output_subdir=null",
        "hydra.job.chdir=false",
        "hydra.job.name=camshaft",
    ]
    quiet += [
        f"hydra/{kind}=none"
        for kind in ("job_logging", "hydra_logging")
        if not any(override.startswith(f"hydra/{kind}=") for override in overrides)
    ]
    folders = [value for value in map(_folder, options, [*options[1:], ""]) if value]
    for folder in folders:
        check_aliases(Path(folder))
    return [*quiet, *prepare_overrides(overrides, folders), *options]


def _folder(option: str, next_option: str) -> str:
    """Return the folder that an option of Hydra adds to the search path, or an empty string."""
    name, equals, value = option.partition("=")
    if name not in _FOLDERS:
        return ""
    return value if equals else next_option


@contextlib.contextmanager
def _process_arguments(argv: list[str]) -> Iterator[None]:
    """Set `sys.argv`, which Hydra parses, and HYDRA_FULL_ERROR, so that Hydra raises errors instead of exiting."""
    previous, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = argv, "1"
    try:
        yield
    finally:
        sys.argv = previous
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full


def parse_options(overrides: list[str]) -> dict[str, Any]:
    """Parse arguments such as `["a=1", "b.c=true"]` to a nested dict, with the value syntax of config overrides."""
    invalid = [override for override in overrides if not override.partition("=")[2] or override.startswith("=")]
    if invalid:
        raise ConfigError(f"'{invalid[0]}' is not an option. Write KEY=VALUE, for example fsdp_size=2.")
    tree = OmegaConf.to_container(OmegaConf.from_dotlist(overrides))
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}
