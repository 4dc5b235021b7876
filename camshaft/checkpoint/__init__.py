"""Checkpoints and exports.

    manager.py    CheckpointManager: one folder per step, complete only after every role and the trainer have written
    export.py     export a model or a LoRA adapter as a Hugging Face folder, verified before it appears
    best.py       BestStep: the best step by a validation metric

    manager = CheckpointManager("checkpoints/demo")
    manager.save(20, {"actor": actor.save_checkpoint}, state={"loader": loader.state_dict()}, keep={"actor": 3})
    manager.latest()           # -> Saved(step=20, folder=..., state={...}) or None

Engines write their folders with `storage.py`; the manager defines the order of writes, and which steps are complete.
"""

from camshaft.checkpoint.best import BestStep
from camshaft.checkpoint.export import Probe, check_export_path, export_adapter, export_hugging_face
from camshaft.checkpoint.manager import CheckpointManager, Saved

__all__ = [
    "BestStep",
    "CheckpointManager",
    "Probe",
    "Saved",
    "check_export_path",
    "export_adapter",
    "export_hugging_face",
]
