"""Checks and log lines of a run that resumes from a checkpoint.

    state = {..., "config": config_record(config)}              # saved with the checkpoint
    ...
    check_resume(saved, config, roles=["actor", "critic"])      # before anything is built
    log_resume(saved, total_steps)

Most config keys may change between two starts of a run, and changes are logged. Other changes raise an error: the
loader rejects other rows, engines reject another model or optimizer, and `check_resume` rejects missing roles.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from camshaft.checkpoint import Saved
from camshaft.config import PPOConfig, SupervisedConfig, without_secrets
from camshaft.config.tree import flatten, leaf_fields, shown
from camshaft.errors import CheckpointError

OF_ONE_START = ("trainer.resume_mode", "trainer.resume_from_path")
"""Keys of a single start, not of the run. `ray_kwargs` is also left out, because it may hold secrets."""

logger = logging.getLogger(__name__)


def config_record(config: PPOConfig | SupervisedConfig) -> dict[str, Any]:
    """Return the config as a JSON dict of dotted keys, without secrets."""
    values = flatten(without_secrets(config), leaf_fields(type(config)))
    return {key: value for key, value in values.items() if key not in OF_ONE_START}


def changes(before: Mapping[str, Any], config: PPOConfig | SupervisedConfig) -> list[str]:
    """Return the changed keys as overrides, each with its earlier value."""
    return [
        f"{key}={shown(value)} (was {shown(before[key])})"
        for key, value in config_record(config).items()
        if key in before and before[key] != value
    ]


def check_resume(saved: Saved, config: PPOConfig | SupervisedConfig, roles: Iterable[str]) -> None:
    """Log config changes since the checkpoint; raises an error if the checkpoint lacks a role of the run."""
    changed = changes(saved.state["config"], config)
    if changed:
        logger.warning("config changes since step %d: %s", saved.step, ", ".join(changed))
    missing = [role for role in roles if role not in saved.roles]
    if missing:
        raise CheckpointError(
            f"{saved.folder} has no {' and '.join(missing)}, which this run needs; use the checkpoint's config, or "
            "start a new run with trainer.resume_mode=disable"
            + (f". Changed keys: {', '.join(changed)}" if changed else "")
        )


def log_resume(saved: Saved, total_steps: int) -> None:
    """Log the next step, or that the run has already finished."""
    if saved.step < total_steps:
        logger.info("resumed from %s: step %d of %d is next", saved.folder, saved.step + 1, total_steps)
    else:
        logger.warning(
            "%s: the run has finished all %d steps; to continue, raise trainer.total_epochs or "
            "trainer.total_training_steps; to start over, use trainer.resume_mode=disable",
            *(saved.folder, total_steps),
        )
