"""Checkpoints of a run: one folder a step, complete only when every role and the trainer have written.

    manager = CheckpointManager("checkpoints/demo")
    manager.save(20, {"actor": actor.save_checkpoint}, state={"loader": loader.state_dict()}, keep={"actor": 3})
    manager.latest()           # -> Saved(step=20, folder=..., state={...}) or None

Engines write their own folders (see `storage.py`); this package knows in which order, and which are whole.
"""

from camshaft.checkpoint.export import Probe, check_export_path, export_adapter, export_hugging_face
from camshaft.checkpoint.manager import CheckpointManager, Saved

__all__ = ["CheckpointManager", "Probe", "Saved", "check_export_path", "export_adapter", "export_hugging_face"]
