"""Weight sync between an engine and a rollout, and the memory hand-off between training and generation.

    from camshaft.reshard import rollout_mode
    with rollout_mode(engine, rollout) as sync:
        rollout.generate_sequences(...)
    sync.metrics()

The specification calls this the sharding manager. It depends on the two interfaces and on no backend: any engine
yields names and tensors, any rollout loads them. `hybrid.py` is the only module.
"""

from camshaft.reshard.hybrid import Sync, rollout_mode, sync_weights

__all__ = ["Sync", "rollout_mode", "sync_weights"]
