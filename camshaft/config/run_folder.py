"""Names and folders of runs.

    generated_name("models/tiny", "data/sums/train.parquet")     # tiny-sums-20260131-235959-7f3a91c2
    run_name(config.trainer)                # in experiment trackers
    resume_arguments(config.trainer)        # "" if the same command resumes the run

A run without `trainer.experiment_name` gets a folder of its own, named after the model, the data and the time, so that
it neither resumes nor overwrites another run.
"""

import re
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from camshaft.config.errors import Problem
from camshaft.config.schema.trainer import RunConfig
from camshaft.config.tree import format_value

NAME, FOLDER = "trainer.experiment_name", "trainer.default_local_dir"


def generated_name(model: str, data: str) -> str:
    """Return a name of a run. It ends with random hexadecimal digits, because runs can start in the same second."""
    return f"{_short_name(model)}-{_data_name(data)}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def _short_name(path: str) -> str:
    """Return the last component of a path or URL without characters that are special in a shell."""
    return re.sub(r"[^\w.-]+", "_", PurePosixPath(path.rstrip("/")).name) or "run"


def _data_name(path: str) -> str:
    """Return the name of a file, or of its folder if the file is called train."""
    file = PurePosixPath(path)
    return _short_name(file.parent.name if file.stem == "train" and file.parent.name else file.stem)


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
