"""Names and folders of runs.

    generated_name("checkpoints/demo/*", "models/tiny", "data/sums/train.parquet")     # tiny-sums-20260131-235959
    with claimed_config(config) as config: ...      # creates the run folder
    run_name(config.trainer)                # in experiment trackers
    resume_arguments(config.trainer)        # "" if the same command resumes the run

A run without `trainer.experiment_name` gets a folder of its own, named after the model, the data and the time, so that
it neither resumes nor overwrites another run.
"""

import contextlib
import os.path
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from camshaft.config.errors import Problem
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.supervised import SupervisedConfig, SupervisedTrainerConfig
from camshaft.config.schema.trainer import TrainerConfig
from camshaft.config.tree import format_value

NAME, FOLDER = "trainer.experiment_name", "trainer.default_local_dir"
C = TypeVar("C", bound=PPOConfig | SupervisedConfig)
_generated: set[str] = set()
"""Names of this process without a folder. A sweep loads all its configs before the first run creates a folder."""


def generated_name(folder: str, model: str, data: str) -> str:
    """Return an unused name of a run. In `folder`, which is the folder of the run, `*` stands for the name."""
    return _unused(f"{_short_name(model)}-{_data_name(data)}-{time.strftime('%Y%m%d-%H%M%S')}", folder)


def _unused(name: str, folder: str) -> str:
    """Return the first of name, name-2, name-3, ... that is unused, and reserve it in this process."""
    candidates = (name, *(f"{name}-{count}" for count in range(2, 10_000)))
    unused = next(
        name
        for name in candidates
        if name not in _generated and not os.path.exists(os.path.expanduser(folder.replace("*", name)))
    )
    _generated.add(unused)
    return unused


@contextlib.contextmanager
def claimed_folder(folder: str) -> Iterator[str]:
    """Create a run folder with a generated name, and yield it; under another name if another process has created it.

    An error in the block removes what is created here, if it is empty. Other folders are not created.
    """
    name = next((part for part in PurePosixPath(folder).parts if part in _generated), None)
    if name is None:
        yield folder
        return
    claimed, path = name, Path(folder).expanduser()
    created = [path, *(parent for parent in path.parents if not parent.exists())]
    while not _create(path):
        _generated.discard(claimed)
        claimed = _unused(name, folder.replace(name, "*"))
        path = Path(folder.replace(name, claimed)).expanduser()
        created[0] = path
    _generated.discard(claimed)
    try:
        yield folder.replace(name, claimed)
    except BaseException:
        with contextlib.suppress(OSError):  # not empty
            for empty in created:
                empty.rmdir()
        raise


def _create(path: Path) -> bool:
    """Create a folder, and return False if it exists. The run reports other errors."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir()
    except OSError:
        return not path.is_dir()
    return True


@contextlib.contextmanager
def claimed_config(config: C) -> Iterator[C]:
    """Create the run folder with `claimed_folder`, and yield the config with its name."""
    folder = config.trainer.default_local_dir
    with claimed_folder(folder) as claimed:
        if claimed == folder:
            yield config
        else:
            parts = zip(PurePosixPath(folder).parts, PurePosixPath(claimed).parts, strict=True)
            old, new = next((old, new) for old, new in parts if old != new)
            yield type(config).model_validate(_renamed(config.model_dump(), old, new)).with_choices(config.choices())


def _renamed(value: Any, old: str, new: str) -> Any:
    """Replace the name of the run in all strings of a config."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, dict):
        return {key: _renamed(item, old, new) for key, item in value.items()}
    return type(value)(_renamed(item, old, new) for item in value) if isinstance(value, list | tuple) else value


def _short_name(path: str) -> str:
    """Return the last component of a path or URL without characters that are special in a shell."""
    return re.sub(r"[^\w.-]+", "_", PurePosixPath(path.rstrip("/")).name) or "run"


def _data_name(path: str) -> str:
    """Return the name of a file, or of its folder if the file is called train."""
    file = PurePosixPath(path)
    return _short_name(file.parent.name if file.stem == "train" and file.parent.name else file.stem)


def run_name(trainer: TrainerConfig | SupervisedTrainerConfig) -> str:
    """Return the name of a run in experiment trackers."""
    return trainer.experiment_name or Path(trainer.default_local_dir).name


def resume_arguments(trainer: TrainerConfig | SupervisedTrainerConfig) -> str:
    """Return the argument with which the command of a run resumes it. A run with a name does not need one."""
    return "" if trainer.experiment_name else f"trainer.default_local_dir={trainer.default_local_dir}"


def check_run_name(trainer: TrainerConfig | SupervisedTrainerConfig) -> Iterator[Problem]:
    """Check that the names of project and run are paths inside the default folder."""
    for leaf, name in {"project_name": trainer.project_name, "experiment_name": trainer.experiment_name}.items():
        if name is not None and not _is_inside(name):
            message = "must be a name, or a relative path without '.' and '..', because it is part of the run folder. "
            yield Problem(f"trainer.{leaf}", name, message + f"Set another name, or {FOLDER}=<folder> for any folder.")


def _is_inside(name: str) -> bool:
    parts = name.split("/")
    return all(part.strip() not in ("", ".", "..") for part in parts)


def uses_name(tree: Mapping[str, Any]) -> bool:
    """Return True if the run folder contains the name of the run. `tree` is the `trainer` section, unresolved."""
    return f"${{{NAME}}}" in format_value(tree.get("default_local_dir"))
