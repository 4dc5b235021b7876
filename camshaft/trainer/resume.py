"""Checks and log messages for runs that resume from a checkpoint.

    state = {..., "config": config_record(config)}              # saved with the checkpoint
    ...
    check_resume(saved, config, roles=["actor", "critic"])      # before models are built
    log_resume(saved, total_steps)

Most config keys may change before a run resumes; the changes are logged. Other changes raise an error: the data loader
rejects different rows, engines reject a different model or optimizer, and `check_resume` rejects missing roles.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from camshaft.checkpoint import SavedCheckpoint
from camshaft.config import PPOConfig, SupervisedConfig, without_secrets
from camshaft.config.tree import flatten, format_value, leaf_fields
from camshaft.errors import CheckpointError

RESUME_KEYS = ("trainer.resume_mode", "trainer.resume_from_path")
"""Keys that are not recorded, because they apply only to the current start of the run."""

logger = logging.getLogger(__name__)


def config_record(config: PPOConfig | SupervisedConfig) -> dict[str, Any]:
    """Return the config as a dict of dotted keys and JSON values, without secrets."""
    values = flatten(without_secrets(config), leaf_fields(type(config)))
    return {key: value for key, value in values.items() if key not in RESUME_KEYS}


def list_changes(saved_values: Mapping[str, Any], config: PPOConfig | SupervisedConfig) -> list[str]:
    """Return the changed keys as overrides, each with its previous value."""
    return [
        f"{key}={format_value(value)} (was {format_value(saved_values[key])})"
        for key, value in config_record(config).items()
        if key in saved_values and saved_values[key] != value
    ]


def check_resume(saved: SavedCheckpoint, config: PPOConfig | SupervisedConfig, roles: Iterable[str]) -> None:
    """Log config changes since the checkpoint. Raise CheckpointError if a role of the run is missing in it."""
    changes = list_changes(saved.state["config"], config)
    if changes:
        logger.warning("config changes since step %d: %s", saved.step, ", ".join(changes))
    missing = [role for role in roles if role not in saved.roles]
    if missing:
        raise CheckpointError(
            f"{saved.folder} does not contain {' and '.join(missing)}, which this run needs; use the config of the "
            "checkpoint, or start a new run with trainer.resume_mode=disable"
            + (f". Changed keys: {', '.join(changes)}" if changes else "")
        )


def log_resume(saved: SavedCheckpoint, total_steps: int) -> None:
    """Log the next step, or a warning if the run has already finished."""
    if saved.step < total_steps:
        logger.info("resumed from %s: step %d of %d is next", saved.folder, saved.step + 1, total_steps)
    else:
        logger.warning(
            "the run in %s has finished all %d steps; to continue, increase trainer.total_epochs or "
            "trainer.total_training_steps; to start over, use trainer.resume_mode=disable",
            *(saved.folder, total_steps),
        )
