"""Compose validated configs from the arguments of a command.

    for config in compose(sys.argv[1:], PPOConfig): ...

Hydra parses the arguments (overrides, `-m`, `--config-dir`, ...) and composes; `loader.py` validates the result.
"""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from camshaft.config.loader import DEFAULTS, HOME, Config, as_config_errors, forced, from_container, keys_of, plain
from camshaft.config.schema.evaluation import EvalConfig
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.supervised import SupervisedConfig
from camshaft.config.tree import flatten, get, has, leaf_fields
from camshaft.errors import ConfigError

_OVERRIDE = re.compile(r"(\+{0,2}[A-Za-z_$][\w$./@:-]*=|~[A-Za-z_])")
_FOLDERS = ("--config-dir", "-cd", "--config-path", "-cp")
_PRINTS = ("--cfg", "-c", "--package", "-p")
"""Options of Hydra that print the config; each takes a value."""
_TAKES_VALUE = (*_FOLDERS, *_PRINTS, "--config-name", "-cn", "--info", "-i", "--experimental-rerun")

Composed = list[tuple[dict[str, Any], list[str]]]
"""The config of each job, `${...}` unresolved, with the overrides that made it."""


def compose(argv: Sequence[str], schema: type[Config]) -> list[Config]:
    """Compose and validate the configs that `argv` describes: one, or one per run of a sweep (`-m`).

    All configs of a sweep are validated before any is returned. `--cfg job` prints and validates the config and
    returns none. Hydra only composes: it creates no folders, changes no directory and sets up no logging.
    """
    words, config_name = list(argv), DEFAULTS[schema]
    _check_words(words)
    composed = _composed_by_main(words, config_name)
    silent = _without_printing(words)
    only_print = silent != words
    if only_print:
        composed = _composed_by_main(silent, config_name)
    configs = [from_container(tree, schema, keys_of(typed)) for tree, typed in composed]
    _check_folders(configs, composed)
    return [] if only_print else configs


def _check_words(words: Sequence[str]) -> None:
    """A word that is neither an option, nor the value of one, nor an override."""
    for before, word in zip(["", *words], words, strict=False):
        if not word.startswith("-") and "=" not in word and not _OVERRIDE.match(word) and before not in _TAKES_VALUE:
            raise ConfigError(f"'{word}' says nothing by itself: give key=value, for instance trainer.seed=7.")


def _without_printing(words: Sequence[str]) -> list[str]:
    """The words without `--cfg job` and what goes with it."""
    return [
        word
        for before, word in zip(["", *words], words, strict=False)
        if word.partition("=")[0] not in (*_PRINTS, "--resolve") and before not in _PRINTS
    ]


# -- sweeps ---------------------------------------------------------------------------------------


def _check_folders(configs: Sequence[Config], composed: Composed) -> None:
    """Each job of a sweep needs folders of its own, or it would go on from, or write over, what another left."""
    for key in ("trainer.default_local_dir", "trainer.export_path", "data.output_path", "data.metrics_path"):
        folders = [folder for folder in (_folder_of(config, key) for config in configs) if folder]
        shared = next((folder for folder in folders if folders.count(folder) > 1), None)
        if shared is not None:
            raise ConfigError(
                f"{folders.count(shared)} jobs of this sweep would write to {key}={shared}.\n"
                f"Type {_own_folder(key, shared, configs, composed)}"
            )


def _folder_of(config: Config, key: str) -> str | None:
    if isinstance(config, EvalConfig):
        return {"data.output_path": config.data.output_path, "data.metrics_path": config.data.metrics_path}.get(key)
    if isinstance(config, GenerateConfig):
        return config.data.output_path if key == "data.output_path" else None
    if key == "trainer.default_local_dir":
        return config.trainer.default_local_dir
    return config.export_path() if isinstance(config, SupervisedConfig) and key == "trainer.export_path" else None


def _own_folder(key: str, shared: str, configs: Sequence[Config], composed: Composed) -> str:
    """What to type, so that the folder depends on what the jobs differ in."""
    name, written = "trainer.experiment_name", composed[0][0]
    by_name = has(written, key) and f"${{{name}}}" in str(get(written, key))
    target = name if by_name else key
    leaves = leaf_fields(type(configs[0]))
    values = [flatten(config.model_dump(), leaves) for config in configs]
    differing = [leaf for leaf in leaves if leaf != target and any(other[leaf] != values[0][leaf] for other in values)]
    typed = {word for _, words in composed for word in keys_of(words)}
    # What follows from a typed key need not be named; a group of a file is no key, so what it set is.
    swept = [leaf for leaf in differing if leaf in typed] or differing
    if not swept:
        return "other values in each: these jobs have one config."
    own = "_".join(f"{leaf.rpartition('.')[2]}_${{{leaf}}}" for leaf in swept)
    return f"'{target}={own}'" if by_name else f"'{target}={shared}/{own}'"


# -- Hydra ----------------------------------------------------------------------------------------


def _composed_by_main(argv: list[str], config_name: str) -> Composed:
    """What `hydra.main` composes, with the overrides of each; empty where it only printed something."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    found: Composed = []
    here = os.getpid()

    def collect(composed: DictConfig) -> None:
        if os.getpid() != here:
            raise ConfigError("sweeps run in this process, one job after another: leave out hydra/launcher")
        found.append((plain(composed), list(HydraConfig.get().overrides.task)))

    main = hydra.main(version_base="1.3", config_path=str(HOME), config_name=config_name)(collect)
    with tempfile.TemporaryDirectory() as scratch:
        words = _words(argv, scratch)
        with as_config_errors(filter(_OVERRIDE.match, words)), _as_process([sys.argv[0], *words]):
            main()
    return found


def _words(argv: list[str], scratch: str) -> list[str]:
    """`argv` for Hydra: the overrides first, all in one place, then the options."""
    overrides = [word for word in argv if _OVERRIDE.match(word)]
    options = [word for word in argv if not _OVERRIDE.match(word)]
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
        if not any(word.startswith(f"hydra/{kind}=") for word in overrides)
    ]
    folders = [value for value in map(_folder, options, [*options[1:], ""]) if value]
    return [*quiet, *forced(overrides, folders), *options]


def _folder(option: str, following: str) -> str:
    """The folder that an option of Hydra adds to the search path, or nothing."""
    name, equals, value = option.partition("=")
    if name not in _FOLDERS:
        return ""
    return value if equals else following


@contextlib.contextmanager
def _as_process(argv: list[str]) -> Iterator[None]:
    """Hydra reads its words from the process, and lets errors out whole only if the environment says so."""
    words, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = argv, "1"
    try:
        yield
    finally:
        sys.argv = words
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full


def as_tree(words: list[str]) -> dict[str, Any]:
    """`["a=1", "b.c=true"]` as nested options, values read as those of a run are."""
    wrong = [word for word in words if not word.partition("=")[2] or word.startswith("=")]
    if wrong:
        raise ConfigError(f"{wrong[0]}: type KEY=VALUE, for instance fsdp_size=2")
    tree = OmegaConf.to_container(OmegaConf.from_dotlist(words))
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}
