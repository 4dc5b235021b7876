"""Names and folders of runs.

    generated_name("models/tiny")           # tiny-<number>
    number_run(config)                      # the config with the folder tiny-3, which now exists
    run_name(config.trainer)                # in experiment trackers
    resume_arguments(config.trainer)        # "" if the same command resumes the run

A run without `trainer.experiment_name` gets a folder of its own, named after the model, the swept keys and a number, so
that it neither resumes nor overwrites another run: `tiny-3`, or `tiny-lr=0.003-4` in a sweep over `lr`.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from pydantic import BaseModel

from camshaft import storage
from camshaft.config.errors import Problem
from camshaft.config.guards import is_list
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.supervised import SupervisedConfig
from camshaft.config.schema.trainer import RunConfig
from camshaft.config.tree import format_value

NAME, FOLDER = "trainer.experiment_name", "trainer.default_local_dir"
NUMBER = "<number>"
"""Placeholder of the number in a generated name, which `number_run` replaces when the run starts."""
MAX_SWEPT = 3
"""Maximum number of swept keys in a generated name."""
_NUMBERED = re.compile(r"-(\d{1,6})$")

Config = TypeVar("Config", bound=PPOConfig | SupervisedConfig)


def generated_name(model: str) -> str:
    """Return the name of a run, with a placeholder for its number."""
    return f"{_plain(PurePosixPath(model.rstrip('/')).name) or 'run'}-{NUMBER}"


def _plain(text: str) -> str:
    """Return a text without characters that are special in a shell."""
    return re.sub(r"[^\w.+-]+", "_", text)


def name_after(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the config with values of swept keys in the generated name, such as `tiny-lr=0.003-<number>`."""
    parts = [f"{name}={_plain(format_value(value))[:20]}-" for name, value in list(values.items())[:MAX_SWEPT]]
    return _replaced(config, NUMBER, "".join([*parts, NUMBER]))


def number_run(config: Config) -> Config:
    """Return the config with a number in place of the placeholder, and create the run folder with this number."""
    folder = config.trainer.default_local_dir
    return _replaced(config, NUMBER, _reserve_number(Path(folder))) if NUMBER in folder else config


def numbered_folder(folder: Path) -> Path:
    """Return the folder with a number in place of the placeholder, and create it."""
    return Path(str(folder).replace(NUMBER, _reserve_number(folder))) if NUMBER in str(folder) else folder


def _reserve_number(folder: Path) -> str:
    """Create the folder with the first number after those of the folders beside it, and return the number.

    Only one of the runs that start at the same time can create the folder of a number.
    """
    index = next(index for index, part in enumerate(folder.parts) if NUMBER in part)
    parent, name = Path(*folder.parts[:index]), folder.parts[index]
    storage.make_folder(parent)
    numbers = [int(match[1]) for path in parent.iterdir() if (match := _NUMBERED.search(path.name))]
    number = max(numbers, default=0) + 1
    while True:
        try:
            (parent / name.replace(NUMBER, str(number))).mkdir()
        except FileExistsError:
            number += 1
        else:
            return str(number)


def _replaced(value: Any, old: str, new: str) -> Any:
    """Return a config value in which a text is replaced in all strings."""
    if isinstance(value, str):
        return value.replace(old, new)
    if is_list(value):
        items = [_replaced(item, old, new) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, BaseModel):
        return value.model_copy(update={name: _replaced(field, old, new) for name, field in value})
    return value


def run_name(trainer: RunConfig) -> str:
    """Return the name of a run in experiment trackers."""
    return trainer.experiment_name or Path(trainer.default_local_dir).name


def resume_arguments(trainer: RunConfig) -> str:
    """Return the argument with which the command of a run resumes it. A run with a name does not need one."""
    return "" if trainer.experiment_name else f"trainer.default_local_dir={trainer.default_local_dir}"


def check_run_name(trainer: RunConfig) -> Iterator[Problem]:
    """Check that the names of project and run are paths inside the default folder."""
    for leaf, name in {"project_name": trainer.project_name, "experiment_name": trainer.experiment_name}.items():
        if name is not None and any(part.strip() in ("", ".", "..") for part in name.split("/")):
            message = "must be a name, or a relative path without '.' and '..', because it is part of the run folder. "
            yield Problem(f"trainer.{leaf}", name, message + f"Set another name, or {FOLDER}=<folder> for any folder.")


def uses_name(tree: Mapping[str, Any]) -> bool:
    """Return True if the run folder contains the name of the run. `tree` is the `trainer` section, unresolved."""
    return f"${{{NAME}}}" in format_value(tree.get("default_local_dir"))
