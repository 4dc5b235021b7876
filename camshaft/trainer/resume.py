"""Checks and log messages for runs that resume from a checkpoint.

    state = {..., "config": config_record(config), "inputs": input_checksums(config)}      # saved with the checkpoint
    ...
    check_resume(saved, config, ["actor", "critic"], input_checksums(config))       # before models are built
    log_resume(saved, total_steps)

Most config keys may change before a run resumes; the changes are logged. Other changes raise an error: the data loader
rejects different rows, engines reject a different architecture or optimizer, and `check_resume` rejects missing roles,
other initial weights and another reward function (`input_checksums`).
"""

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from camshaft.agents.messages import Source
from camshaft.checkpoint import SavedCheckpoint
from camshaft.checkpoint.manager import LATEST
from camshaft.config import PPOConfig, SupervisedConfig, without_secrets
from camshaft.config.schema.agents import AGENT_KEY, KEY, TOOLS_KEY
from camshaft.config.schema.trainer import TrainerConfig
from camshaft.config.tree import flatten, format_value, leaf_fields
from camshaft.errors import CamshaftError, CheckpointError
from camshaft.models.loader import model_folder
from camshaft.plugins import function_file
from camshaft.rewards.callables import reward_checksum
from camshaft.rewards.messages import FunctionSpec
from camshaft.tracking.durable import Ranges
from camshaft.tracking.run_folder import RunFolder

SAMPLE_BYTES = 1 << 20
"""Number of bytes at the start and at the end of a weight file that `input_checksums` reads."""

RESUME_KEYS = ("trainer.resume_mode", "trainer.resume_from_path")
"""Keys that are not recorded, because they apply only to the current start of the run."""

REWARD, ENVIRONMENT = "reward", "environment"
"""Keys of the checksums of a reward, and of environments or a program, that were passed from Python."""

logger = logging.getLogger(__name__)


def config_record(config: PPOConfig | SupervisedConfig) -> dict[str, Any]:
    """Return the config as a dict of dotted keys and JSON values, without secrets."""
    values = flatten(without_secrets(config), leaf_fields(type(config)))
    return {key: value for key, value in values.items() if key not in RESUME_KEYS}


def resumed_values(config: PPOConfig | SupervisedConfig) -> dict[str, Any]:
    """Return the recorded values of the run that a run resumes, by dotted key. A new run resumes none."""
    trainer = config.trainer
    if isinstance(trainer, TrainerConfig) and trainer.resume_mode == "resume_path" and trainer.resume_from_path:
        return RunFolder(Path(trainer.resume_from_path).expanduser().parent).config()
    folder = Path(trainer.default_local_dir).expanduser()
    return RunFolder(folder).config() if trainer.resume_mode == "auto" and (folder / LATEST).exists() else {}


def list_changes(saved_values: Mapping[str, Any], config: PPOConfig | SupervisedConfig) -> list[str]:
    """Return the changed keys as overrides, each with its previous value."""
    return [
        f"{key}={format_value(value)} (was {format_value(saved_values[key])})"
        for key, value in config_record(config).items()
        if key in saved_values and saved_values[key] != value
    ]


def check_resume(
    saved: SavedCheckpoint, config: PPOConfig | SupervisedConfig, roles: Iterable[str], checksums: Mapping[str, str]
) -> None:
    """Log config changes since the checkpoint. Raise CheckpointError if a role of the run is missing in it.

    Also raise it if the `checksums` of the run, those of `input_checksums`, have changed.
    """
    changes = list_changes(saved.state["config"], config)
    if changes:
        logger.warning("config changes since step %d: %s", saved.step, ", ".join(changes))
    saved_checksums = saved.state["inputs"]
    changed_inputs = [key for key, checksum in checksums.items() if saved_checksums.get(key, checksum) != checksum]
    if changed_inputs:
        nouns = {REWARD: "the reward functions", ENVIRONMENT: "the environments or the program"}
        inputs = [nouns.get(key, f"the files of {key}") for key in changed_inputs]
        message = f"{' and '.join(inputs)} differ from those that {saved.folder} was saved with"
        if config.trainer.resume_mode == "auto":
            fix = "the previous files"
            if isinstance(config, PPOConfig):
                fix = f"trainer.resume_mode=resume_path trainer.resume_from_path={saved.folder}"
            raise CheckpointError(
                f"{message}; to continue this run, use {fix}; to start a new run, use another folder (out=...) or "
                "trainer.resume_mode=disable"
            )
        logger.warning("%s", message)
    missing = [role for role in roles if role not in saved.roles]
    if missing:
        raise CheckpointError(
            f"{saved.folder} does not contain {' and '.join(missing)}, which this run needs; use the config of the "
            "checkpoint, or start a new run with trainer.resume_mode=disable"
            + (f". Changed keys: {', '.join(changes)}" if changes else "")
        )


def recorded_steps(saved: SavedCheckpoint | None, folder: str | Path) -> dict[str, Ranges]:
    """Return the steps whose `metrics` and `samples` were stored in a run folder when it saved the checkpoint.

    Without a checkpoint there are none. A checkpoint of an earlier version does not record them, and for one from
    another folder or from the mirror, they are stored elsewhere.
    """
    nothing: dict[str, Ranges] = {"metrics": (), "samples": ()}
    if saved is None or saved.is_fetched or saved.folder.parent.resolve() != Path(folder).expanduser().resolve():
        return nothing
    return nothing | saved.state.get("recorded", {})


def input_checksums(
    config: PPOConfig | SupervisedConfig, reward: Sequence[FunctionSpec] = (), environments: Sequence[Source] = ()
) -> dict[str, str]:
    """Return a checksum for each config key that names the files of a model, a reward function or an environment.

    Of each file, only the size, the start and the end are read. `reward` and `environments` are those from Python.
    """
    if isinstance(config, PPOConfig):
        section, reward_model = config.actor_rollout_ref, config.reward_model
        files = {
            "actor_rollout_ref.model.path": _model_files(section.model.source()),
            "critic.model.path": _model_files(config.critic.model.source()) if config.needs_critic() else [],
            "reward_model.model.path": _model_files(reward_model.model.source()) if reward_model.enable else [],
        }
        custom = config.custom_reward_function
        paths = [Path(function.path).expanduser() for function in custom.selected() if function.path is not None]
        key = "custom_reward_function.functions" if custom.functions else "custom_reward_function.path"
        files[key] = [path for path in dict.fromkeys(paths) if path.is_file()]  # others are names of modules
        turns = section.rollout.multi_turn
        for key, selected in ((KEY, turns.selected()), (TOOLS_KEY, turns.selected_tools())):
            paths = [Path(target.rpartition(":")[0] or target) for _, target in selected]
            files[f"actor_rollout_ref.rollout.{key}"] = [path for path in dict.fromkeys(paths) if path.is_file()]
        agent = function_file(section.rollout.multi_turn.agent or "")
        files[f"actor_rollout_ref.rollout.{AGENT_KEY}"] = [] if agent is None else [Path(agent)]
    else:
        files = {"model.path": _model_files(config.model.source())}
    checksums = {key: checksum(paths) for key, paths in files.items() if paths}
    if environments:
        checksums[ENVIRONMENT] = hashlib.sha256(
            "".join(source.checksum for source in environments).encode()
        ).hexdigest()
    return checksums | ({REWARD: reward_checksum(reward)} if reward else {})


def checksum(paths: Iterable[Path]) -> str:
    """Return a checksum of the names, the sizes, and the starts and ends of files."""
    parts = [f"{path.name} {path.stat().st_size} ".encode() + _start_and_end(path) for path in paths]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _model_files(path: str) -> list[Path]:
    """Return the config and the weight files of a model folder or of the local copy of a URL."""
    try:
        folder = model_folder(path)
    except CamshaftError:  # a custom role may not need it; otherwise the role that loads it raises the error
        return []
    return sorted([*folder.glob("config.json"), *folder.glob("*.safetensors"), *folder.glob("*.bin")])


def _start_and_end(file: Path) -> bytes:
    with open(file, "rb") as handle:
        start = handle.read(SAMPLE_BYTES)
        handle.seek(max(len(start), file.stat().st_size - SAMPLE_BYTES))
        return start + handle.read()


def log_resume(saved: SavedCheckpoint, total_steps: int) -> None:
    """Log the next step, or a warning if the run has already finished."""
    if saved.step < total_steps:
        logger.info("resumed from %s: step %d of %d is next", saved.folder, saved.step + 1, total_steps)
    else:
        logger.warning(
            "the run in %s has finished all %d steps; to continue, increase steps (trainer.total_training_steps) or "
            "epochs (trainer.total_epochs); to start over, use trainer.resume_mode=disable",
            *(saved.folder, total_steps),
        )
