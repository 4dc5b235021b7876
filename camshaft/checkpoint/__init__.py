"""Checkpoints and exports.

    manager.py    CheckpointManager: saves, lists, copies and removes the checkpoints of a run
    export.py     exports a model or a LoRA adapter as a Hugging Face folder, and verifies it
    best.py       BestStep: selects the best step by a validation metric
    in_flight.py  batches that are generated and not learned, in the state of the trainer

    manager = CheckpointManager("checkpoints/demo")
    manager.save(20, {"actor": actor.save_checkpoint}, state={"loader": loader.state_dict()}, keep={"actor": 3})
    manager.latest()           # -> SavedCheckpoint(step=20, folder=..., state={...}) or None

A checkpoint has one folder per role, which the engine writes, and one for the state of the trainer. It is complete when
all of them are.
"""

from camshaft.checkpoint.best import BestStep
from camshaft.checkpoint.export import Probe, check_export_path, export_adapter, export_hugging_face
from camshaft.checkpoint.manager import CheckpointManager, SavedCheckpoint

__all__ = [
    "BestStep",
    "CheckpointManager",
    "Probe",
    "SavedCheckpoint",
    "check_export_path",
    "export_adapter",
    "export_hugging_face",
]
