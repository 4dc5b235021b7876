"""Export the model of a checkpoint as a Hugging Face folder.

    export_checkpoint(Path("checkpoints/demo/tiny"), Path("models/mine"), ExportOptions())

The reference engine loads the checkpoint. Any engine, with any number of ranks, can have written it. The export is
verified before the folder appears: transformers loads it, and its log-probs (or values, or scores) must equal those of
the engine up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from camshaft import hub, storage
from camshaft.config import EngineConfig, EngineModel
from camshaft.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from camshaft.engine import BaseEngine

TRAINER = "trainer"
"""Subfolder of a checkpoint with the state of the trainer. It is written last."""
DEFAULT_ROLE = "actor"
"""Role to export if the path is the folder of a run or a checkpoint."""


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export, which are those of `camshaft export`."""

    model: str | None = None
    """Initial model of the run, if its folder has moved."""
    adapter: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    file_bytes: int = 4 * 2**30
    """Maximum size of a weight file."""
    force: bool = False
    """Replace an older export."""
    trust_remote_code: bool = False


@dataclass(frozen=True)
class RoleCheckpoint:
    """Checkpoint of a role: its folder, and the model, the seed and the tokenizer that it records."""

    folder: Path
    model: EngineModel
    seed: int
    tokenizer: str | None
    """Tokenizer folder of the run. None if the checkpoint does not record it."""


def export_checkpoint(checkpoint: Path, target: Path, options: ExportOptions) -> str:
    """Export the model or the adapter of a checkpoint to `target`, and return a description of the export."""
    from camshaft.checkpoint import Probe, check_export_path, export_adapter, export_hugging_face

    target = target.expanduser()
    role = find_role(checkpoint)
    model, tokenizer = _model(role, options), _tokenizer(role, options)
    check_export_path(target)
    if target.is_dir() and any(target.iterdir()) and not options.force:
        raise ConfigError(
            f"{target} contains an older export; use another folder, or replace the export (--force; in Python "
            "force=True)"
        )
    engine = _load_engine(role, model, options.dtype)
    with engine.eval_mode():
        probe = Probe(engine.infer_batch, options.dtype)
        if options.adapter:
            dtype = next(weight.dtype for _, weight in engine.named_weights())
            weights = ((name, weight.to(dtype)) for name, weight in engine.named_weights(adapter_only=True))
            export_adapter(weights, model, target, probe, tokenizer)
        else:
            weights = engine.named_weights()
            export_hugging_face(weights, model, target, probe, file_bytes=options.file_bytes, tokenizer=tokenizer)
    content = "adapter" if options.adapter else f"model ({model.head}, {options.dtype})"
    return f"{target}: {content} of {role.folder}"


# -- the checkpoint -------------------------------------------------------------------------------


def find_role(path: Path) -> RoleCheckpoint:
    """Return the role checkpoint to export.

    `path` is the folder of a role, of a checkpoint, or of a run. A checkpoint selects its actor or its only role. A run
    selects its newest complete checkpoint. This function does not load weights or verify checksums; the engine does so
    when it loads the checkpoint.
    """
    from camshaft.checkpoint.manager import Parts
    from camshaft.engine.checkpoint import STATE_FILE, read_state_file

    path = path.expanduser().absolute()
    is_role = (path / STATE_FILE).is_file() and not (path / TRAINER).is_dir()
    folder = path if is_role else _role_folder(path)
    manifest = storage.read_manifest(folder)  # raises an error if the checkpoint is incomplete
    if is_role and storage.is_complete(folder.parent / TRAINER):
        mismatch = Parts.read(folder.parent).mismatch(folder.name, manifest)
        if mismatch is not None:
            raise CheckpointError(f"{folder.parent} is damaged: {mismatch}; export the role from its own checkpoint")
    facts: dict[str, Any] = read_state_file(folder).get("engine", {})
    if "model" not in facts:
        raise CheckpointError(f"{folder} does not record its model: {STATE_FILE} contains no entry 'engine.model'")
    state = folder.parent / TRAINER / "state.json"
    tokenizer = storage.read_state(state).get("tokenizer") if state.is_file() else None
    return RoleCheckpoint(folder, EngineModel(**facts["model"]), facts["seed"], tokenizer)


def _role_folder(path: Path) -> Path:
    """Return the folder of the actor, or of the only role, in a checkpoint or in the newest checkpoint of a run."""
    from camshaft.checkpoint import CheckpointManager

    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist")
    if storage.step_folders(path):
        checkpoint = CheckpointManager(path).latest()
        if checkpoint is None:
            raise CheckpointError(
                f"{path} contains no complete checkpoint; use the folder of a role, which may be complete"
            )
    elif path in [folder for _, folder in storage.step_folders(path.parent)]:
        checkpoint = CheckpointManager(path.parent).open(path)
    else:
        content = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
        raise CheckpointError(
            f"{path} is not a checkpoint (it contains {content}); use the folder of a run, of a checkpoint in it "
            "(global_step_20), or of a role in a checkpoint (global_step_20/actor)"
        )
    return checkpoint.folder / (DEFAULT_ROLE if DEFAULT_ROLE in checkpoint.roles else checkpoint.roles[0])


# -- what to export -------------------------------------------------------------------------------


def _model(role: RoleCheckpoint, options: ExportOptions) -> EngineModel:
    """Return the model of the run, with the path that the command line sets."""
    model = role.model
    if (model.trust_remote_code or model.external_lib) and not options.trust_remote_code:
        raise ConfigError(
            f"{role.folder}: the run executed custom Python code (external_lib={model.external_lib}, "
            f"trust_remote_code={model.trust_remote_code}); if you trust this code, add --trust-remote-code "
            "to camshaft export"
        )
    if options.model is not None:
        model = model.model_copy(update={"path": options.model})
    elif not _is_available(model.path, weights=model.lora is not None):
        raise CheckpointError(
            f"{role.folder} requires the config and the tokenizer (with an adapter, also the weights) of the model "
            f"{model.path}, but this folder does not exist; set its path with --model FOLDER of camshaft export"
        )
    if options.adapter and model.lora is None:
        raise ConfigError(
            f"{role.folder} was trained without a LoRA adapter; remove --adapter (in Python adapter=True)"
        )
    if options.adapter and model.random_init:
        raise ConfigError(
            f"{role.folder}: the adapter cannot be exported without its base weights, which were initialized from a "
            "seed and are not in a model folder; remove --adapter (in Python adapter=True) to export the merged weights"
        )
    return model


def _is_available(path: str, weights: bool) -> bool:
    """Return True for a folder, a URL, and the name of a model in the Hugging Face cache."""
    return Path(path).is_dir() or storage.is_url(path) or hub.cached_folder(path, weights) is not None


def _tokenizer(role: RoleCheckpoint, options: ExportOptions) -> str | None:
    """Return the tokenizer folder of the run, or None if it is the model folder."""
    if role.tokenizer in (None, role.model.path):
        return None
    if Path(role.tokenizer).is_dir():
        return role.tokenizer
    if options.model is not None:
        return None
    raise CheckpointError(
        f"{role.folder} belongs to a run with the tokenizer {role.tokenizer}, but this folder does not exist; set "
        "another folder for both config and tokenizer with --model FOLDER of camshaft export"
    )


def _load_engine(role: RoleCheckpoint, model: EngineModel, dtype: str) -> BaseEngine:
    from camshaft.engine import build_engine

    if model.lora is None:
        model = model.model_copy(update={"random_init": True})  # the checkpoint contains all weights
    else:
        model = model.model_copy(update={"lora": model.lora.model_copy(update={"adapter_path": None})})
    engine = build_engine("reference", EngineConfig(model=model, dtype=dtype, seed=role.seed))  # pyright: ignore
    engine.init_model()
    engine.load_checkpoint(str(role.folder))
    return engine
