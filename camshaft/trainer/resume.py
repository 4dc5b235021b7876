"""A run that goes on: what its config was when the step was saved, and what a user should know of it.

    state = {..., "config": remembered(config)}
    ...
    check_resume(saved, config, roles=["actor", "critic"])      # before anything is built
    told_resume(saved, total_steps)

Most of a config may change between two starts; what changed is logged. What may not is refused where it is known: other
rows by the loader, another model or optimizer by its engine, a role that was not saved here.
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
"""Keys that speak of one start of a run, not of the run; `ray_kwargs` does too, and is not told for its secrets."""

logger = logging.getLogger(__name__)


def remembered(config: PPOConfig | SupervisedConfig) -> dict[str, Any]:
    """The config by dotted keys, as JSON, without secrets."""
    values = flatten(without_secrets(config), leaf_fields(type(config)))
    return {key: value for key, value in values.items() if key not in OF_ONE_START}


def changes(before: Mapping[str, Any], config: PPOConfig | SupervisedConfig) -> list[str]:
    """What the config says otherwise than it did, as it is typed."""
    return [
        f"{key}={shown(value)} (was {shown(before[key])})"
        for key, value in remembered(config).items()
        if key in before and before[key] != value
    ]


def check_resume(saved: Saved, config: PPOConfig | SupervisedConfig, roles: Iterable[str]) -> None:
    """Say what changed since; an error if the step lacks a role that the run has."""
    changed = changes(saved.state["config"], config)
    if changed:
        logger.warning("since step %d was saved the config has changed: %s", saved.step, ", ".join(changed))
    missing = [role for role in roles if role not in saved.roles]
    if missing:
        raise CheckpointError(
            f"{saved.folder} was saved by a run without {' and '.join(missing)}, and this run has one. Give the config "
            "that it was saved with, or start afresh: type trainer.resume_mode=disable"
            + (f". What differs: {', '.join(changed)}" if changed else "")
        )


def told_resume(saved: Saved, total_steps: int) -> None:
    """Say where a run goes on, or that there is nothing left to do."""
    if saved.step < total_steps:
        logger.info("resumed from %s: step %d of %d is next", saved.folder, saved.step + 1, total_steps)
    else:
        logger.warning(
            "%s is the end of a finished run: all %d steps are done. For more raise trainer.total_epochs or "
            "trainer.total_training_steps; to start over type trainer.resume_mode=disable",
            *(saved.folder, total_steps),
        )
